"""Cases from public bug reports, run on every backward family with the values they are stated with. `cases.md` maps every case id."""

from __future__ import annotations

import numpy as np
import pytest
from backward_kernels import (
    Case,
    Make,
    backward_source,
    emulated,
    expect,
    failure_of,
    of_backward,
    outputs_of,
)

from flashgen import cases, reference
from flashgen.device import preset
from flashgen.emulate import FAST, POLICIES
from flashgen.errors import UnsupportedProblem
from flashgen.model import Alignment, BackwardTensors, DType, Mask, Op, Problem, Source
from flashgen.space import BoundSpace, Space, load_space

pytestmark = pytest.mark.emulated
DEVICE = preset("h200")
VARIANTS = {
    "simt_backward": {"block_q": 16, "block_kv": 32, "threads": 128},
    "ampere_backward": {
        "two_pass": False, "block_q": 32, "block_kv": 32, "num_warps": 4, "num_sides": 2, "warps_across": 1, "num_stages": 2,
        "keys_in_registers": False, "tile_order": 0, "dq_steps": 1, "delayed_dq": True, "staggered": False,
        "pass_block_q": 64, "pass_block_kv": 32, "pass_warps": 4, "pass_stages": 2,
    },
    "hopper_backward": {
        "fused": False, "block_q": 32, "num_stages": 2, "key_stages": 1, "block_kv": 32, "kv_stages": 2, "order": 0, "turned": False,
        "direct": False, "ordered": False, "clear_ahead": 0, "ping_pong": False, "keys_in_registers": False,
        "keys_from_shared": False, "rotate": False, "pin": False, "head_section": 1,
    },
}  # fmt: skip
BOTH = (Mask.causal(), Mask.causal(Alignment.TOP_LEFT))


@pytest.fixture(scope="module", params=VARIANTS)
def space(request: pytest.FixtureRequest) -> Space:
    return load_space(request.param)


def gradients_of(space: Space, problem: Problem, make: Make = cases.normal, scale: float | None = None) -> dict[str, np.ndarray]:
    """dq, dk, dv of the kernel, every element found to be within the bound and rows that see nothing exactly 0."""
    case = Case("stated", problem, make, dlse=True, scale=scale)
    source = backward_source(space, problem, space.bind(of_backward(problem), DEVICE).variant(VARIANTS[space.family]))
    kept, launch = list[BackwardTensors](), emulated(FAST if problem.seqlen_q > 300 else POLICIES[1], deadline_s=300)

    def run(source: Source, bound: BoundSpace, case: Case, tensors: BackwardTensors) -> None:
        launch(source, bound, case, tensors)
        kept.append(tensors)

    assert not failure_of(space, source, DEVICE, case, run)
    return {name: reference.decode(tensor.view(), problem.dtype) for name, tensor in outputs_of(kept[0]).items()}


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_causal_rows_above_the_first_key_have_no_gradient(space: Space, dtype: DType) -> None:
    found = gradients_of(space, Problem(dtype, 16, 16, 1, 1, 1, 4, 2, Mask.causal()))
    assert (found["dq"][:, :, :2] == 0).all()
    assert (found["dv"] != 0).any()


LONG = [pytest.param(100, 164, marks=pytest.mark.slow), pytest.param(128, 64, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(2, 5), (5, 6), (1, 228), *LONG])
def test_gradients_of_rectangular_causal_masks_follow_their_alignment(space: Space, seqlen_q: int, seqlen_kv: int) -> None:
    for mask in BOTH:
        gradients_of(space, Problem(DType.BFLOAT16, 64, 64, 2, 2, 2, seqlen_q, seqlen_kv, mask))


TAILS = [pytest.param(length, marks=pytest.mark.slow) for length in (64, 192, 320, 705, 767)]


@pytest.mark.parametrize("length", [65, *TAILS])
def test_gradients_of_strongly_negative_equal_scores_are_finite_at_every_tail(space: Space, length: int) -> None:
    problem = Problem(DType.BFLOAT16, 64, 64, 1, 1, 1, length, length)
    found = gradients_of(space, problem, lambda at, rng: cases.constant_scores(at, rng, 4.0, -3.0), scale=0.125)
    assert all(np.isfinite(values).all() for values in found.values())


def test_six_query_heads_sum_into_two_kv_heads_by_threes(space: Space) -> None:
    def make(problem: Problem, rng: np.random.Generator) -> cases.Inputs:
        return cases.rounded(problem, cases.normal(problem, rng).q, cases.normal(problem, rng).k, np.array([10, 20])[:, None, None])

    problem = Problem(DType.BFLOAT16, 64, 64, 1, 6, 2, 3, 4)
    found, given = gradients_of(space, problem, make), expect(Case("stated", problem, make, dlse=True)).given
    # The rows of P sum to 1, so dv summed over the keys is dout summed over the rows and the three heads of the group.
    wanted = given.dout.reshape(1, 2, 9, 64).sum(axis=2)
    np.testing.assert_allclose(found["dv"].sum(axis=2), wanted, atol=0.1)


WINDOWS = [
    pytest.param(256, 256, Mask.window(255, 0), marks=pytest.mark.slow),
    pytest.param(256, 256, Mask.window(0, 0), marks=pytest.mark.slow),
    (6, 3, Mask.window(-1, 2**31 - 1)),
    (129, 32, Mask.window(32, 64)),
]


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "mask"), WINDOWS, ids=str)
def test_gradients_at_the_edges_of_windows(space: Space, seqlen_q: int, seqlen_kv: int, mask: Mask) -> None:
    found = gradients_of(space, Problem(DType.FLOAT16, 64, 64, 1, 2, 2, seqlen_q, seqlen_kv, mask))
    assert (found["dq"][:, :, reference.visible_counts(mask, seqlen_q, seqlen_kv) == 0] == 0).all()


def test_float32_rows_without_keys_have_no_gradient_and_spoil_no_other() -> None:
    # Queries 0..3 see the keys from their own on, queries 4..7 see none.
    found = gradients_of(load_space("simt_backward"), Problem(DType.FLOAT32, 8, 8, 1, 1, 1, 8, 4, Mask.window(0, 3, Alignment.TOP_LEFT)))
    assert (found["dq"][:, :, 4:] == 0).all()
    assert all(np.isfinite(values).all() for values in found.values())


ODD = [pytest.param(dim, marks=pytest.mark.slow) for dim in (80, 96, 104, 120, 136)]


@pytest.mark.parametrize("head_dim", [40, 72, *ODD])
def test_every_column_of_a_head_dim_that_is_no_power_of_two_is_written_and_right(space: Space, head_dim: int) -> None:
    gradients_of(space, Problem(DType.BFLOAT16, head_dim, head_dim, 1, 2, 2, 37, 70))


@pytest.mark.parametrize("head_dim", [1, 33])
def test_head_dims_that_no_backward_family_takes_are_refused_by_name(space: Space, head_dim: int) -> None:
    with pytest.raises(UnsupportedProblem, match=f"head_dim must be a multiple of 8 from 8 to 256; got {head_dim}"):
        space.bind(Problem(DType.BFLOAT16, head_dim, 64, 1, 8, 8, 512, 512, op=Op.BACKWARD), DEVICE)
