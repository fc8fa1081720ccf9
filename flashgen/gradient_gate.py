"""The exactness gate of backward kernels: dq, dk and dv, each judged on its own by the rules of `certify`.

A kernel passes only when, in every case, inputs and guards are untouched, every gradient was written, no element's error exceeds its bound,
and what must be exactly 0 is. A variant that promises determinism must also give the same bits again, alone, and from other layouts; one
that sums by atomics is held to the bound each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flashgen import cases, certify, gradient_suite, gradients, reference, suite
from flashgen.cases import Inputs, Layout
from flashgen.certify import BOUND, REPEATS, CaseResult, TileSizes, error_unit, tiles_of
from flashgen.errors import EmulationFault, InvalidProblem
from flashgen.gradient_suite import Case
from flashgen.gradients import Gradients, Saved
from flashgen.model import (
    BackwardExecutor,
    BackwardTensors,
    Certificate,
    DType,
    ExecutorName,
    MaskKind,
    Problem,
    ProblemClass,
    Source,
    Tensor,
    Variant,
    Verdict,
)
from flashgen.suite import Twin

SAMPLED_HEADS, SAMPLED_ROWS = 4, 32


class GradientSpace(TileSizes, Protocol):
    """The part of a search space that this gate needs."""

    def deterministic(self, klass: ProblemClass, variant: Variant) -> bool:
        """Whether equal inputs give equal bits."""
        ...


@dataclass(frozen=True)
class Expected:
    """Inputs of a case, what the forward pass saved, float64 gradients, and one unit of error for each."""

    inputs: Inputs
    given: Saved
    exact: Gradients
    units: dict[str, float]


# Entry points ---------------------------------------------------------------------------------------------------------


def quick(executor: BackwardExecutor, space: GradientSpace, source: Source, problem: Problem, seed: int) -> Certificate:
    """A few cases: enough to reject nearly every fault inside a search. Inputs are drawn afresh from `seed`."""
    return _certificate(executor, space, source, gradient_suite.quick_suite(source.klass, *sizes_of(space, source)), problem, seed)


def full(executor: BackwardExecutor, space: GradientSpace, source: Source, problem: Problem, seed: int) -> Certificate:
    """The whole suite; on the device also one launch of the problem's real size, checked on sampled rows and keys."""
    chosen, spot = gradient_suite.full_suite(source.klass, *sizes_of(space, source)), executor.name is ExecutorName.DEVICE
    return _certificate(executor, space, source, chosen, problem, seed, spot=spot)


def single(executor: BackwardExecutor, space: GradientSpace, source: Source, name: str, seed: int) -> CaseResult:
    """One case by name, as a failure message repeats it. Raises InvalidProblem for a name outside the suite."""
    by_name = {case.name: case for case in gradient_suite.full_suite(source.klass, *sizes_of(space, source))}
    if name not in by_name:
        raise InvalidProblem(
            f"The suite {gradient_suite.SUITE} for {source.klass.mask} masks has no case {name!r}. It has: {', '.join(by_name)}."
        )
    return run_case(executor, source, by_name[name], seed, space.deterministic(source.klass, source.variant))


def sizes_of(space: TileSizes, source: Source) -> tuple[suite.Tiles, int]:
    """Tile sizes of a variant, and how many tiles of keys it looks ahead, which size its cases."""
    return tiles_of(space, source), source.variant.as_dict().get("clear_ahead", 0)


@cache
def suite_digest() -> str:
    """sha256 over the text that defines the suite and its bounds, without comment lines and blank lines, and over the forward suite's."""
    digest = hashlib.sha256(certify.suite_digest().encode())
    for name in ("gradients", "gradient_suite", "gradient_gate"):
        lines = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8").splitlines()
        kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        digest.update("\n".join(kept).encode())
    return digest.hexdigest()


def _certificate(
    executor: BackwardExecutor, space: GradientSpace, source: Source, chosen: Sequence[Case], problem: Problem, seed: int, *,
    spot: bool = False,
) -> Certificate:  # fmt: skip
    """Runs cases until the first failure."""
    deterministic, results = space.deterministic(source.klass, source.variant), list[CaseResult]()
    for case in chosen:
        results.append(run_case(executor, source, case, seed, deterministic))
        if results[-1].failure:
            break
    if spot and not results[-1].failure:
        results.append(spot_check(executor, source, problem, seed))
    worst = max(results, key=lambda result: result.ratio)
    by_name = {case.name: case for case in chosen}
    return Certificate(
        verdict=Verdict.INEXACT if results[-1].failure else Verdict.EXACT,
        suite=gradient_suite.SUITE,
        suite_digest=suite_digest(),
        executor=executor.name,
        cases=len(results),
        bitwise_cases=sum(result.name in by_name and _is_bitwise(by_name[result.name], deterministic) for result in results),
        worst_error_ratio=worst.ratio,
        worst_case=f"{worst.name} seed {seed}: {by_name[worst.name].problem if worst.name in by_name else problem}",
        lse_abs_error=0.0,
        failure=results[-1].failure,
        deterministic=deterministic,
    )


def _is_bitwise(case: Case, deterministic: bool) -> bool:
    return bool(case.zeros) or (deterministic and case.twin is not Twin.NONE)


# One case -------------------------------------------------------------------------------------------------------------


def run_case(executor: BackwardExecutor, source: Source, case: Case, seed: int, deterministic: bool = True) -> CaseResult:
    """Launch, judge, and repeat where the case has a twin. Raises CompileError and LaunchError; a broken emulation rule is a failure."""
    expected = expect(case, seed)
    try:
        tensors, failure = launch(executor, source, case, expected)
        result = judge(case, expected, tensors) if not failure else CaseResult(case.name, 0.0, 0.0, 0.0, failure)
        if not result.failure:
            result = replace(result, failure=_twin_failure(executor, source, case, expected, tensors, deterministic))
    except EmulationFault as fault:
        result = CaseResult(case.name, 0.0, 0.0, 0.0, str(fault))
    if not result.failure:
        return result
    where = f"{case.name} ({case.problem}, {case.layout}, scale {case.softmax_scale:.6g})"
    return replace(result, failure=f"{where}: {result.failure}. Repeat: {repeat_command(executor, source, case, seed)}")


def repeat_command(executor: BackwardExecutor, source: Source, case: Case, seed: int) -> str:
    """The command that runs one case again."""
    asked = " --op backward" + " --deterministic" * source.klass.deterministic
    like = suite.Case(
        case.name, case.problem, case.make, suite.Check.BOUNDED, case.twin, case.layout, case.softmax_scale
    )  # fmt: skip
    return certify.repeat_command(executor, source, like, seed) + asked


@lru_cache(maxsize=512)
def expect(case: Case, seed: int = 7) -> Expected:
    """Inputs and gradients of a case; cached, since a search certifies many variants on the same cases."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    problem = case.problem
    inputs, rows = case.make(problem, rng), (problem.batch, problem.heads_q, problem.seqlen_q)
    dout = rng.standard_normal((*rows, problem.head_dim_v), dtype=np.float32)
    dout = reference.round_to((gradient_suite.on_grid(dout) if case.zeros else dout) * np.float32(case.dout), problem.dtype)
    if case.layout is Layout.EXPANDED:
        dout = np.broadcast_to(dout[:, :1], dout.shape)
    dlse = rng.standard_normal(rows).astype(np.float32) * np.float32(case.dlse)
    return expected_of(case, inputs, gradients.saved(inputs.q, inputs.k, inputs.v, dout, dlse, problem, case.softmax_scale))


def expected_of(case: Case, inputs: Inputs, given: Saved) -> Expected:
    """Float64 gradients and units of error of given inputs."""
    problem, scale, operands = case.problem, case.softmax_scale, (inputs.q, inputs.k, inputs.v)
    exact = gradients.attention(*operands, given.dout, given.dlse, problem, scale)
    plain = gradients.plain_errors(*operands, given, problem, scale, exact)
    return Expected(inputs, given, exact, {name: error_unit(x, plain[name], problem.dtype) for name, x in exact.named()})


def operands(case: Case, expected: Expected, layout: Layout | None = None) -> BackwardTensors:
    """Guarded inputs, and poisoned outputs of the same layout. `dlse` is there only when the case has one."""
    problem, given, layout = case.problem, expected.given, layout or case.layout
    forward = cases.operands(problem, expected.inputs, layout)
    forward.o.view()[...] = reference.encode(given.o, problem.dtype)
    forward.lse.view()[..., 0] = given.lse
    plain_layout = {Layout.FUSED: Layout.TRANSPOSED, Layout.EXPANDED: Layout.CONTIGUOUS}.get(layout, layout)
    dout = cases.allocate(cases.shape_of(given.dout), problem.dtype, Layout.EXPANDED if layout is Layout.EXPANDED else plain_layout)
    dout.view()[...] = reference.encode(given.dout, problem.dtype)
    outputs = {f"d{name}": cases.allocate(x.shape, problem.dtype, plain_layout) for name, x in forward.named()[:3]}
    return BackwardTensors(**dict(forward.named()), dout=dout, dlse=_row_numbers(given.dlse) if case.dlse else None, **outputs)


def _row_numbers(values: reference.Floats) -> Tensor:
    batch, heads, rows = (int(extent) for extent in values.shape)
    tensor = cases.allocate((batch, heads, rows, 1), DType.FLOAT32, Layout.CONTIGUOUS)
    tensor.view()[..., 0] = values
    return tensor


def launch(
    executor: BackwardExecutor, source: Source, case: Case, expected: Expected, layout: Layout | None = None
) -> tuple[BackwardTensors, str]:
    """One run on fresh, poisoned, guarded buffers; the failure in words when it touched what it must not, or left something unwritten."""
    tensors = operands(case, expected, layout)
    inputs = [(name, tensor, cases.bits_of(tensor.buffer).copy()) for name, tensor in tensors.named() if name not in tensors.outputs]
    executor.backward(source, case.problem, tensors, case.softmax_scale)
    for name, tensor, before in inputs:
        if not np.array_equal(cases.bits_of(tensor.buffer), before):
            return tensors, f"the kernel changed its input {name}"
    for name, tensor in gradients_of(tensors):
        strayed = ~cases.is_poison(tensor.buffer, case.problem.dtype) & ~cases.owned(tensor)
        if strayed.any():
            return tensors, f"the kernel wrote {strayed.sum()} elements outside {name}"
        left = np.argwhere(cases.is_poison(tensor.view(), case.problem.dtype))
        if len(left):
            return tensors, f"{len(left)} elements of {name} were never written, first {name}{left[0].tolist()}"
    return tensors, ""


def gradients_of(tensors: BackwardTensors) -> tuple[tuple[str, Tensor], ...]:
    """dq, dk and dv by name."""
    return tensors.named()[-len(tensors.outputs) :]


def judge(case: Case, expected: Expected, tensors: BackwardTensors) -> CaseResult:
    """Compare one run with the float64 gradients; the ratio is the worst of the three."""
    result = CaseResult(case.name, 0.0, 0.0, 0.0)
    for (name, tensor), (_, exact) in zip(gradients_of(tensors), expected.exact.named(), strict=True):
        values = reference.decode(tensor.view(), case.problem.dtype).astype(np.float64)
        found = _judge_one(name, values, exact, expected.units[name], _must_be_zero(case, name))
        worse = max(result, found, key=lambda each: (bool(each.failure), each.ratio))
        result = CaseResult(case.name, worse.ratio, max(result.max_error, found.max_error), 0.0, result.failure or found.failure)
    return result


def _judge_one(name: str, values: NDArray[np.float64], exact: reference.Floats, unit: float, zero: NDArray[np.bool_]) -> CaseResult:
    wrong = np.argwhere((values != 0) & zero[:, None])
    failure = ""
    if len(wrong):
        failure = f"{name}{wrong[0].tolist()} = {values[tuple(wrong[0])]:.9g} must be exactly 0"
    error = np.abs(values - exact)
    error[np.isnan(error)] = np.inf
    worst = float(error.max(initial=0.0))
    if not failure and worst > BOUND * unit:
        place = np.unravel_index(int(error.argmax()), error.shape)
        numbers = f"{values[place]:.9g}, expected {exact[place]:.9g}, error {error[place]:.3g}"
        failure = f"{name}{[int(i) for i in place]} = {numbers}, allowed {BOUND * unit:.3g}"
    return CaseResult(name, worst / unit, worst, 0.0, failure)


def _must_be_zero(case: Case, name: str) -> NDArray[np.bool_]:
    """Rows of a gradient that must be exactly 0: those that see or are seen by nothing, and all where the case says so."""
    problem = case.problem
    seen = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    zero: NDArray[np.bool_] = ~np.logical_or.reduce(seen, axis=1 if name == "dq" else 0) | (name in case.zeros)
    return zero


# Twins ----------------------------------------------------------------------------------------------------------------


def _twin_failure(
    executor: BackwardExecutor, source: Source, case: Case, expected: Expected, first: BackwardTensors, deterministic: bool
) -> str:
    """A second run: the same bits where the variant promises them, else within the bound again."""
    for changed, again, batch, change in _second_runs(executor, case, expected):
        layout = Layout.CONTIGUOUS if case.twin is Twin.CONTIGUOUS else None
        second, failure = launch(executor, source, changed, again, layout)
        failure = failure or judge(changed, again, second).failure
        if failure:
            return f"{change}: {failure}"
        for (name, left), (_, right) in zip(gradients_of(first), gradients_of(second), strict=True):
            different = np.argwhere(cases.bits_of(left.view()[batch]) != cases.bits_of(right.view()))
            if deterministic and len(different):
                return f"{change} changed {len(different)} elements of {name}, first {name}{different[0].tolist()}"
    return ""


def _second_runs(executor: BackwardExecutor, case: Case, expected: Expected) -> list[tuple[Case, Expected, slice, str]]:
    """Case, what is expected, the batch elements of the first run to compare with, and what was changed."""
    everything = slice(None)
    if case.twin is Twin.REPEATED:
        return [(case, expected, everything, "a repetition of the same launch")] * REPEATS[executor.name]
    if case.twin is Twin.CONTIGUOUS:
        return [(case, expected, everything, "contiguous copies of the operands")]
    if case.twin is Twin.GARBAGE:
        problem = case.problem
        unseen = ~np.logical_or.reduce(reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv), axis=0)
        dirty = replace(expected, inputs=gradient_suite.with_garbage(problem, expected.inputs, unseen))
        return [(case, dirty, everything, "other numbers in keys that no query sees")]
    if case.twin is Twin.ALONE:
        return [_alone(case, expected, batch) for batch in range(case.problem.batch)]
    return []


def _alone(case: Case, expected: Expected, batch: int) -> tuple[Case, Expected, slice, str]:
    one = slice(batch, batch + 1)
    inputs = Inputs(*(x[one] for x in (expected.inputs.q, expected.inputs.k, expected.inputs.v)))
    given = Saved(*(x[one] for x in (expected.given.o, expected.given.lse, expected.given.dout, expected.given.dlse)))
    exact = Gradients(*(values[one] for _, values in expected.exact.named()))
    alone = replace(case, problem=replace(case.problem, batch=1))
    return alone, Expected(inputs, given, exact, expected.units), one, f"running batch element {batch} by itself"


# Real size ------------------------------------------------------------------------------------------------------------


def spot_check(
    executor: BackwardExecutor, source: Source, problem: Problem, seed: int, most_elements: int = suite.MOST_ELEMENTS
) -> CaseResult:
    """One launch of the problem's own size: every gradient written and finite, sampled rows and keys within the bound.

    o and lse are not those of a forward pass, which would take long on the host, but numbers of their size: the gradients are a function
    of what is saved. Batches and heads are cut where a tensor would hold more than `most_elements`.
    """
    problem = suite.real_size(problem, most_elements)
    rng = np.random.default_rng([seed, *b"real_size"])
    case = Case("real_size", problem, layout=Layout.CONTIGUOUS, dlse=True)
    rows = (problem.batch, problem.heads_q, problem.seqlen_q)
    drawn = [_draw(rng, shape) for shape in (*cases.shapes(problem), (*rows, problem.head_dim_v), (*rows, problem.head_dim_v), rows)]
    counts = reference.visible_counts(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    with np.errstate(divide="ignore"):
        lse = np.broadcast_to(np.log(counts) + 1.0, rows).astype(np.float32)
    given = Saved(drawn[3], lse, drawn[4], drawn[5])
    expected = Expected(Inputs(*drawn[:3]), given, Gradients(*drawn[:3]), {})
    tensors, failure = launch(executor, source, case, expected)
    found = {name: reference.decode(tensor.view(), problem.dtype) for name, tensor in gradients_of(tensors)}
    for name, values in found.items():
        if not failure and not np.isfinite(values).all():
            failure = f"{name}{np.argwhere(~np.isfinite(values))[0].tolist()} is not finite"
    if failure:
        return CaseResult("real_size", 0.0, 0.0, 0.0, f"real_size ({problem}): {failure}")
    results = [_sampled_head(problem, expected, found, rng) for _ in range(SAMPLED_HEADS if found["dq"].size and found["dk"].size else 0)]
    return max(results, key=lambda result: (bool(result.failure), result.ratio), default=CaseResult("real_size", 0.0, 0.0, 0.0))


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Multiples of 1/64 within ±2, which every element type holds."""
    return np.asarray(rng.integers(-128, 128, shape, dtype=np.int8) * np.float32(1 / 64), dtype=np.float32)


def _sampled_head(problem: Problem, expected: Expected, found: dict[str, NDArray[np.float32]], rng: np.random.Generator) -> CaseResult:
    """Rows of dq of one random head, and keys of dk and dv of its group: the first, the last, and others at random."""
    batch, head = int(rng.integers(problem.batch)), int(rng.integers(problem.heads_q))
    kv_head = head // problem.gqa_group
    rows = np.unique([0, problem.seqlen_q - 1, *rng.integers(0, problem.seqlen_q, SAMPLED_ROWS)])
    keys = np.unique([0, problem.seqlen_kv - 1, *rng.integers(0, problem.seqlen_kv, SAMPLED_ROWS)])
    seen_rows = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv, rows)
    dq = _of_head(problem, expected, batch, head, rows, slice(None), seen_rows)
    seen_keys = _seen_of_keys(problem, keys)
    group = range(kv_head * problem.gqa_group, (kv_head + 1) * problem.gqa_group)
    parts = [_of_head(problem, expected, batch, each, slice(None), keys, seen_keys) for each in group]
    sums = [[sum(getattr(part[turn], name) for part in parts) for turn in (0, 1)] for name in ("dk", "dv")]
    checks = (
        ("dq", found["dq"][batch, head, rows], dq[0].dq, dq[1].dq),
        ("dk", found["dk"][batch, kv_head, keys], *sums[0]),
        ("dv", found["dv"][batch, kv_head, keys], *sums[1]),
    )
    results = []
    for name, values, exact, plain in checks:
        rounded = reference.round_to(np.asarray(plain, dtype=np.float32), problem.dtype)
        unit = error_unit(exact, float(np.abs(rounded - exact).max(initial=0.0)), problem.dtype)
        nothing = np.zeros(len(values), dtype=bool)
        results.append(_judge_one(name, values.astype(np.float64), exact, unit, nothing))
    worst = max(results, key=lambda result: (bool(result.failure), result.ratio))
    failure = f"real_size ({problem}): batch {batch}, head {head}, sampled {worst.failure}" if worst.failure else ""
    return CaseResult("real_size", worst.ratio, worst.max_error, 0.0, failure)


def _of_head(
    problem: Problem, expected: Expected, batch: int, head: int, rows: NDArray[np.int64] | slice, keys: NDArray[np.int64] | slice,
    seen: NDArray[np.bool_],
) -> tuple[Gradients, Gradients]:  # fmt: skip
    """Exact and plain gradients of one head from some of its rows and keys."""
    inputs, given, kv = expected.inputs, expected.given, (batch, head // problem.gqa_group)
    at = (batch, head)
    q, k, v = inputs.q[at][rows], inputs.k[kv][keys], inputs.v[kv][keys]
    part = Saved(given.o[at][rows], given.lse[at][rows], given.dout[at][rows], given.dlse[at][rows])
    exact = gradients.from_saved(q, k, v, part, seen, problem.scale)
    return exact, gradients.plain_head(q, k, v, part, seen, problem.scale, problem.dtype)


def _seen_of_keys(problem: Problem, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(rows, keys): which rows see the chosen keys, without the whole matrix."""
    rows = np.arange(problem.seqlen_q)[:, None] + problem.diagonal
    mask, distance = problem.mask, keys[None, :] - rows
    seen = np.ones(distance.shape, dtype=bool)
    if mask.kind is MaskKind.CAUSAL:
        seen = distance <= 0
    if mask.kind is MaskKind.WINDOW:
        seen &= (mask.left < 0) | (distance >= -mask.left)
        seen &= (mask.right < 0) | (distance <= mask.right)
    return seen
