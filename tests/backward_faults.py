# ruff: noqa: E501
"""Mistakes planted into simt_backward: what, old text, new text, and the mask that shows it."""

from __future__ import annotations

from flashgen.model import Mask

NONE, CAUSAL, WINDOW = Mask(), Mask.causal(), Mask.window(-1, -1)

# fmt: off
FAULTS = (
    ("only dq is wrong, by the scale", "forward.seqlen_q - row, params.scale);", "forward.seqlen_q - row, 1.0f);", NONE),
    ("dk lacks the scale", "dk.store(dk_rows, params.dk_strides.row, forward.seqlen_kv - key, params.scale);", "dk.store(dk_rows, params.dk_strides.row, forward.seqlen_kv - key, 1.0f);", NONE),
    ("the scores lack the scale", "tiles.k, c) * params.scale;", "tiles.k, c);", NONE),
    ("delta is missing", "- load_global(head.delta + row));", ");", NONE),
    ("delta sums the columns of K", "for (int i = 0; i < C::HEAD_DIM_V; ++i) sum =", "for (int i = 0; i < C::HEAD_DIM; ++i) sum =", NONE),
    ("delta of the first head serves all", "(params.forward.workspace) + first;", "(params.forward.workspace);", NONE),
    ("lse of the first head serves all", "lse = params.forward.lse + first;", "lse = params.forward.lse;", NONE),
    ("the gradient of lse is dropped", "if (params.dlse) sum -= load_global(params.dlse + index);", "", NONE),
    ("the gradient of lse has the wrong sign", "sum -= load_global(params.dlse + index);", "sum += load_global(params.dlse + index);", NONE),
    ("a group misses its last head", "head_q < (head_kv + 1) * group;", "head_q < (head_kv + 1) * group - (group > 1);", NONE),
    ("query heads meet the wrong keys", "head_kv = head_q / (forward.heads_q / forward.heads_kv);", "head_kv = head_q % forward.heads_kv;", NONE),
    ("the key loop starts below the diagonal", "rows.first = maximum(rows.first, row);", "rows.first = maximum(rows.first, row + 1);", CAUSAL),
    ("the key loop starts too low in a window", "row - forward.window_right);", "row - forward.window_right + 1);", WINDOW),
    ("the key loop ends too early in a window", "row + keys + forward.window_left);", "row + keys + forward.window_left - 1);", WINDOW),
    ("the row loop ends before the diagonal", "ceil_div(maximum(bottom.last + 1, 0), C::BLOCK_KV)", "ceil_div(maximum(bottom.last, 0), C::BLOCK_KV)", CAUSAL),
    ("the row loop starts too late in a window", "first = top.first / C::BLOCK_KV;", "first = (top.first + 1) / C::BLOCK_KV;", WINDOW),
    ("keys past the diagonal are seen", "&& key <= keys.last) {", ") {", CAUSAL),
    ("keys past the last are scored 0", "&& key <= keys.last) {", ") {", NONE),
    ("rows past the last are seen", "if (row < params.forward.seqlen_q && key", "if (key", NONE),
    ("rows past the last are stored", "if (row < ROWS && row < valid_rows)", "if (row < ROWS)", NONE),
    ("dv takes the gradients of scores", "add_transposed<C::BLOCK_Q>(tiles.p, tiles.dout);", "add_transposed<C::BLOCK_Q>(tiles.ds, tiles.dout);", NONE),
    ("exp has the wrong base", "load_global(head.lse + row)) * LOG2_E);", "load_global(head.lse + row)));", NONE),
    ("rows are overwritten while they are in use", "block_sync(); // the next rows overwrite these", "", NONE),
    ("scores are used before they are there", "recompute_scores(tiles, params, head, row, tile * C::BLOCK_KV); block_sync();", "recompute_scores(tiles, params, head, row, tile * C::BLOCK_KV);", NONE),
    ("dq is stored with the strides of q", "params.dq_strides, batch, head_q)", "forward.q_strides, batch, head_q)", NONE),
)
