"""The exactness gate of a source's operation: `certify` for forward kernels, `gradient_gate` for backward ones."""

from __future__ import annotations

from typing import cast

from flashgen import certify, gradient_gate, gradient_suite, suite
from flashgen.certify import CaseResult
from flashgen.model import BackwardExecutor, Certificate, Executor, Op, Problem, Source
from flashgen.space import Space


def quick(executor: Executor, space: Space, source: Source, problem: Problem, seed: int) -> Certificate:
    """A few cases, for use inside a search. Inputs are drawn afresh from `seed`."""
    if source.klass.op is Op.BACKWARD:
        return gradient_gate.quick(cast(BackwardExecutor, executor), space, source, problem, seed)
    return certify.quick(executor, space, source, problem, seed)


def full(executor: Executor, space: Space, source: Source, problem: Problem, seed: int) -> Certificate:
    """The whole suite."""
    if source.klass.op is Op.BACKWARD:
        return gradient_gate.full(cast(BackwardExecutor, executor), space, source, problem, seed)
    return certify.full(executor, space, source, problem, seed)


def single(executor: Executor, space: Space, source: Source, name: str, seed: int) -> CaseResult:
    """One case by name. Raises InvalidProblem for a name outside the suite."""
    if source.klass.op is Op.BACKWARD:
        return gradient_gate.single(cast(BackwardExecutor, executor), space, source, name, seed)
    return certify.single(executor, space, source, name, seed)


def real_size(executor: Executor, source: Source, problem: Problem, seed: int) -> CaseResult:
    """The one case of the whole suite that depends on more of the problem than its class: a launch of its own size, rows sampled."""
    if source.klass.op is Op.BACKWARD:
        return gradient_gate.spot_check(cast(BackwardExecutor, executor), source, problem, seed)
    return certify.spot_check(executor, source, problem, seed)


def suite_name(op: Op) -> str:
    """Name of the suite of an operation."""
    return gradient_suite.SUITE if op is Op.BACKWARD else suite.SUITE


def suite_digest(op: Op) -> str:
    """Digest of the suite of an operation and of its bounds."""
    return gradient_gate.suite_digest() if op is Op.BACKWARD else certify.suite_digest()
