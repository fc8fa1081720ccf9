# ruff: noqa: E501
"""Mistakes planted into ampere_backward: what, old text, new text, the mask that shows it, and whether dQ has its own pass."""

from __future__ import annotations

from flashgen.model import Mask

NONE, CAUSAL, WINDOW = Mask(), Mask.causal(), Mask.window(-1, -1)
SUMS, PASS = False, True

# fmt: off
FAULTS = (
    ("only dq is wrong, by the scale", "store_tiles(tiles, target, unit * 16, first, params.scale, lane);", "store_tiles(tiles, target, unit * 16, first, 1.0f, lane);", NONE, SUMS),
    ("only dq of the second pass is wrong, by the scale", "store_tiles(rows.sums, target, own_row, 0, params.scale, lane);", "store_tiles(rows.sums, target, own_row, 0, 1.0f, lane);", NONE, PASS),
    ("dk lacks the scale", "side.store(dk_rows, block.place, params.scale);", "side.store(dk_rows, block.place, 1.0f);", NONE, SUMS),
    ("delta is missing", "(product - float_from_bits(own.word[i / 4 * 2 + i % 2]))", "product", NONE, SUMS),
    ("delta is missing in the second pass", "p[1] * (dp[1] - d)", "p[1] * dp[1]", NONE, PASS),
    ("delta is taken from the other half of the products", "lane / 4 % 2 ? products[0][half][half * 2 + 1] : products[0][half][half * 2];", "products[0][half][half * 2];", NONE, SUMS),
    ("lse and delta of the first head serve all", "workspace.number(batch * params.forward.heads_q + head, tile)", "workspace.number(batch * params.forward.heads_q, tile)", NONE, SUMS),
    ("lse of the tile before serves its rows", "const u32 statistics = slot + Shape::Q_BYTES + Shape::DOUT_BYTES;", "const u32 statistics = (tile > first && slot >= Shape::STAGE_BYTES + 0x1000u ? slot - Shape::STAGE_BYTES : slot) + Shape::Q_BYTES + Shape::DOUT_BYTES;", NONE, SUMS),
    ("lse stays in natural units", "infinity() : lse * LOG2_E);", "infinity() : lse);", NONE, SUMS),
    ("rows that see nothing subtract nothing", "lse == -infinity() ? infinity() : lse * LOG2_E", "lse == -infinity() ? -200.0f : lse * LOG2_E", CAUSAL, SUMS),
    ("lse and delta lie in the order of rows", "return row / 16 * 16 + row % 8 / 2 * 4 + row / 8 % 2 * 2 + row % 2;", "return row;", NONE, SUMS),
    ("the gradient of lse is dropped", "if (is_row && params.dlse) delta -= load_global(params.dlse + index);", "", NONE, SUMS),
    ("the gradient of lse has the wrong sign", "delta -= load_global(params.dlse + index);", "delta += load_global(params.dlse + index);", NONE, SUMS),
    ("a group misses its last head", "steps = group * range.count();", "steps = (group - (group > 1)) * range.count();", NONE, SUMS),
    ("a group starts at the wrong head", "head = head_kv * group;", "head = head_kv;", NONE, SUMS),
    ("query heads of the second pass meet the wrong keys", "head_kv = head / (forward.heads_q / forward.heads_kv);", "head_kv = head % forward.heads_kv;", NONE, PASS),
    ("the key loop starts below the diagonal", "first_row = maximum(first_row, row);", "first_row = maximum(first_row, row + 2);", CAUSAL, SUMS),
    ("the key loop starts too low in a window", "first_row = maximum(first_row, row - forward.window_right);", "first_row = maximum(first_row, row - forward.window_right + 1);", WINDOW, SUMS),
    ("the key loop ends too early in a window", "row + C::BLOCK_KV + forward.window_left", "row + C::BLOCK_KV + forward.window_left - 1", WINDOW, SUMS),
    ("the row loop ends before the diagonal", "ceil_div(maximum(bottom.last + 1, 0), C::BLOCK_KV)", "ceil_div(maximum(bottom.last, 0), C::BLOCK_KV)", CAUSAL, PASS),
    ("the mask edge is off in the loop over rows", "if (own > keys.last ||", "if (own > keys.last + 1 ||", CAUSAL, SUMS),
    ("the mask edge is off in the loop over keys", "if (key > keys.last ||", "if (key > keys.last + 1 ||", CAUSAL, PASS),
    ("the left edge of a window is off", "own < keys.first)) scores", "own < keys.first - 1)) scores", WINDOW, SUMS),
    ("tiles at the edge count as seen by all", "any_hidden = last_key > top.last ||", "any_hidden = last_key > top.last + 4 ||", CAUSAL, SUMS),
    ("tiles at the edge count as unseen", "any_seen = !C::MASKED || (key <= bottom.last &&", "any_seen = !C::MASKED || (key < bottom.last &&", CAUSAL, SUMS),
    ("dk sums rows of dO", "this->accumulate(packed, rows.q, block.place);", "this->accumulate(packed, rows.dout, block.place);", NONE, SUMS),
    ("rows past the last are stored", "own_row >= target.valid_rows ||", "", NONE, SUMS),
    ("the sums of dq start as they are", "store_global(reinterpret_cast<Vector16*>(sums + i), Vector16{{0, 0, 0, 0}});", ";", NONE, SUMS),
    ("the last tile of dS is forgotten", "add_query_gradients<C>(ring.workspace, done.of(block, first, ring.steps), block.shared);", "", NONE, SUMS),
    ("the last tile of dS is read before it is complete", "block_sync(); const int first = (ring.steps - 1)", "const int first = (ring.steps - 1)", NONE, SUMS),
    ("one tile of dS serves two steps", "step % maximum(Shape::GRADIENT_TILES, 1) *", "step % 1 *", NONE, SUMS),
    ("sums of dq are read, added and written", "add_to_sums(sums + ((unit + m) * Shape::CHUNKS + column_tile + n) * 128, lane, products[m][n]);", "{ float* at = sums + ((unit + m) * Shape::CHUNKS + column_tile + n) * 128; float old[4]; load_sums(old, at, lane); warp_sync(); for (int i = 0; i < 4; ++i) store_global(at + lane * 4 + i, old[i] + products[m][n][i]); }", NONE, SUMS),
    ("probabilities are taken over before they are there", "barrier_sync(TWINS + block.place.number, 2 * WARP_LANES);", "", NONE, SUMS),
    ("a tile of rows is used before it has landed", "copy_async_wait<C::NUM_STAGES - 2>();", "copy_async_wait<C::NUM_STAGES - 1>();", NONE, SUMS),
    ("a tile of rows is overwritten while it is in use", "// the keys came with the first tile block_sync();", "// the keys came with the first tile", NONE, SUMS),
    ("a tile of keys is used before it has landed", "copy_async_wait<S::NUM_STAGES - 2>();", "copy_async_wait<S::NUM_STAGES - 1>();", NONE, PASS),
    ("dq is stored with the strides of q", "params.dq_strides, batch_head / forward.heads_q,", "forward.q_strides, batch_head / forward.heads_q,", NONE, SUMS),
)
