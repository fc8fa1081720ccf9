"""simt_backward: every gradient within the bound on the emulated executor, deterministic, and planted faults rejected."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backward_faults import FAULTS
from backward_kernels import (
    Case,
    backward_source,
    cases_of,
    emulated,
    expect,
    first_failure,
    of_backward,
    operands,
    outputs_of,
)

from flashgen import cases, paths
from flashgen.device import preset
from flashgen.emulate import POLICIES, Policy
from flashgen.launch import BackwardStruct, MappedBackwardStruct
from flashgen.model import Alignment, DType, Mask, Op, Problem, Source
from flashgen.space import Space, load_space

DEVICE = preset("h200")
SMALL = {"block_q": 16, "block_kv": 8, "threads": 64}
MASKS = (Mask(), Mask.causal(), Mask.window(-1, -1))


@pytest.fixture(scope="module")
def space() -> Space:
    return load_space("simt_backward")


def problem_of(dtype: DType, mask: Mask, dims: tuple[int, int] = (16, 24)) -> Problem:
    return Problem(dtype, *dims, batch=1, heads_q=1, heads_kv=1, seqlen_q=64, seqlen_kv=64, mask=mask, op=Op.BACKWARD)


def small(space: Space, dtype: DType, mask: Mask) -> tuple[Source, list[Case]]:
    problem = problem_of(dtype, mask)
    source = backward_source(space, problem, space.bind(of_backward(problem), DEVICE).variant(SMALL))
    return source, cases_of(problem, SMALL["block_q"], SMALL["block_kv"])


@pytest.mark.emulated
@pytest.mark.parametrize(("struct", "header"), [(BackwardStruct, "backward_params"), (MappedBackwardStruct, "mapped_backward_params")])
def test_the_backward_parameter_struct_is_the_kernels_struct(tmp_path: Path, struct: type[ctypes.Structure], header: str) -> None:
    name = f"fg::{struct.__name__.replace('Struct', 'Params')}"
    fields = [field for field, _ in struct._fields_ if field != "padding"]  # type: ignore[misc]
    prints = "".join(f'std::printf("{field} %zu\\n", offsetof({name}, {field}));' for field in fields)
    file, program = tmp_path / "offsets.cpp", tmp_path / "offsets"
    file.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "{header}.cuh"\n'
        f'int main() {{ {prints} std::printf("size %zu\\n", sizeof({name})); }}\n'
    )
    compiler = shutil.which("g++")
    assert compiler
    options = ["-std=c++17", "-O2", "-DFG_EMULATE", f"-I{paths.templates() / 'include'}", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run([compiler, *options, str(file), "-o", str(program)], check=True, capture_output=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split("\n")
    expected = [f"{field} {getattr(struct, field).offset}" for field in fields] + [f"size {ctypes.sizeof(struct)}"]
    assert [line for line in lines if line] == expected


@pytest.mark.emulated
@pytest.mark.parametrize(("dtype", "mask"), list(zip(DType, MASKS, strict=True)), ids=str)
def test_every_gradient_is_within_the_bound(space: Space, dtype: DType, mask: Mask) -> None:
    source, chosen = small(space, dtype, mask)
    assert not first_failure(space, source, DEVICE, chosen, [emulated()])


def gradient_bits(space: Space, source: Source, case: Case, policy: Policy, live_ctas: int = 1) -> list[np.ndarray]:
    tensors = operands(case, expect(case))
    emulated(policy, live_ctas)(source, space.bind(of_backward(case.problem), DEVICE), case, tensors)
    return [cases.bits_of(tensor.view()) for tensor in outputs_of(tensors).values()]


@pytest.mark.emulated
def test_every_schedule_gives_the_same_bits(space: Space) -> None:
    source, chosen = small(space, DType.BFLOAT16, Mask.causal())
    case = next(case for case in chosen if case.name == "group")
    first = gradient_bits(space, source, case, POLICIES[0])
    for number, policy in enumerate(POLICIES[1:]):
        again = gradient_bits(space, source, case, replace(policy, seed=policy.seed + number), live_ctas=2 + number)
        assert all(np.array_equal(left, right) for left, right in zip(first, again, strict=True)), policy


@pytest.mark.emulated
def test_a_batch_element_by_itself_gives_the_same_bits(space: Space) -> None:
    source, chosen = small(space, DType.BFLOAT16, Mask.causal())
    both = next(case for case in chosen if case.name == "group")
    inputs = expect(both).inputs

    def alone(problem: Problem, rng: np.random.Generator) -> cases.Inputs:
        return cases.Inputs(*(x[1:] for x in (inputs.q, inputs.k, inputs.v)))

    one = replace(both, name="alone", problem=replace(both.problem, batch=1), make=alone)
    whole, given = operands(both, expect(both)), expect(both).given
    single = operands(one, replace(expect(one), given=type(given)(given.o[1:], given.lse[1:], given.dout[1:], given.dlse[1:])))
    for case, tensors in ((both, whole), (one, single)):
        emulated()(source, space.bind(of_backward(case.problem), DEVICE), case, tensors)
    for name, tensor in outputs_of(whole).items():
        assert np.array_equal(cases.bits_of(tensor.view()[1:]), cases.bits_of(outputs_of(single)[name].view())), name


@pytest.mark.emulated
def test_large_numbers_in_keys_that_no_row_sees_change_no_bit(space: Space) -> None:
    source, _ = small(space, DType.BFLOAT16, Mask.causal())
    problem = replace(problem_of(DType.BFLOAT16, Mask.causal(Alignment.TOP_LEFT)), seqlen_q=11, seqlen_kv=21)

    def with_garbage(at: Problem, rng: np.random.Generator) -> cases.Inputs:
        clean = cases.normal(at, rng)
        unseen = (np.arange(at.seqlen_kv) >= at.seqlen_q)[:, None]
        return cases.rounded(at, clean.q, *(np.where(unseen, np.float32(1e37), x) for x in (clean.k, clean.v)))

    clean, dirty = (gradient_bits(space, source, Case("unseen", problem, make), POLICIES[1]) for make in (cases.normal, with_garbage))
    assert all(np.array_equal(left, right) for left, right in zip(clean, dirty, strict=True))


@pytest.mark.emulated
@pytest.mark.parametrize(("what", "old", "new", "mask"), FAULTS, ids=[fault[0].replace(" ", "-") for fault in FAULTS])
def test_a_fault_in_simt_backward_is_rejected(space: Space, what: str, old: str, new: str, mask: Mask) -> None:
    source, chosen = small(space, DType.BFLOAT16, mask)
    pattern = re.compile(r"\s+".join(re.escape(word) for word in old.split()))
    assert len(pattern.findall(source.text)) == 1, f"the text of the kernel has changed; renew the fault {what!r}"
    broken = replace(source, text=pattern.sub(lambda _: new, source.text), digest=what)
    assert first_failure(space, broken, DEVICE, chosen, [emulated(policy) for policy in POLICIES]), f"{what}: accepted under every policy"


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_sampled_variant_of_simt_backward_passes_every_case(space: Space, seed: int) -> None:
    chosen = random.Random(seed)
    dims = chosen.choice([(64, 64), (40, 96), (128, 72), (8, 16), (256, 256), (80, 8)])
    problem = problem_of(chosen.choice(list(DType)), MASKS[seed % 3], dims)
    variant = chosen.choice(space.bind(of_backward(problem), DEVICE).feasible())
    tiles = variant.as_dict()
    source, run = backward_source(space, problem, variant), emulated(POLICIES[seed % len(POLICIES)])
    assert not first_failure(space, source, DEVICE, cases_of(problem, tiles["block_q"], tiles["block_kv"]), [run])


@pytest.mark.compiled
@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_the_compiler_spills_no_seed_of_simt_backward(space: Space, head_dim: int) -> None:
    from flashgen.compiler import compile_many
    from flashgen.cubins import Compiled

    problem = problem_of(DType.BFLOAT16, Mask.causal(), (head_dim, head_dim))
    bound = space.bind(of_backward(problem), DEVICE)
    variants = [bound.seeds()[0], bound.fallback()] if head_dim == 64 else [*bound.seeds(), bound.fallback()]
    sources = [backward_source(space, problem, each) for each in variants]
    for variant, found in zip(variants, compile_many(sources, sm=90), strict=True):
        assert isinstance(found, Compiled), f"{variant}: {found}"
        assert not any(bound.compiled_violations(variant, found.report).values()), (variant, found.report.spill_bytes)
