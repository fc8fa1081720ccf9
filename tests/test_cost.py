"""The cost model: exact counts are checked exactly, predictions by what no prediction may violate."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen import accounting, cost, device
from flashgen.model import Alignment, CompileReport, DType, Mask, MaskKind, Problem, Variant
from flashgen.space import BoundSpace, load_space, parse_space

TEXT = (Path(__file__).parent / "data" / "example_space.yaml").read_text()
EXAMPLE = parse_space(TEXT)
POINT = {"block_q": 128, "block_kv": 64, "num_warps": 4, "num_stages": 2, "q_in_registers": False, "ctas_per_sm": 1}
REPORT = CompileReport("sha256:0", 128, 0, 0, 0, (), 0.3, "13.0", ())


def problem(head_dim: int = 64, seqlen_q: int = 4096, seqlen_kv: int | None = None, mask: Mask | None = None, **changes: Any) -> Problem:
    base = Problem(DType.BFLOAT16, head_dim, head_dim, 4, 16, 16, seqlen_q, seqlen_q if seqlen_kv is None else seqlen_kv, mask or Mask())
    return replace(base, **changes)


def bound(asked: Problem, gpu: str = "h200") -> BoundSpace:
    return EXAMPLE.bind(asked, device.preset(gpu))


def point(at: BoundSpace, **changes: int) -> Variant:
    return at.variant(POINT | changes)


def sees(asked: Problem, row: int, key: int) -> bool:
    """The definition of the masks, word for word."""
    shift, mask = asked.diagonal, asked.mask
    if mask.kind is MaskKind.NONE:
        return True
    if mask.kind is MaskKind.CAUSAL:
        return key <= row + shift
    return (mask.left < 0 or row + shift - mask.left <= key) and (mask.right < 0 or key <= row + shift + mask.right)


@st.composite
def masked_problems(draw: st.DrawFn) -> Problem:
    alignment = draw(st.sampled_from(Alignment))
    window = Mask.window(draw(st.integers(-1, 40)), draw(st.integers(-1, 40)), alignment)
    mask = draw(st.sampled_from([Mask(), Mask.causal(alignment), window]))
    return problem(64, draw(st.integers(0, 40)), draw(st.integers(0, 40)), mask)


# ---- exact counts


@given(masked_problems())
def test_visible_pairs_are_those_of_the_definition(asked: Problem) -> None:
    pairs = sum(sees(asked, row, key) for row in range(asked.seqlen_q) for key in range(asked.seqlen_kv))
    assert cost.visible_pairs(asked) == pairs


@given(masked_problems(), st.sampled_from([4, 8, 16]), st.sampled_from([4, 8, 16]))
def test_visited_tiles_are_those_between_the_first_and_last_visible_key(asked: Problem, block_q: int, block_kv: int) -> None:
    visited = []
    for start in range(0, asked.seqlen_q, block_q):
        rows = range(start, min(asked.seqlen_q, start + block_q))
        keys = [key for key in range(asked.seqlen_kv) if any(sees(asked, row, key) for row in rows)]
        visited.append(keys[-1] // block_kv - keys[0] // block_kv + 1 if keys else 0)
    total, largest, count = cost._tiles(asked, block_q, block_kv)
    assert (total, largest, count) == (sum(visited), max(visited, default=0), len(visited))


def test_flops_of_a_square_causal_problem_are_half_of_all_but_for_the_diagonal() -> None:
    full, causal = cost.flops(problem(128)), cost.flops(problem(128, mask=Mask.causal()))
    assert full == 4 * 4096 * 4096 * 128 * 64
    assert causal == full * (4096 + 1) // (2 * 4096)


def test_flops_count_both_head_dims() -> None:
    assert cost.flops(problem(64, 100, head_dim_v=128)) == 2 * 100 * 100 * (64 + 128) * 64


def test_counts_of_very_long_sequences_are_exact_and_immediate() -> None:
    length = 2**31 - 1
    assert cost.visible_pairs(problem(64, length, mask=Mask.causal())) == length * (length + 1) // 2
    assert cost.visible_pairs(problem(64, length, mask=Mask.window(255, 0))) == 256 * length - 256 * 255 // 2


# ---- resources


@pytest.mark.parametrize(
    ("gpu", "threads", "registers", "shared_bytes", "expected"),
    [
        ("h200", 128, 168, 0, (3, "registers")),  # 12 warps of 5,376 registers fit 4 × 16,384
        ("h200", 128, 128, 0, (4, "registers")),
        ("h200", 128, 129, 0, (3, "registers")),  # registers come in steps of 8 per thread
        ("h200", 256, 255, 0, (1, "registers")),
        ("h200", 512, 255, 0, (0, "registers")),
        ("h200", 128, 32, 49152, (4, "shared")),  # (48 + 1) KiB of 228
        ("h200", 128, 32, 232448, (1, "shared")),
        ("h200", 128, 32, 232449, (0, "shared")),
        ("rtx4090", 128, 32, 49152, (2, "shared")),  # 100 KiB
        ("rtx4090", 128, 32, 50177, (1, "shared")),
        ("a100", 256, 24, 0, (8, "threads")),
        ("rtx4090", 512, 24, 0, (3, "threads")),
        ("t4", 256, 24, 0, (4, "threads")),
        ("a10", 32, 16, 0, (16, "ctas")),
        ("h200", 32, 16, 0, (32, "ctas")),
    ],
)
def test_occupancy_follows_the_allocation_rules(
    gpu: str, threads: int, registers: int, shared_bytes: int, expected: tuple[int, str]
) -> None:
    assert cost.occupancy(device.preset(gpu), threads, registers, shared_bytes) == expected


def test_resources_name_the_parts_of_shared_memory_and_their_sum() -> None:
    at = bound(problem(64))
    taken = cost.resources(at, point(at))
    assert taken.shared_parts == (("q_or_o_bytes", 16384), ("ring_bytes", 32768))
    assert taken.shared_bytes == sum(size for _, size in taken.shared_parts)
    assert (taken.threads, taken.est_registers) == (128, at.names(point(at))["est_registers"])


def test_the_compilers_registers_replace_the_estimate() -> None:
    at = bound(problem(64))
    taken = cost.resources(at, point(at), REPORT)
    assert (taken.est_registers, taken.ctas_per_sm, taken.limit) == (128, 4, "shared")
    assert cost.resources(at, point(at), replace(REPORT, registers=255)).ctas_per_sm == 2
    assert cost.resources(at, point(at), replace(REPORT, static_shared_bytes=65536)).ctas_per_sm == 2


def test_every_feasible_variant_is_resident_as_often_as_it_promises() -> None:
    for gpu in ("h200", "a100", "rtx4090"):
        at = bound(problem(128), gpu)
        for variant in at.feasible():
            assert cost.resources(at, variant).ctas_per_sm >= variant.as_dict()["ctas_per_sm"]


# ---- traffic


def test_operands_that_fit_l2_are_read_from_dram_once() -> None:
    asked = problem(64, 1024, batch=1)
    at = bound(asked)
    operands = 16 * 1024 * (4 * 64 * 2 + 4)  # q, k, v, o and lse
    moved = cost.traffic(at, point(at), 2)
    assert moved.dram_bytes == operands
    assert moved.l2_bytes == operands + (1024 // 128 - 1) * 16 * 1024 * 2 * 64 * 2  # K and V once more per further query tile


def test_a_larger_query_tile_reads_keys_and_values_less_often() -> None:
    at = bound(problem(64))
    moved = [cost.traffic(at, point(at, block_q=block_q), 1).l2_bytes for block_q in (64, 128, 256)]
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 3


def test_keys_beyond_l2_are_read_again_from_dram() -> None:
    at = bound(problem(128, 131072, batch=1, heads_q=132, heads_kv=132), "l4")
    moved = cost.traffic(at, point(at), 1)
    assert 132 * 131072 * 4 * 128 * 2 < moved.dram_bytes <= moved.l2_bytes


MANY = problem(128, 8192, batch=8)  # 128 heads with 4 MiB of keys and values each; 132 SMs


def moved_in_turn(asked: Problem, ctas_per_sm: int, tile_order: int = 1) -> cost.Traffic:
    """Of a kernel that takes one query tile of every head in turn, or (0) all of one head's."""
    at = load_space("ampere_forward").bind(asked, device.preset("h200"))
    return cost.traffic(at, at.variant(at.seeds()[0].as_dict() | {"tile_order": tile_order}), ctas_per_sm)


def test_without_a_mask_the_ctas_of_one_head_walk_in_step_and_share_what_l2_cannot_hold() -> None:
    once = moved_in_turn(MANY, 1, tile_order=0).dram_bytes
    for ctas_per_sm, in_flight in ((1, 132), (2, 264)):
        moved = moved_in_turn(MANY, ctas_per_sm)
        assert (moved.dram_bytes - once) / (moved.l2_bytes - once) == pytest.approx(128 / in_flight)
    assert once == 128 * 8192 * (4 * 128 * 2 + 4)


def test_ctas_of_one_head_that_have_drifted_apart_without_a_mask_find_only_the_share_of_the_walk_that_l2_holds() -> None:
    at = load_space("ampere_forward").bind(MANY, device.preset("h200"))
    variant = at.variant(at.seeds()[0].as_dict() | {"tile_order": 1})
    once = moved_in_turn(MANY, 1, tile_order=0).dram_bytes
    moved = cost.traffic(at, variant, 2, in_step=False)
    held = cost.L2_SHARE * at.device.l2_bytes / (128 * 8192 * 2 * 128 * 2)  # of K and V of all heads
    assert (moved.dram_bytes - once) / (moved.l2_bytes - once) == pytest.approx(1 - (1 - 128 / 264) * held)


@pytest.mark.parametrize(("asked", "tile_order"), [(MANY, 0), (replace(MANY, mask=Mask.causal()), 1), (replace(MANY, batch=17), 1)])
def test_it_makes_no_difference_whether_they_drift_where_keys_fit_or_a_mask_parts_them_or_nobody_else_is_near(
    asked: Problem, tile_order: int
) -> None:
    at = load_space("ampere_forward").bind(asked, device.preset("h200"))
    variant = at.variant(at.seeds()[0].as_dict() | {"tile_order": tile_order})
    assert cost.traffic(at, variant, 2, in_step=False) == cost.traffic(at, variant, 2)


def test_with_a_mask_they_drift_apart_and_share_little_until_their_keys_fit() -> None:
    moved = moved_in_turn(replace(MANY, mask=Mask.causal()), 2)
    assert 0.85 * moved.l2_bytes < moved.dram_bytes < moved.l2_bytes
    narrow = replace(MANY, mask=Mask.window(256, 0))  # at most 7 tiles of 32 KiB per query tile and head
    assert moved_in_turn(narrow, 2).dram_bytes == 128 * 8192 * (4 * 128 * 2 + 4)


def test_with_more_heads_in_turn_than_ctas_in_flight_nothing_is_shared() -> None:
    moved = moved_in_turn(replace(MANY, batch=16), 1)
    assert moved.dram_bytes == moved.l2_bytes


@pytest.mark.parametrize(("seqlen", "share"), [(2048, 0), (4096, 0.39), (8192, 0.72), (32768, 0.93)])
def test_the_textbook_softmax_reads_scores_again_where_the_rows_in_flight_exceed_l2(seqlen: int, share: float) -> None:
    at = load_space("standard_forward").bind(problem(128, seqlen, batch=2), device.preset("h200"))
    variant = at.fallback()
    again = cost.traffic(at, variant, 6).dram_bytes - accounting.account(at, variant).once_bytes
    assert again / (32 * seqlen * seqlen * 2) == pytest.approx(share, abs=0.01)


def test_shared_key_heads_are_read_once_per_group() -> None:
    grouped, own = problem(64, 1024, batch=1, heads_kv=2), problem(64, 1024, batch=1)
    less = cost.traffic(bound(own), point(bound(own)), 2).dram_bytes - cost.traffic(bound(grouped), point(bound(grouped)), 2).dram_bytes
    assert less == 14 * 1024 * 2 * 64 * 2


# ---- predicted time


@pytest.mark.parametrize("gpu", ["h200", "a100", "rtx4090", "l4", "b200", "rtx5090"])
@pytest.mark.parametrize("mask", [Mask(), Mask.causal(), Mask.window(256, 0)], ids=str)
def test_no_prediction_beats_the_peak_rate_or_the_memory(gpu: str, mask: Mask) -> None:
    at = bound(problem(128, 2048, mask=mask), gpu)
    peak_us = cost.flops(at.problem) / at.device.tensor_tflops / 1e6
    operands_us = 64 * 2048 * 4 * 128 * 2 / at.device.dram_gb_per_s / 1e3
    for variant in at.feasible():
        assert cost.roofline_us(at, variant) > max(peak_us, operands_us)


def test_predictions_repeat_and_tell_variants_apart() -> None:
    at = bound(problem(128))
    times = [cost.roofline_us(at, variant) for variant in at.feasible()]
    assert times == [cost.roofline_us(at, variant) for variant in at.feasible()]
    assert max(times) > 2 * min(times)
    assert len(set(times)) > len(times) // 4


def test_more_work_takes_longer() -> None:
    def us(asked: Problem) -> float:
        return cost.roofline_us(bound(asked), point(bound(asked)))

    lengths = [us(problem(64, length)) for length in (128, 512, 2048, 8192, 32768)]
    assert lengths == sorted(lengths)
    assert us(problem(64, 8192)) > 3.5 * us(problem(64, 4096))
    assert us(problem(64, batch=8)) == pytest.approx(2 * us(problem(64)), rel=0.1)
    assert us(problem(64, mask=Mask.window(255, 0))) < us(problem(64, mask=Mask.causal())) < us(problem(64))
    assert us(problem(64)) < us(problem(128)) < us(problem(256))


def test_a_faster_device_is_faster() -> None:
    times = [cost.roofline_us(bound(problem(64), gpu), point(bound(problem(64), gpu))) for gpu in ("h200", "a100", "l4")]
    assert times == sorted(times)


def test_a_small_query_tile_pays_for_reading_shared_memory() -> None:
    at = bound(problem(128))
    assert cost.roofline_us(at, point(at, block_q=64)) > cost.roofline_us(at, point(at, block_q=128))


def test_a_partly_filled_last_wave_costs_a_whole_one() -> None:
    def us(heads: int) -> float:
        at = bound(problem(64, 128, 4096, batch=1, heads_q=heads, heads_kv=heads))
        return cost.roofline_us(at, point(at), REPORT)

    assert us(100) == pytest.approx(us(132), rel=0.05)  # one CTA per SM at most
    assert us(132) < us(133) < 1.1 * us(132)  # a second resident CTA hides in the waits of the first
    assert us(4 * 132 + 1) > 1.1 * us(4 * 132)  # four are resident


def test_spills_and_fewer_resident_ctas_make_it_slower() -> None:
    at = bound(problem(64))
    clean = cost.roofline_us(at, point(at), REPORT)
    assert cost.roofline_us(at, point(at), replace(REPORT, spill_bytes=256)) > 1.2 * clean
    assert cost.roofline_us(at, point(at), replace(REPORT, registers=255)) > clean


def test_a_variant_that_does_not_fit_never_ends() -> None:
    at = EXAMPLE.bind(problem(256), device.preset("rtx4090"))
    assert cost.roofline_us(at, point(at)) == math.inf


@pytest.mark.parametrize("asked", [problem(64, 0), problem(64, 0, 100), problem(64, 100, 0), problem(64, 4, batch=0)], ids=str)
def test_an_empty_problem_has_no_flops_and_a_finite_time(asked: Problem) -> None:
    at = bound(asked)
    assert cost.flops(asked) == 0
    assert 0 < cost.roofline_us(at, point(at)) < 100


def test_parts_say_what_binds() -> None:
    at = bound(problem(128))
    prediction = cost.predict(at, point(at))
    assert {name for name, _ in prediction.parts} == {"tensor", "exp2", "fp32", "shared", "sm", "l2", "dram"}
    assert prediction.us >= max(us for _, us in prediction.parts)
    assert prediction.bound_by == "sm"
    assert prediction.waves == pytest.approx(32 * 64 / (132 * cost.resources(at, point(at)).ctas_per_sm))


def test_without_tensor_cores_the_multiply_adds_bind() -> None:
    at = parse_space(TEXT.replace("mma: true", "mma: false")).bind(problem(128), device.preset("h200"))
    prediction = cost.predict(at, point(at))
    assert "tensor" not in dict(prediction.parts)
    assert prediction.us > cost.flops(at.problem) / at.device.fp32_tflops / 1e6


def test_a_score_matrix_in_global_memory_is_paid_for() -> None:
    at = parse_space(TEXT.replace("mma: true", "mma: true, materialised: true")).bind(problem(64), device.preset("h200"))
    more = cost.traffic(at, point(at), 1).dram_bytes - cost.traffic(bound(problem(64)), point(at), 1).dram_bytes
    assert more == 4 * 64 * 4096 * 4096 * 2
