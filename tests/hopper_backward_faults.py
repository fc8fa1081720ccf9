# ruff: noqa: E501
"""Mistakes planted into `hopper_backward`: what, old text, new text, the mask that shows it, and the variant that has it."""

from __future__ import annotations

from flashgen.model import Mask

NONE, CAUSAL, WINDOW = Mask(), Mask.causal(), Mask.window(-1, -1)
SPLIT, OVERLAPPED, SERIAL, ORDERED, CLEARING = "split", "overlapped", "serial", "ordered", "clearing"

# fmt: off
FAULTS = (
    ("only dq is wrong, by the scale", "dq.template store<C::HEAD_DIM>(sums, params.scale,", "dq.template store<C::HEAD_DIM>(sums, 1.0f,", NONE, SPLIT),
    ("only dq of the sums is wrong, by the scale", "dq.template store<C::DQ_COLUMNS>(sums, params.scale,", "dq.template store<C::DQ_COLUMNS>(sums, 1.0f,", NONE, OVERLAPPED),
    ("dk lacks the scale", "dk.template store<C::HEAD_DIM>(sums, params.scale,", "dk.template store<C::HEAD_DIM>(sums, 1.0f,", NONE, SPLIT),
    ("delta is missing in the loop over rows", "probability * (weights[first + i] - delta.of(i));", "probability * weights[first + i];", NONE, SPLIT),
    ("delta is missing in the loop over keys", "scores[i] *= weights[i] - delta[row_of(i)];", "scores[i] *= weights[i];", NONE, SPLIT),
    ("delta of the block before is subtracted", "this->load_statistics(statistics, Shape::DELTA, this->at.stage); FG_UNROLL", "this->load_statistics(statistics, Shape::DELTA, this->at.stage ? this->at.stage - 1 : 0); FG_UNROLL", NONE, SERIAL),
    ("lse is stale by a block", "this->load_statistics(statistics, Shape::LSE, next.stage);", "this->load_statistics(statistics, Shape::LSE, this->at.stage);", NONE, OVERLAPPED),
    ("lse stays in natural units", "empty ? infinity() : rows.lse[i] * LOG2_E);", "empty ? infinity() : rows.lse[i]);", NONE, SPLIT),
    ("rows that see nothing keep their lse", "empty ? infinity() : rows.lse[i] * LOG2_E);", "rows.lse[i] * LOG2_E);", CAUSAL, SPLIT),
    ("lse and delta lie in the order of rows", "return (row & ~15) | (row >> 1 & 3) << 2 | (row >> 3 & 1) << 1 | (row & 1);", "return row;", NONE, SPLIT),
    ("lse and delta of the first head serve all", "return (static_cast<i64>(batch) * forward.heads_q + head) * padded_rows(forward.seqlen_q);", "return static_cast<i64>(batch) * forward.heads_q * padded_rows(forward.seqlen_q);", NONE, SPLIT),
    ("the gradient of lse is dropped", "empty ? 0.0f : sum - rows.dlse[i]);", "empty ? 0.0f : sum);", NONE, SPLIT),
    ("the gradient of lse has the wrong sign", "empty ? 0.0f : sum - rows.dlse[i]);", "empty ? 0.0f : sum + rows.dlse[i]);", NONE, SPLIT),
    ("a group misses its last head", "left = range.count * (forward.heads_q / forward.heads_kv);", "left = range.count * (forward.heads_q / forward.heads_kv - (forward.heads_q > forward.heads_kv));", NONE, SPLIT),
    ("a group starts at the wrong head", "int head = place.head_kv * group;", "int head = place.head_kv;", NONE, SPLIT),
    ("dq of the next head is added to this one", "if (walk.advance()) head += blocks();", "walk.advance();", NONE, OVERLAPPED),
    ("the loop over rows starts below the diagonal", "rows.first = maximum(rows.first, row);", "rows.first = maximum(rows.first, row + 1);", CAUSAL, SPLIT),
    ("the loop over rows starts too low in a window", "rows.first = maximum(rows.first, row - forward.window_right);", "rows.first = maximum(rows.first, row - forward.window_right + 1);", WINDOW, SPLIT),
    ("the loop over rows ends too early in a window", "row + keys + forward.window_left);", "row + keys + forward.window_left - 1);", WINDOW, SPLIT),
    ("the loop over keys ends before the diagonal", "ceil_div(maximum(bottom.last + 1, 0), C::BLOCK_KV)", "ceil_div(maximum(bottom.last, 0), C::BLOCK_KV)", CAUSAL, SPLIT),
    ("the mask edge is off in the loop over keys only", "if (key > visible.last ||", "if (key > visible.last + 1 ||", CAUSAL, SPLIT),
    ("the mask edge is off in the loop over rows only", "if (at < seen.first[r] ||", "if (at < seen.first[r] - 1 ||", CAUSAL, SPLIT),
    ("blocks on the diagonal count as seen by all", "needs |= key + PRODUCT_ROWS - 1 > row + forward.diagonal;", "needs |= key > row + forward.diagonal;", CAUSAL, SPLIT),
    ("keys past the last are scored 0", "first[r] = key + 8 * r < forward.seqlen_kv ? rows.first : forward.seqlen_q + C::BLOCK_Q;", "first[r] = rows.first;", NONE, OVERLAPPED),
    ("a block is passed by that some row sees", "PRODUCT_ROWS).first >= row + C::BLOCK_Q;", "PRODUCT_ROWS).first >= row + C::BLOCK_Q - 16;", CAUSAL, OVERLAPPED),
    ("a block that is passed by is not exchanged", "exchange(zeros);", "++exchanges; --exchanges;", CAUSAL, OVERLAPPED),
    ("dv takes the gradients of scores", "packed[i] = pack_pair(scores[2 * i], scores[2 * i + 1], Element{}); gradients[i]", "packed[i] = pack_pair(low, high, Element{}); gradients[i]", NONE, SERIAL),
    ("rows past the last are stored", "if (row + 8 * r >= rows || tile >= TILES || column + tile * 8 >= end) continue;", "if (tile >= TILES || column + tile * 8 >= end) continue;", NONE, SPLIT),
    ("padding rows keep what the workspace held", "store_global(to.lse + place, infinity()); store_global(to.delta + place, 0.0f);", "", NONE, SPLIT),
    ("the sums of dq start as they are", "if constexpr (C::FUSED && !C::ORDERED) zero_sums();", "", NONE, OVERLAPPED),
    ("the last block of dq is forgotten", "++this->exchanges; this->stage(dq(), block, this->exchanges - 1); this->fence_and_add_staged(block, this->exchanges - 1);", "++this->exchanges;", NONE, OVERLAPPED),
    ("dq is read before the other warpgroup has written dS", "this->wait_exchanged(present);", "", NONE, SERIAL),
    ("dS is overwritten while dq reads it", "mbarrier_wait(exchange_empty(exchanges), exchanges / 2 % 2 ^ 1);", "", NONE, OVERLAPPED),
    ("dS is not fenced before the products", "fence_proxy_async(); warp_release(exchange_full(exchanges));", "warp_release(exchange_full(exchanges));", NONE, OVERLAPPED),
    ("staged dq is overwritten before it was read", "if (lane == 0) bulk_wait_read<0>();", "", NONE, OVERLAPPED),
    ("P is overwritten before it was taken over", "mbarrier_wait(this->barrier(Shape::EXCHANGE_EMPTY + this->exchange.stage), this->exchange.round ^ 1);", "", NONE, SPLIT),
    ("rows are released before the last product", "this->release_dout(this->dout.stage); this->dout = this->dout.next(); } FG_DEVICE void compute", "this->dout = this->dout.next(); } FG_DEVICE void compute", NONE, SPLIT),
    ("the exponentials do not wait for the scores", "product_wait<2>(scores); this->exponentiate", "this->exponentiate", NONE, OVERLAPPED),
    ("the counter is drawn once too often", "static_cast<u32>(tiles - 1))", "static_cast<u32>(tiles))", NONE, SPLIT),
    ("dq is stored with the strides of q", "const GradientHead<Element> dq(params.dq, params.dq_strides, place.batch, place.head,", "const GradientHead<Element> dq(params.dq, params.forward.q_strides, place.batch, place.head,", NONE, SPLIT),
    ("the first tile adds to what is there", "if (first) { bulk_store(sums, source, Base::HALF * 4); } else { bulk_add(sums, source, Base::HALF * 4); }", "bulk_add(sums, source, Base::HALF * 4);", CAUSAL, ORDERED),
    ("every tile stores", "if (first) { bulk_store(sums,", "if (true) { bulk_store(sums,", NONE, ORDERED),
    ("a block whose first keys are out of its window is never stored", "tile == first_tile_of<C>(params.forward, blocks.walk.block);", "tile == 0;", WINDOW, ORDERED),
    ("sums that nobody stored are rounded", "if (!C::ORDERED || is_summed<C>(params.forward, row / C::BLOCK_Q)) load(sums, block);", "load(sums, block);", CAUSAL, ORDERED),
)

# Of sums in turn; judged by their bits, too.
ORDER_FAULTS = (
    ("the turn is not waited for", "await_word(turn, static_cast<u32>(tile));", "", NONE, ORDERED),
    ("the turn passes before the sum is complete", "bulk_wait<0>(); publish_word(turn, static_cast<u32>(tile + 1));", "publish_word(turn, static_cast<u32>(tile + 1)); bulk_wait<0>();", NONE, ORDERED),
    ("the turn passes when the sum is only read", "bulk_wait<0>(); publish_word(turn, static_cast<u32>(tile + 1));", "bulk_wait_read<0>(); publish_word(turn, static_cast<u32>(tile + 1));", NONE, ORDERED),
    ("the turn passes to the tile after the next", "publish_word(turn, static_cast<u32>(tile + 1));", "publish_word(turn, static_cast<u32>(tile + 2));", NONE, ORDERED),
    ("turns start at the diagonal", "if constexpr (C::MASK != MASK_WINDOW) return 0;", "if constexpr (C::MASK == MASK_CAUSAL) return (block * C::BLOCK_Q + forward.diagonal) / C::KEY_ROWS;", CAUSAL, ORDERED),
    ("turns start at a tile before the window", "block * C::BLOCK_Q + forward.diagonal - forward.window_left) / C::KEY_ROWS", "block * C::BLOCK_Q + forward.diagonal - forward.window_left - C::KEY_ROWS) / C::KEY_ROWS", WINDOW, ORDERED),
    ("turns start as they are", "if constexpr (C::ORDERED) first_turns();", "", NONE, ORDERED),
    ("turns of the first head serve all", "u32* turn = turns_of<C>(params.forward) + block;", "u32* turn = turns_of<C>(params.forward) + block % ceil_div(params.forward.seqlen_q, C::BLOCK_Q);", NONE, ORDERED),
    ("staged dq is given back before it was read", "bulk_wait_read<0>(); mbarrier_arrive(Shape::barrier(shared, Shape::STAGED_EMPTY + half));", "mbarrier_arrive(Shape::barrier(shared, Shape::STAGED_EMPTY + half));", NONE, ORDERED),
    ("staged dq is overwritten before it was given back", "mbarrier_wait(barrier(Shape::STAGED_EMPTY + index), exchange % 2 ^ 1);", "", NONE, ORDERED),
    ("a half is added before it is staged", "mbarrier_wait(Base::staged_full(shared, half, staged), staged / 2 % 2);", "", NONE, ORDERED),
    ("the first tile of a CTA is not drawn", "int tile = WAITS ? TileQueue::draw_all(params.counters, tiles) : static_cast<int>(block_index());", "int tile = static_cast<int>(block_index());", NONE, ORDERED),
    ("the counter is left a draw short", "static_cast<u32>(tiles + static_cast<int>(grid_size()) - 1)", "static_cast<u32>(tiles + static_cast<int>(grid_size()))", NONE, ORDERED),
)

IN_CLEARING = [
    ("sums are not awaited", "if (section >= cleared_first()) await_word(cleared(section), static_cast<u32>(tiles()));", ""),
    ("sums are awaited a share early", "await_word(cleared(section), static_cast<u32>(tiles()));", "await_word(cleared(section), static_cast<u32>(tiles()) - 1);"),
    ("the last vector of a share is left out", "index < last; index += WARP_LANES) store_global(sums + index", "index < last - 1; index += WARP_LANES) store_global(sums + index"),
    ("shares do not cover the section", "/ static_cast<u32>(tiles()) + 1;", "/ static_cast<u32>(tiles());"),
    ("counts start as they are", "store_global(sections.cleared(static_cast<int>(index)), 0u);", ";"),
    ("the first launch clears a section less", "sections.vectors(sections.cleared_first()), ctas", "sections.vectors(sections.cleared_first() - 1), ctas"),
]  # fmt: skip
