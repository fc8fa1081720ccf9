# ruff: noqa: E501
"""Mistakes planted into the Hopper kernel: what, old text, new text."""

from __future__ import annotations

# fmt: off
FAULTS = (
    ("keys are released before the scores may be computed again", "if (C::SOFTMAX_MODE == SOFTMAX_LAZY) release_keys(next);", "release_keys(next);"),
    ("scores are not computed again", "recompute_scores(scores, stage);", ""),
    ("a sum may grow until V overflows", "LARGEST_SUM = 256.0f", "LARGEST_SUM = 3.0e38f"),
    ("an overflow counts as a large sum", "if (warp_any(!(most < OVERFLOWING_SUM))) return false;", ""),
    ("the sum of the tile is not rescaled", "sum[0] *= rescale[0];", ""),
    ("the output is not rescaled", "softmax.rescale_output(output);", ""),
    ("scores are read before they are there", "wgmma_wait<1>(scores);", ""),
    ("values are used before they have arrived", "wait_values(at);\n    output_product", "output_product"),
    ("keys are never released", "FG_DEVICE void release_keys(KeyValuePlace<C> place) const { warp_release", "FG_DEVICE void release_keys(KeyValuePlace<C> place) const { if (place.stage < 0) warp_release"),
    ("the producer does not wait for a free slot", "mbarrier_wait(Shape::barrier(shared, Shape::K_EMPTY + at.stage), at.round ^ 1);", ""),
    ("keys are waited for in the wrong phase", "mbarrier_wait(barrier(Shape::K_FULL + place.stage), place.round)", "mbarrier_wait(barrier(Shape::K_FULL + place.stage), place.round ^ 1)"),
    ("a consumer passes by a tile that it sees", "maximum(range.last, cta.first)", "maximum(range.last - 1, cta.first)"),
    ("the rows of the next consumer are masked instead", "first_row(at.first_row + index * POSITIONS)", "first_row(at.first_row + (index + 1) % 2 * POSITIONS)"),
    ("half the bytes are expected", "mbarrier_expect(barrier, operand_bytes(ROWS, COLUMNS));", "mbarrier_expect(barrier, operand_bytes(ROWS, COLUMNS) / 2);"),
    ("the counter is drawn once too often", "atomic_increment_wrap(params.counters, tiles - 1)", "atomic_increment_wrap(params.counters, tiles)"),
    ("stores are not fenced before the bulk store", "fence_proxy_async();", ""),
    ("the output buffer is reused before it was read", "if (leads) bulk_wait_read<0>();", ""),
    ("passing by takes no turn", "take_turn();\n      pass_turn();\n      wait_keys(at)", "wait_keys(at)"),
    ("queries are released before the last use", "int number = tile.first_seen();", "warp_release(barrier(Shape::Q_EMPTY + query_slot())); int number = tile.first_seen();"),
    ("the next query tile adds to this one's output", "output[i] = 0.0f;\n    mbarrier_wait", "if (query.stage == 0) output[i] = 0.0f;\n    mbarrier_wait"),
    ("queries are not waited for", "mbarrier_wait(barrier(Shape::Q_FULL + query_slot()), query.round);", ""),
    ("a query tile begins with the sums of the last one", "softmax.start();", "if (query.stage == 0) softmax.start();"),
    ("all heads of a pack have the first one's queries", "place.head_q + head, place.batch);", "place.head_q, place.batch);"),
    ("heads of a pack are stored one after the other in the wrong place", "query_tile.place.head_q + head,", "query_tile.place.head_q + 1 - head,"),
    ("a warp that met a large probability trusts the next tile", "trusted = false;", "trusted = true; reference[0] = 0.0f;"),
    ("a place is read after it was given back", "const Place place = wait_and_load();\n    warp_release(empty + 8 * (turn % SLOTS));", "warp_release(empty + 8 * (turn % SLOTS));\n    const Place place = wait_and_load();"),
    ("values lie a chunk apart that is none", "return column_operand(shared + Shape::V, C::BLOCK_KV)", "return column_operand(shared + Shape::V, 2 * C::BLOCK_KV)"),
)
