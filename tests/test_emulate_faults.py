"""Faults planted into the shipped kernels: the emulated executor must reject each, and no correct kernel."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest

from flashgen import cases, device, render, space
from flashgen.emulate import FAST, POLICIES, EmulatedExecutor, Emulator, Policy, Schedule
from flashgen.errors import EmulationFault
from flashgen.model import DType, Mask, Problem, Source
from flashgen.reference import decode

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

DEVICE = device.preset("a100")
PROBLEM = Problem(DType.FLOAT16, 64, 64, 1, 2, 1, 100, 150, Mask.causal())
VARIANTS = {
    "ampere": ("ampere_forward", {"block_q": 64, "block_kv": 32, "num_warps": 4, "num_stages": 2, "q_in_registers": 1}),
    "ampere-shared-q": ("ampere_forward", {"block_q": 32, "block_kv": 48, "num_warps": 2, "num_stages": 1, "q_in_registers": 0}),
    "simt": ("simt_forward", {"block_q": 32, "block_kv": 16, "rows_per_team": 2, "lanes_per_team": 8}),
}


@dataclass(frozen=True)
class Fault:
    """A text edit, whose old text must occur `times` times in the variant's source."""

    name: str
    variant: str
    old: str
    new: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.variant}: {self.name}"


WAIT = "copy_async_wait<2 * C::NUM_STAGES - 2>();"
BARRIER_OF_RING = WAIT + "\n    block_sync();"
NEXT_VALUES = "    ring.wait();\n    ring.prefetch_values(step + C::NUM_STAGES - 1);\n    if (sees) {"
NEXT_KEYS = "    ring.wait();\n    ring.prefetch_keys(step + C::NUM_STAGES);\n"

UNORDERED = (
    Fault("no wait for a tile", "ampere", WAIT, ""),
    Fault("wait for one group too few", "ampere", WAIT, "copy_async_wait<2 * C::NUM_STAGES - 1>();"),
    Fault("no barrier after the wait", "ampere", BARRIER_OF_RING, WAIT),
    Fault("values prefetched into a slot in use", "ampere", NEXT_VALUES, NEXT_VALUES.replace("NUM_STAGES - 1", "NUM_STAGES")),
    Fault("keys prefetched before the barrier", "ampere", NEXT_KEYS, "    ring.prefetch_keys(step + C::NUM_STAGES);\n    ring.wait();\n"),
    Fault(
        "queries read before they land",
        "ampere",
        "    copy_async_wait<0>();\n    block_sync();\n    rows.queries",
        "    block_sync();\n    rows.queries",
    ),
    Fault("queries overwritten while read", "ampere", "block_sync();  // the rings overwrite the queries", ""),
    Fault("no barrier after the wait", "ampere-shared-q", BARRIER_OF_RING, WAIT),
    Fault("probabilities read before the barrier", "simt", "    warp_sync();\n", ""),
    Fault("next tile overwrites the present one", "simt", "block_sync();  // the next tile overwrites K and V", ""),
)
WRONG = (
    Fault("ring slot beyond the ring", "ampere", "step % C::NUM_STAGES * Shape::K_BYTES", "step % (C::NUM_STAGES + 1) * Shape::K_BYTES"),
    Fault("swizzle added instead of xored", "ampere", "(start ^ static_cast<u32>(chunks", "(start + static_cast<u32>(chunks"),
    Fault("wrong lane map of a matrix load", "ampere", "cursor(values, lane % 16, lane / 16)", "cursor(values, lane % 8, lane / 16)"),
    Fault("mask one key too wide", "ampere", "key > keys.last", "key > keys.last + 1"),
    Fault("rows past the end read", "ampere", "row < valid_rows && in_row(step + lane)", "in_row(step + lane)"),
    Fault("rows past the end written", "ampere", "target_row >= params.seqlen_q ||", ""),
    Fault("row maximum over two lanes", "ampere", "return larger(result, shuffle_xor(result, 2));", "return result;"),
    Fault("barrier by some warps only", "ampere", NEXT_KEYS, "    if (sees) ring.wait();\n    ring.prefetch_keys(step + C::NUM_STAGES);\n"),
    Fault("output not rescaled", "ampere", "output[r / 2][n][r % 2 * 2] *= rescale;", ""),
)  # fmt: skip


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulated"))


def source_of(name: str) -> Source:
    """The variant's source, with the rest of its parameters as in the fallback."""
    family, params = VARIANTS[name]
    loaded = space.load_space(family)
    bound = loaded.bind(PROBLEM, DEVICE)
    return render.render(loaded, PROBLEM.klass(), bound.variant(bound.fallback().as_dict() | params))


def planted(fault: Fault) -> Source:
    source = source_of(fault.variant)
    assert source.text.count(fault.old) == fault.times, f"the kernel's text has changed; renew the fault {fault}"
    return replace(source, text=source.text.replace(fault.old, fault.new))


def outcome(emulator: Emulator, source: Source, policy: Policy) -> str:
    """What is wrong with a run: the report, the first wrong result, or nothing."""
    inputs = cases.normal(PROBLEM, np.random.default_rng(5))
    tensors = cases.operands(PROBLEM, inputs, cases.Layout.CONTIGUOUS)
    guards = {name: ~cases.owned(tensor) for name, tensor in tensors.named()}
    before = {name: cases.bits_of(tensor.buffer)[guards[name]] for name, tensor in tensors.named()}
    try:
        EmulatedExecutor(DEVICE, policy, deadline_s=20, emulator=emulator).forward(source, PROBLEM, tensors, PROBLEM.scale)
    except EmulationFault as fault:
        return str(fault)
    strayed = [name for name, tensor in tensors.named() if not np.array_equal(cases.bits_of(tensor.buffer)[guards[name]], before[name])]
    o, lse = attention(inputs, PROBLEM)
    if not np.all(np.abs(decode(tensors.o.view(), PROBLEM.dtype) - o) < 4e-3):
        return "wrong output"
    if not np.all(np.abs(tensors.lse.view()[..., 0] - lse) < 1e-5):
        return "wrong log-sum-exp"
    return f"wrote around {strayed}" if strayed else ""


def attention(inputs: cases.Inputs, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64."""
    k, v = (np.repeat(each.astype(np.float64), problem.gqa_group, axis=1) for each in (inputs.k, inputs.v))
    scores = np.einsum("bhid,bhjd->bhij", inputs.q.astype(np.float64), k) * problem.scale
    visible = np.arange(problem.seqlen_kv)[None] <= np.arange(problem.seqlen_q)[:, None] + problem.diagonal
    weights = np.exp(np.where(visible, scores, -np.inf))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhij,bhjd->bhid", weights / total, v), np.log(total[..., 0])


@pytest.mark.parametrize("policy", [*POLICIES, FAST, Policy(Schedule.STARVE, True, seed=2), Policy(Schedule.STARVE, True, seed=3)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_correct_kernels_pass_every_policy(emulator: Emulator, variant: str, policy: Policy) -> None:
    assert outcome(emulator, source_of(variant), policy) == ""


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("fault", UNORDERED, ids=str)
def test_a_missing_order_is_found_under_every_policy(emulator: Emulator, fault: Fault, policy: Policy) -> None:
    assert re.search("race: ", outcome(emulator, planted(fault), policy))


@pytest.mark.parametrize("fault", WRONG, ids=str)
def test_a_wrong_kernel_is_found(emulator: Emulator, fault: Fault) -> None:
    assert outcome(emulator, planted(fault), POLICIES[1])


@pytest.mark.parametrize("fault", [fault for fault in UNORDERED if fault.variant != "simt"], ids=str)
def test_schedules_alone_find_a_missing_order(emulator: Emulator, fault: Fault) -> None:
    """Without the race checker, some schedule and time of landing makes the values wrong."""
    seeded = [replace(policy, races=False, seed=seed) for seed in (1, 2, 3, 4) for policy in POLICIES]
    assert any(outcome(emulator, planted(fault), policy) for policy in seeded)


def test_all_policies_give_the_same_bits(emulator: Emulator) -> None:
    results = set()
    for policy in (*POLICIES, FAST):
        tensors = cases.operands(PROBLEM, cases.normal(PROBLEM, np.random.default_rng(5)), cases.Layout.CONTIGUOUS)
        EmulatedExecutor(DEVICE, policy, emulator=emulator).forward(source_of("ampere"), PROBLEM, tensors, PROBLEM.scale)
        results.add((tensors.o.buffer.tobytes(), tensors.lse.buffer.tobytes()))
    assert len(results) == 1


def test_matrix_loads_of_shipped_layouts_have_no_bank_conflicts(emulator: Emulator) -> None:
    executor = EmulatedExecutor(DEVICE, FAST, emulator=emulator)
    tensors = cases.operands(PROBLEM, cases.normal(PROBLEM, np.random.default_rng(5)), cases.Layout.CONTIGUOUS)
    executor.forward(source_of("ampere"), PROBLEM, tensors, PROBLEM.scale)
    assert executor.last_report.counters.matrix_phases > 0
    assert executor.last_report.counters.matrix_conflicts == 0
    unswizzled = planted(Fault("no swizzle", "ampere", "SWIZZLED = CHUNKS % 8 == 0;", "SWIZZLED = false;"))
    text = unswizzled.text.replace("SWIZZLED ? CHUNKS : CHUNKS | 1", "CHUNKS")
    executor.forward(replace(unswizzled, text=text), PROBLEM, tensors, PROBLEM.scale)
    assert executor.last_report.counters.matrix_conflicts == 7 * executor.last_report.counters.matrix_phases
