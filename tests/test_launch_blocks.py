"""Parameter blocks made quickly are those made with care."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flashgen import launch
from flashgen.device import preset
from flashgen.launch import Operand
from flashgen.launch_blocks import ParameterBlocks, address_place
from flashgen.model import DType, ExecutorName, Mask, Op, Problem, Source
from flashgen.render import render
from flashgen.space import load_space
from flashgen.tensor_map import TensorMapSpec

FORWARD = Problem(DType.BFLOAT16, 64, 72, 2, 4, 2, 100, 130, Mask.causal())
BACKWARD = replace(FORWARD, op=Op.BACKWARD)
NAMES = {Op.FORWARD: ("q", "k", "v", "o", "lse"), Op.BACKWARD: ("q", "k", "v", "o", "lse", "dlse", "dout", "dq", "dk", "dv")}


def source_of(family: str, problem: Problem) -> Source:
    space = load_space(family)
    return render(space, problem.klass(), space.bind(problem, preset("h200")).fallback())


def operands(problem: Problem, addresses: dict[str, int]) -> dict[str, Operand]:
    wide = {"v", "o", "dout", "dv"}
    strides = {name: (800 * (80 if name in wide else 64), 80 if name in wide else 64, 400) for name in NAMES[problem.op]}
    return {name: Operand(addresses[name], strides[name]) for name in NAMES[problem.op]}


def with_care(source: Source, problem: Problem, addresses: dict[str, int], workspace: int, counters: int) -> bytes:
    plain = launch.plain_params(problem, 0.3, operands(problem, addresses), workspace)
    return bytes(launch.source_params(source, plain, problem, counters, ExecutorName.EMULATED))


@pytest.mark.parametrize(
    ("family", "problem"),
    [("ampere_forward", FORWARD), ("hopper_forward", FORWARD), ("simt_backward", BACKWARD)],
    ids=["ampere", "hopper", "simt backward"],
)
def test_a_block_made_quickly_equals_one_made_with_care(family: str, problem: Problem) -> None:
    source, chosen = source_of(family, problem), random.Random(1)
    template = launch.plain_params(problem, 0.3, operands(problem, dict.fromkeys(NAMES[problem.op], 0)), 0)
    blocks = ParameterBlocks(source, template, problem, ExecutorName.EMULATED)
    for turn in range(20):
        step = 16 if source.boxes or turn % 2 else 2  # only where no map needs it may a tensor start anywhere
        addresses = {name: chosen.randrange(1, 2**44) * step for name in NAMES[problem.op]}
        workspace, counters = chosen.randrange(2**44), chosen.randrange(2**44) if source.boxes else 0
        made = blocks.make(addresses | {"workspace": workspace}, counters)
        assert bytes(made) == with_care(source, problem, addresses, workspace, counters)


def test_two_blocks_share_no_memory() -> None:
    source = source_of("hopper_forward", FORWARD)
    template = launch.plain_params(FORWARD, 0.3, operands(FORWARD, dict.fromkeys(NAMES[Op.FORWARD], 0)), 0)
    blocks = ParameterBlocks(source, template, FORWARD, ExecutorName.EMULATED)
    first = blocks.make({"q": 4096})
    before = bytes(first)
    blocks.make({"q": 8192})
    assert bytes(first) == before


SPEC = TensorMapSpec(16, DType.BFLOAT16, (64, 100, 4, 2), (8192, 128, 1 << 20), (64, 64, 1, 1))


def test_the_place_of_an_address_is_found() -> None:
    assert address_place(SPEC, lambda spec: spec.for_emulation()) == 8


@pytest.mark.parametrize(
    "scramble",
    [
        lambda spec: bytes(byte ^ spec.address % 251 for byte in spec.for_emulation()),  # the address shows everywhere
        lambda spec: spec.for_emulation()[:16].ljust(120, b"\0") + spec.address.to_bytes(8, "little"),  # it shows twice
        lambda spec: replace(spec, address=spec.address & ~0xFFFF | 16).for_emulation(),  # a part of it is left out
    ],
)
def test_a_map_that_hides_its_address_is_not_patched(scramble: object) -> None:
    assert address_place(SPEC, scramble) is None  # type: ignore[arg-type]


def test_a_map_that_cannot_be_patched_is_encoded_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("hopper_forward", FORWARD)
    honest = TensorMapSpec.for_emulation
    monkeypatch.setattr(TensorMapSpec, "for_emulation", lambda self: bytes(byte ^ self.address % 251 for byte in honest(self)))
    template = launch.plain_params(FORWARD, 0.3, operands(FORWARD, dict.fromkeys(NAMES[Op.FORWARD], 0)), 0)
    blocks = ParameterBlocks(source, template, FORWARD, ExecutorName.EMULATED)
    addresses = {name: 4096 * (number + 1) for number, name in enumerate(NAMES[Op.FORWARD])}
    assert bytes(blocks.make(addresses, 512)) == with_care(source, FORWARD, addresses, 0, 512)
