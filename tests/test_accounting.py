"""The accounting of bytes: equal to what the emulated executor counts, to the byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashgen import accounting, cases, device
from flashgen.cases import Layout
from flashgen.emulate import FAST, EmulatedExecutor
from flashgen.model import Alignment, DType, Mask, Problem, Variant
from flashgen.render import render
from flashgen.space import BoundSpace, load_space

H200 = device.preset("h200")
TILES = {
    "standard_forward": {"tile": 16},
    "simt_forward": {"block_q": 32, "block_kv": 16, "rows_per_team": 2, "lanes_per_team": 8, "tile_order": 0},
    "ampere_forward": {
        "block_q": 32, "block_kv": 32, "num_warps": 2, "num_stages": 1, "q_in_registers": 0, "ctas_per_sm": 1,
        "rescale_threshold": 8, "tile_order": 1,
    },
}  # fmt: skip


def problem(seqlen_q: int = 64, seqlen_kv: int | None = None, mask: Mask | None = None, **changes: object) -> Problem:
    base = Problem(DType.FLOAT16, 32, 32, 1, 2, 2, seqlen_q, seqlen_q if seqlen_kv is None else seqlen_kv, mask or Mask())
    return replace(base, **changes)  # type: ignore[arg-type]


PROBLEMS = {
    "whole tiles": problem(64),
    "ragged": problem(51, 77),
    "one row": problem(1, 100),
    "one key": problem(40, 1),
    "causal": problem(96, mask=Mask.causal()),
    "causal ragged": problem(70, 45, Mask.causal()),  # the first rows see nothing
    "causal top left": problem(45, 70, Mask.causal(Alignment.TOP_LEFT)),
    "window": problem(80, mask=Mask.window(20, 0)),
    "window beyond the keys": problem(90, 40, Mask.window(7, 3, Alignment.TOP_LEFT)),
    "shared heads": problem(48, 64, heads_q=4, heads_kv=2, batch=2),
    "other head dims": problem(40, 56, head_dim=40, head_dim_v=24),
    "bfloat16": problem(33, 65, dtype=DType.BFLOAT16),
}


def bound(family: str, asked: Problem) -> BoundSpace:
    return load_space(family).bind(asked, H200)


def counted(family: str, asked: Problem) -> tuple[int, int]:
    at = bound(family, asked)
    variant = at.variant(TILES[family])
    executor = EmulatedExecutor(H200, FAST)
    inputs = cases.normal(asked, np.random.default_rng(0))
    executor.forward(render(at.space, asked.klass(), variant), asked, cases.operands(asked, inputs, Layout.CONTIGUOUS), asked.scale)
    counters = executor.last_report.counters
    return counters.global_bytes_read, counters.global_bytes_written


@pytest.mark.emulated
@pytest.mark.parametrize("family", ["standard_forward", "ampere_forward", pytest.param("simt_forward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_model_is_what_the_emulated_executor_counts(family: str, name: str) -> None:
    asked = PROBLEMS[name]
    at = bound(family, asked)
    account = accounting.account(at, at.variant(TILES[family]))
    assert (account.read_bytes, account.written_bytes) == counted(family, asked)


def test_one_matrix_of_8192_squared_in_fp16_is_128_mib_per_head() -> None:
    assert accounting.matrix_bytes(problem(8192)) == 128 * 2**20


def test_tiled_attention_never_touches_a_matrix() -> None:
    at = bound("ampere_forward", problem(4096))
    assert accounting.account(at, at.variant(TILES["ampere_forward"])).matrix_bytes == 0


def test_textbook_attention_passes_over_a_matrix_at_least_four_times() -> None:
    asked = problem(4096)
    at = bound("standard_forward", asked)
    account = accounting.account(at, at.variant({"tile": 16}))
    assert [each.action for each in account.passes if each.is_matrix] == ["write", "read", "write", "read"]
    assert sum(each.once for each in account.passes if each.is_matrix) == 4 * 2 * accounting.matrix_bytes(asked)


@pytest.mark.parametrize(("block_q", "less"), [(64, True), (16, False)])
def test_the_crossover_separates_tiles_that_save_traffic_from_those_that_do_not(block_q: int, less: bool) -> None:
    asked = problem(65536, head_dim=64, head_dim_v=64)
    at, standard = bound("simt_forward", asked), bound("standard_forward", asked)
    point = TILES["simt_forward"] | {"block_q": block_q, "lanes_per_team": 8}
    tiled = accounting.account(at, Variant.of("simt_forward", point))
    assert (tiled.total_bytes < accounting.account(standard, standard.variant({"tile": 16})).once_bytes) is less
    assert (block_q > accounting.crossover_block_q(asked)) is less


def test_the_rule_of_the_paper_counts_shared_memory_in_elements() -> None:
    assert accounting.paper_block_kv(problem(head_dim=128, head_dim_v=128), 227 * 1024) == 227


@pytest.mark.emulated
@pytest.mark.slow
def test_one_matrix_of_512_squared_in_fp16_is_counted_as_half_a_mib_per_pass() -> None:
    """The claim of 128 MiB at 8192 in small: 512 is 16 times shorter, so its matrix is 256 times smaller."""
    asked = problem(512, heads_q=1, heads_kv=1, head_dim=16, head_dim_v=16)
    at = bound("standard_forward", asked)
    account = accounting.account(at, at.variant(TILES["standard_forward"]))
    others = sum(each.bytes for each in account.passes if not each.is_matrix)
    assert sum(counted("standard_forward", asked)) - others == 6 * 512 * 512 * 2  # written twice, read 3 + 1 times (one column tile)
    assert accounting.matrix_bytes(asked) * 256 == 128 * 2**20
