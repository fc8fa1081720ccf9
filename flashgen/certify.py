"""The exactness gate: runs the case suite on one source and says whether every element is what attention demands.

A kernel passes only when, in every case, inputs and guards are untouched, every output element was written, no error exceeds its bound
(an elementwise maximum, never an average), and all bitwise promises hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flashgen import cases, reference, suite
from flashgen.cases import Inputs, Layout
from flashgen.errors import EmulationFault, InvalidProblem
from flashgen.model import (
    Certificate,
    DType,
    Executor,
    ExecutorName,
    ForwardTensors,
    MaskKind,
    Problem,
    ProblemClass,
    Source,
    Tensor,
    Variant,
    Verdict,
)
from flashgen.suite import Case, Check, Tiles, Twin

BOUND = 2.0
"""Largest allowed error, in errors of the plain computation plus one ulp."""
LSE_TOLERANCE = 1e-5
REPEATS = {ExecutorName.DEVICE: 10, ExecutorName.EMULATED: 2}
SAMPLED_HEADS, SAMPLED_ROWS = 8, 32


class TileSizes(Protocol):
    """The part of a search space that certification needs."""

    def constants(self, klass: ProblemClass, variant: Variant) -> dict[str, int | bool]:
        """What is bound into the C++ Config; block_q and block_kv are read when present."""
        ...


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case that ran: error ratio (bound 2), largest absolute error, lse error / max(1, |lse|), and the failure in words, or ''."""

    name: str
    ratio: float
    max_error: float
    lse_error: float
    failure: str = ""


@dataclass(frozen=True)
class Expected:
    """Inputs of a case, the float64 reference, and the size of one unit of error: plain error + 1 ulp at the largest magnitude."""

    inputs: Inputs
    o: reference.Floats
    lse: reference.Floats
    unit: float


# Entry points ---------------------------------------------------------------------------------------------------------


def quick(executor: Executor, space: TileSizes, source: Source, problem: Problem, seed: int) -> Certificate:
    """Eight cases: enough to reject nearly every fault inside a search. Inputs are drawn afresh from `seed`."""
    return _certificate(executor, source, suite.quick_suite(source.klass, tiles_of(space, source)), problem, seed)


def full(executor: Executor, space: TileSizes, source: Source, problem: Problem, seed: int) -> Certificate:
    """The whole suite; on the device also one launch of the problem's real size, checked on sampled rows."""
    return _certificate(
        executor, source, suite.full_suite(source.klass, tiles_of(space, source)), problem, seed, spot=executor.name is ExecutorName.DEVICE
    )


def single(executor: Executor, space: TileSizes, source: Source, name: str, seed: int) -> CaseResult:
    """One case by name, as a failure message repeats it. Raises InvalidProblem for a name outside the suite."""
    by_name = {case.name: case for case in suite.full_suite(source.klass, tiles_of(space, source))}
    if name not in by_name:
        raise InvalidProblem(f"The suite {suite.SUITE} for {source.klass.mask} masks has no case {name!r}. It has: {', '.join(by_name)}.")
    return run_case(executor, source, by_name[name], seed)


def errors(executor: Executor, space: TileSizes, source: Source, seed: int) -> list[CaseResult]:
    """Every case without stopping at the first failure: how far an approximation is from attention."""
    return [run_case(executor, source, case, seed) for case in suite.full_suite(source.klass, tiles_of(space, source))]


def describe(results: Sequence[CaseResult]) -> str:
    """One line on a whole run of `errors`: exact, or an approximation with its largest error."""
    failed = [result for result in results if result.failure]
    if not failed:
        return f"exact in {len(results)} cases; largest error {max(result.ratio for result in results):.2f} x that of the plain computation"
    worst = max(failed, key=lambda result: result.ratio)
    return (
        f"approximation with error: {len(failed)} of {len(results)} cases fail; largest error {worst.max_error:.3g}, "
        f"{worst.ratio:.3g} x that of the plain computation (allowed {BOUND:g}), in {worst.name}"
    )


def tiles_of(space: TileSizes, source: Source) -> Tiles:
    """Tile sizes of a variant: those of its constants, else 64, and how many query heads of a group it packs into a tile."""
    constants = {name.lower(): int(value) for name, value in space.constants(source.klass, source.variant).items()}
    group = constants.get("group_pack", 1)
    return Tiles(constants.get("block_q", 64) // group, constants.get("block_kv", 64), group)


@cache
def suite_digest() -> str:
    """sha256 over the text that defines the suite and its bounds, without comment lines and blank lines."""
    digest = hashlib.sha256()
    for name in ("cases", "suite", "reference", "certify"):
        lines = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8").splitlines()
        kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        digest.update("\n".join(kept).encode())
    return digest.hexdigest()


def _certificate(
    executor: Executor, source: Source, chosen: Sequence[Case], problem: Problem, seed: int, *, spot: bool = False
) -> Certificate:
    """Runs cases until the first failure."""
    results = list[CaseResult]()
    for case in chosen:
        results.append(run_case(executor, source, case, seed))
        if results[-1].failure:
            break
    if spot and not results[-1].failure:
        results.append(spot_check(executor, source, problem, seed))
    worst = max(results, key=lambda result: result.ratio)
    by_name = {case.name: case for case in chosen}
    return Certificate(
        verdict=Verdict.INEXACT if results[-1].failure else Verdict.EXACT,
        suite=suite.SUITE,
        suite_digest=suite_digest(),
        executor=executor.name,
        cases=len(results),
        bitwise_cases=sum(result.name in by_name and by_name[result.name].bitwise for result in results),
        worst_error_ratio=worst.ratio,
        worst_case=f"{worst.name} seed {seed}: {by_name[worst.name].problem if worst.name in by_name else problem}",
        lse_abs_error=max(result.lse_error for result in results),
        failure=results[-1].failure,
    )


# One case -------------------------------------------------------------------------------------------------------------


def run_case(executor: Executor, source: Source, case: Case, seed: int) -> CaseResult:
    """Launch, judge, and repeat where the case has a twin. Raises CompileError and LaunchError; a broken emulation rule is a failure."""
    expected = expect(case, seed)
    try:
        tensors, failure = launch(executor, source, case.problem, expected.inputs, case.layout, case.scale)
        result = judge(case, expected, tensors) if not failure else CaseResult(case.name, 0.0, 0.0, 0.0, failure)
        if not result.failure:
            failure = _twin_failure(executor, source, case, expected, tensors)
            result = CaseResult(case.name, result.ratio, result.max_error, result.lse_error, failure)
    except EmulationFault as fault:
        result = CaseResult(case.name, 0.0, 0.0, 0.0, str(fault))
    if not result.failure:
        return result
    where = f"{case.name} ({case.problem}, {case.layout}, scale {case.scale:.6g})"
    told = f"{where}: {result.failure}. Repeat: {repeat_command(executor, source, case, seed)}"
    return CaseResult(case.name, result.ratio, result.max_error, result.lse_error, told)


def repeat_command(executor: Executor, source: Source, case: Case, seed: int) -> str:
    """The command that runs one case again."""
    klass = source.klass
    mask = {MaskKind.NONE: "--no-causal", MaskKind.CAUSAL: "--causal", MaskKind.WINDOW: "--window -1,-1"}[klass.mask]
    params = ",".join(f"{name}={int(value)}" for name, value in source.variant.params)
    return (
        f"flashgen certify --family {source.family} --params {params} --dtype {klass.dtype} --head-dim {klass.head_dim} "
        f"--head-dim-v {klass.head_dim_v} {mask} --executor {executor.name} --case {case.name} --seed {seed}"
    )


@lru_cache(maxsize=256)
def expect(case: Case, seed: int) -> Expected:
    """Inputs and reference of a case; cached, since a search certifies many variants on the same cases."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    inputs = case.make(case.problem, rng)
    exact = reference.attention(inputs.q, inputs.k, inputs.v, case.problem, case.scale)
    plain_error = reference.plain_error(inputs.q, inputs.k, inputs.v, case.problem, case.scale, exact.o)
    return Expected(inputs, exact.o, exact.lse, error_unit(exact.o, plain_error, case.problem.dtype))


def error_unit(exact: reference.Floats, plain_error: float, dtype: DType) -> float:
    """The error of the plain computation plus one ulp at the largest finite magnitude, so that it never collapses to zero."""
    return plain_error + reference.ulp(float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0)), dtype)


def launch(
    executor: Executor, source: Source, problem: Problem, inputs: Inputs, layout: Layout, scale: float
) -> tuple[ForwardTensors, str]:
    """One run on fresh, poisoned, guarded buffers; the failure in words when it touched what it must not."""
    tensors = cases.operands(problem, inputs, layout)
    before = {name: cases.bits_of(tensor.buffer).copy() for name, tensor in tensors.named()[:3]}
    executor.forward(source, problem, tensors, scale)
    for name, tensor in tensors.named()[:3]:
        changed = np.flatnonzero(cases.bits_of(tensor.buffer) != before[name])
        if changed.size:
            return tensors, f"the kernel changed its input {name}: {_strayed(changed, tensor)}"
    for name, tensor, dtype in (("o", tensors.o, problem.dtype), ("lse", tensors.lse, DType.FLOAT32)):
        strayed = np.flatnonzero(~cases.is_poison(tensor.buffer, dtype) & ~cases.owned(tensor))
        if strayed.size:
            return tensors, f"the kernel wrote outside {name}: {_strayed(strayed, tensor)}"
    return tensors, _unwritten(tensors, problem.dtype)


def _strayed(places: NDArray[np.intp], tensor: Tensor) -> str:
    return f"{places.size} elements, the first {int(places[0]) - tensor.offset} elements after the tensor's start"


def _unwritten(tensors: ForwardTensors, dtype: DType) -> str:
    for name, tensor, kind in (("o", tensors.o, dtype), ("lse", tensors.lse, DType.FLOAT32)):
        poison = np.argwhere(cases.is_poison(tensor.view(), kind))
        if len(poison):
            return f"{len(poison)} elements of {name} were never written, first {name}{_at(poison[0])}"
    return ""


def judge(case: Case, expected: Expected, tensors: ForwardTensors) -> CaseResult:
    """Compare one run with the reference."""
    dtype = case.problem.dtype
    output = reference.decode(tensors.o.view(), dtype).astype(np.float64)
    lse = tensors.lse.view()[..., 0].astype(np.float64)
    failure = _empty_row_failure(case.problem, output, lse)
    error = _error(output, expected.o)
    ratio = float(error.max(initial=0.0)) / expected.unit
    if not failure and ratio > BOUND:
        place = np.unravel_index(int(error.argmax()), error.shape)
        numbers = f"{output[place]:.9g}, expected {expected.o[place]:.9g}, error {error[place]:.3g}"
        failure = f"o{_at(place)} = {numbers}, allowed {BOUND * expected.unit:.3g}"
    failure = failure or _bitwise_failure(case, expected, tensors.o)
    lse_error = _error(lse, expected.lse) / np.maximum(1.0, np.where(np.isfinite(expected.lse), np.abs(expected.lse), 1.0))
    if not failure and lse_error.max(initial=0.0) > LSE_TOLERANCE:
        place = np.unravel_index(int(lse_error.argmax()), lse_error.shape)
        allowed = LSE_TOLERANCE * max(1.0, abs(expected.lse[place]))
        failure = f"lse{_at(place)} = {lse[place]:.9g}, expected {expected.lse[place]:.9g}, allowed error {allowed:.3g}"
    return CaseResult(case.name, ratio, float(error.max(initial=0.0)), float(lse_error.max(initial=0.0)), failure)


def _error(values: reference.Floats, expected: reference.Floats) -> NDArray[np.float64]:
    """Absolute errors: 0 where equal (infinities too) or where the reference is NaN, since such rows were fed NaN; infinite for a NaN."""
    with np.errstate(invalid="ignore"):
        error = np.where((values == expected) | np.isnan(expected), 0.0, np.abs(values - expected))
    return np.where(np.isnan(error), np.inf, error)


def _empty_row_failure(problem: Problem, output: NDArray[np.float64], lse: NDArray[np.float64]) -> str:
    empty = reference.visible_counts(problem.mask, problem.seqlen_q, problem.seqlen_kv) == 0
    wrong = np.argwhere(empty & ~((output == 0).all(axis=-1) & np.isneginf(lse)))
    if not len(wrong):
        return ""
    place = tuple(wrong[0])
    got = f"o from {output[place].min()} to {output[place].max()}, lse {lse[place]}"
    return f"row {_at(place)} sees no key, so o must be 0 and lse -inf; got {got}"


def _bitwise_failure(case: Case, expected: Expected, o: Tensor) -> str:
    if case.check is Check.BOUNDED:
        return ""
    dtype = case.problem.dtype
    counts = reference.visible_counts(case.problem.mask, case.problem.seqlen_q, case.problem.seqlen_kv)
    promised = (counts > 0) & ((counts & (counts - 1) == 0) if case.check is Check.BITWISE_POWERS else True)
    wanted = reference.encode(expected.o, dtype)
    different = np.argwhere((cases.bits_of(o.view()) != cases.bits_of(wanted)) & promised[:, None])
    if not len(different):
        return ""
    place = tuple(different[0])
    value, right = (float(reference.decode(x[place].reshape(1), dtype)[0]) for x in (o.view(), wanted))
    return f"o{_at(place)} = {value:.9g}, must be {right:.9g} bit for bit ({len(different)} elements differ)"


def _at(place: Iterable[Any]) -> str:
    return "[" + ", ".join(str(int(index)) for index in place) + "]"


# Twins ----------------------------------------------------------------------------------------------------------------


def _twin_failure(executor: Executor, source: Source, case: Case, expected: Expected, first: ForwardTensors) -> str:
    inputs, problem = expected.inputs, case.problem
    if case.twin is Twin.REPEATED:
        for _ in range(REPEATS[executor.name]):
            if failure := _rerun(executor, source, case, inputs, case.layout, first, "a repetition of the same launch"):
                return failure
    if case.twin is Twin.CONTIGUOUS:
        return _rerun(executor, source, case, inputs, Layout.CONTIGUOUS, first, "contiguous copies of the operands")
    if case.twin is Twin.GARBAGE:
        unseen = ~np.logical_or.reduce(reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv), axis=0)
        garbage = cases.with_garbage(problem, inputs, unseen)
        return _rerun(executor, source, case, garbage, case.layout, first, "other numbers in keys that no query sees")
    if case.twin is Twin.ALONE:
        for batch in range(problem.batch):
            if failure := _alone(executor, source, case, inputs, first, batch):
                return failure
    return ""


def _rerun(executor: Executor, source: Source, case: Case, inputs: Inputs, layout: Layout, first: ForwardTensors, change: str) -> str:
    second, failure = launch(executor, source, case.problem, inputs, layout, case.scale)
    return failure or _different_bits(first.o.view(), second.o.view(), first.lse.view(), second.lse.view(), change)


def _alone(executor: Executor, source: Source, case: Case, inputs: Inputs, first: ForwardTensors, batch: int) -> str:
    one = slice(batch, batch + 1)
    problem = replace(case.problem, batch=1)
    second, failure = launch(executor, source, problem, Inputs(inputs.q[one], inputs.k[one], inputs.v[one]), case.layout, case.scale)
    views = first.o.view()[one], second.o.view(), first.lse.view()[one], second.lse.view()
    return failure or _different_bits(*views, f"running batch element {batch} by itself")


def _different_bits(o: NDArray[Any], other_o: NDArray[Any], lse: NDArray[Any], other_lse: NDArray[Any], change: str) -> str:
    for name, left, right in (("o", o, other_o), ("lse", lse, other_lse)):
        different = np.argwhere(cases.bits_of(left) != cases.bits_of(right))
        if len(different):
            return f"{change} changed {len(different)} elements of {name}, first {name}{_at(different[0])}"
    return ""


# Real size ------------------------------------------------------------------------------------------------------------


def spot_check(executor: Executor, source: Source, problem: Problem, seed: int, most_elements: int = suite.MOST_ELEMENTS) -> CaseResult:
    """One launch of the problem's own size: every output written and finite, sampled rows within the bound.

    Batches and heads are cut where a tensor would hold more than `most_elements`.
    """
    problem = suite.real_size(problem, most_elements)
    rng = np.random.default_rng([seed, *b"real_size"])
    inputs = Inputs(*(rng.integers(-128, 128, shape, dtype=np.int8) * np.float32(1 / 64) for shape in cases.shapes(problem)))
    tensors, failure = launch(executor, source, problem, inputs, Layout.CONTIGUOUS, problem.scale)
    if failure:
        return CaseResult("real_size", 0.0, 0.0, 0.0, f"real_size ({problem}): {failure}")
    output, lse = reference.decode(tensors.o.view(), problem.dtype), tensors.lse.view()[..., 0]
    if np.isnan(output).any() or np.isnan(lse).any():
        place = np.argwhere(np.isnan(lse[..., None] + output))[0]
        return CaseResult("real_size", 0.0, 0.0, 0.0, f"real_size ({problem}): NaN at o{_at(place)}")
    results = [_sampled_head(problem, inputs, output, lse, rng) for _ in range(SAMPLED_HEADS if output.size else 0)]
    return max(results, key=lambda result: (bool(result.failure), result.ratio), default=CaseResult("real_size", 0.0, 0.0, 0.0))


def _sampled_head(
    problem: Problem, inputs: Inputs, output: NDArray[np.float32], lse: NDArray[np.float32], rng: np.random.Generator
) -> CaseResult:
    """Rows of one random head: the first, the last, and others at random."""
    batch, head = int(rng.integers(problem.batch)), int(rng.integers(problem.heads_q))
    rows = np.unique([0, problem.seqlen_q - 1, *rng.integers(0, problem.seqlen_q, SAMPLED_ROWS)])
    kv_head = head // problem.gqa_group
    operands = inputs.q[batch, head, rows], inputs.k[batch, kv_head], inputs.v[batch, kv_head]
    seen = reference.visible(problem.mask, problem.seqlen_q, problem.seqlen_kv, rows)
    exact = reference.head(*operands, seen, problem.scale)
    unit = error_unit(exact.o, reference.plain_head_error(*operands, seen, problem.scale, problem.dtype, exact.o), problem.dtype)
    error = _error(output[batch, head, rows].astype(np.float64), exact.o)
    lse_error = _error(lse[batch, head, rows].astype(np.float64), exact.lse)
    lse_error /= np.maximum(1.0, np.where(np.isfinite(exact.lse), np.abs(exact.lse), 1.0))
    ratio, worst_lse = float(error.max()) / unit, float(lse_error.max())
    failure = ""
    if ratio > BOUND or worst_lse > LSE_TOLERANCE:
        row, column = np.unravel_index(int(error.argmax()), error.shape)
        failure = (
            f"real_size ({problem}): o{_at((batch, head, rows[row], column))} is off by {error[row, column]:.3g}, "
            f"allowed {BOUND * unit:.3g}; worst lse error {worst_lse:.3g}, allowed {LSE_TOLERANCE:.3g}"
        )
    return CaseResult("real_size", ratio, float(error.max()), worst_lse, failure)
