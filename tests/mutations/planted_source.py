"""Faults planted in rendered sources, run by the emulated executor."""

from __future__ import annotations

from mutations.planted import CAUSAL, FP32, NONE, WINDOW, PlantedInSource

QUERIES_KEPT = {"q_in_registers": 1}
ONE_STAGE = {"num_stages": 1}
LAZY = {"rescale_threshold": 8}
_WAIT = "copy_async_wait<2 * C::NUM_STAGES - 2>();"
_TWO_SCORES = "multiply_16x8x16(scores[m][n + 1], a[m], b[2], b[3], Element{});"
_TWO_OUTPUTS = "multiply_16x8x16(output[m][d + 1], a[m], b[2], b[3], Element{});"

AMPERE = (
    PlantedInSource("no wait for copies", _WAIT, ""),
    PlantedInSource("waits for one group too few", _WAIT, _WAIT.replace("- 2>", "- 1>")),
    PlantedInSource("no barrier after the wait", f"{_WAIT}\n    block_sync();", _WAIT),
    PlantedInSource("no barrier after the wait, one stage", f"{_WAIT}\n    block_sync();", _WAIT, changes=ONE_STAGE),
    PlantedInSource(
        "values from the neighbouring slot", "rows.accumulate(scores, ring.values(step))", "rows.accumulate(scores, ring.values(step + 1))"
    ),
    PlantedInSource("one slot for all keys", "step % C::NUM_STAGES * Shape::K_BYTES", "step % 1 * Shape::K_BYTES", slow=True),
    PlantedInSource("rings overwrite the queries", "block_sync();  // the rings overwrite the queries", "", changes=QUERIES_KEPT),
    PlantedInSource(
        "copies keys one step too early", "ring.prefetch_keys(step + C::NUM_STAGES)", "ring.prefetch_keys(step + C::NUM_STAGES - 1)"
    ),
    PlantedInSource(
        "copies values one step too late", "ring.prefetch_values(step + C::NUM_STAGES - 1)", "ring.prefetch_values(step + C::NUM_STAGES)"
    ),
    PlantedInSource("wrong key fragment", _TWO_SCORES, _TWO_SCORES.replace("b[2], b[3]", "b[0], b[3]")),
    PlantedInSource("halves of a value fragment swapped", _TWO_OUTPUTS, _TWO_OUTPUTS.replace("b[2], b[3]", "b[3], b[2]"), slow=True),
    PlantedInSource(
        "keys addressed by the wrong lanes", "lane / 16 * 8 + lane % 8, lane / 8 % 2", "lane / 8 % 2 * 8 + lane % 8, lane / 16"
    ),
    PlantedInSource(
        "pairs of probabilities swapped", "pack_pair(pair[0], pair[1], Element{})", "pack_pair(pair[1], pair[0], Element{})", slow=True
    ),
    PlantedInSource("mask of the wrong row", "row + m * 16 + half * 8", "row + m * 16 + half * 4", CAUSAL),
    PlantedInSource("mask one key too narrow", "key > keys.last", "key >= keys.last", CAUSAL, slow=True),
    PlantedInSource("window one key too wide", "key < keys.first)", "key < keys.first - 1)", WINDOW, slow=True),
    PlantedInSource("last key of a tile left unmasked", "- 1 > whole_last", "- 1 > whole_last + 1", CAUSAL),
    PlantedInSource("window's left tiles unmasked", "tile * C::BLOCK_KV < whole_first", "tile * C::BLOCK_KV < whole_first - 1", WINDOW),
    PlantedInSource("one tile missing at the right edge", "maximum(bottom.last + 1, 0)", "maximum(bottom.last, 0)", CAUSAL),
    PlantedInSource("warp leaves one tile too early", "tile < rows.range.last", "tile + 1 < rows.range.last", CAUSAL, slow=True),
    PlantedInSource("row_sum not rescaled", "row_sum[r] *= rescale;", ""),
    PlantedInSource("odd columns not rescaled", "output[r / 2][n][r % 2 * 2 + 1] *= rescale;", "", slow=True),
    PlantedInSource("row_sum over half of the lanes", "row_sum[r] += shuffle_xor(row_sum[r], 2);", ""),
    PlantedInSource("maximum over half of the lanes", "return larger(result, shuffle_xor(result, 2));", "return result;", slow=True),
    PlantedInSource(
        "rescales by an unscaled difference",
        "(raised == -infinity() ? 0.0f : raised)) * scale_log2)",
        "(raised == -infinity() ? 0.0f : raised)))",
        slow=True,
    ),
    PlantedInSource("no guard for a row without keys", "(raised == -infinity() ? 0.0f : raised)", "raised", CAUSAL),
    PlantedInSource("huge scores in the fused form", "warp_any(is_huge)", "false"),
    PlantedInSource("rescales far too late", "static_cast<float>(C::RESCALE_THRESHOLD)", "150.0f", changes=LAZY),
    PlantedInSource("lse in log2 units", "log2_exact(row_sum[r])) * LN_2", "log2_exact(row_sum[r]))", slow=True),
    PlantedInSource("lse without its maximum", "(reference[r] * scale_log2 + log2_exact(row_sum[r]))", "log2_exact(row_sum[r])", slow=True),
    PlantedInSource("copies one row past the end", "row < valid_rows && in_row(step + lane)", "row <= valid_rows && in_row(step + lane)"),
    PlantedInSource(
        "padding holds the next row", "|| chunk * CHUNK_ELEMENTS < HEAD_DIM; }", "|| chunk * CHUNK_ELEMENTS <= HEAD_DIM; }", head_dim=40
    ),
    PlantedInSource(
        "gathers past the row", "row < valid_rows && chunk * CHUNK_ELEMENTS < HEAD_DIM", "chunk * CHUNK_ELEMENTS < HEAD_DIM", slow=True
    ),
    PlantedInSource("writes one row past the end", "if (target_row >= params.seqlen_q ||", "if (target_row > params.seqlen_q ||"),
    PlantedInSource(
        "writes past the columns", "|| chunk * CHUNK_ELEMENTS >= C::HEAD_DIM_V) continue", ") continue", head_dim_v=40, slow=True
    ),
    PlantedInSource(
        "stores vectors at any address", "if (params.vector_access) {\n        store_global", "if (true) {\n        store_global"
    ),
    PlantedInSource("copies vectors from any address", "if (vector_access) {", "if (true) {"),
    PlantedInSource("output transposed wrongly", "if (i & step) continue;", "if (i & (3 - step)) continue;", slow=True),
    PlantedInSource("kv head by remainder", "head_q / (params.heads_q / params.heads_kv)", "head_q % params.heads_kv"),
    PlantedInSource("same batch for all", "return {batch_head / params.heads_q, head_q", "return {0, head_q", slow=True),
)

_SIMT = {"family": "simt_forward", "dtype": FP32, "head_dim": 16, "head_dim_v": 24}
_SIMT_SLOW = {"row_sum not rescaled", "output not rescaled", "mask one key too narrow", "drops the last column", "ignores the left bound"}
_LOADED = "block_sync();\n    float scores"

SIMT = tuple(
    PlantedInSource(name, old, new, mask, **_SIMT, slow=name in _SIMT_SLOW)
    for name, old, new, mask in (
        ("no barrier after loading", _LOADED, "float scores", NONE),
        ("no barrier before the next tile", "block_sync();  // the next tile overwrites K and V", "", NONE),
        ("no warp barrier around the probabilities", "warp_sync();", "", NONE),
        ("reads past the end", "row < valid_rows ? to_float(", "row <= valid_rows ? to_float(", NONE),
        ("row_sum of one lane fewer", "value += shuffle_xor(value, step);", "value += step == 1 ? 0.0f : shuffle_xor(value, step);", NONE),
        ("row_sum not rescaled", "row_sum[r] *= rescale;", "", NONE),
        ("output not rescaled", "output[r][i] *= rescale;", "", NONE),
        ("mask one key too narrow", "column > keys.last", "column >= keys.last", CAUSAL),
        ("no guard for a row without keys yet", "new_max == -infinity() ? 0.0f : new_max", "new_max", WINDOW),
        (
            "subtracts after scaling",
            "exp2_approx((scores[j] - base) * scale_log2)",
            "exp2_approx(fused_multiply_add(scores[j], scale_log2, -(base * scale_log2)))",
            NONE,
        ),
        ("writes past the last row", "if (row >= params.seqlen_q) continue;", "if (row > params.seqlen_q) continue;", NONE),
        ("drops the last column", "lane + i * LANES >= C::HEAD_DIM_V) continue", "lane + i * LANES >= C::HEAD_DIM_V - 1) continue", NONE),
        ("window's first tile forgotten", "first = top.first / C::BLOCK_KV;", "first = ceil_div(top.first, C::BLOCK_KV);", WINDOW),
        ("ignores the left bound", "column < keys.first ||", "", WINDOW),
    )
)

PLANTED = AMPERE + SIMT
