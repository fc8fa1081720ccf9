from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from flashgen import launch, paths
from flashgen.errors import InvalidProblem
from flashgen.launch import ForwardStruct, Operand, all_rows_aligned, forward_params, window_bounds
from flashgen.model import DType, Mask, Problem


def problem(mask: Mask, seqlen_q: int = 6, seqlen_kv: int = 3) -> Problem:
    return Problem(DType.FLOAT16, 64, 64, 1, 1, 1, seqlen_q, seqlen_kv, mask)


@pytest.mark.emulated
def test_the_parameter_struct_is_the_kernels_struct(tmp_path: Path) -> None:
    fields = [name for name, _ in ForwardStruct._fields_]  # type: ignore[misc]
    prints = "".join(f'std::printf("{name} %zu\\n", offsetof(fg::ForwardParams, {name}));' for name in fields)
    file = tmp_path / "offsets.cpp"
    file.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "params.cuh"\n'
        f'int main() {{ {prints} std::printf("size %zu\\n", sizeof(fg::ForwardParams)); }}\n'
    )
    compiler = shutil.which("g++")
    assert compiler
    include = paths.templates() / "include"
    program = tmp_path / "offsets"
    # Only declarations are used, so nothing of the emulation runtime has to be linked.
    command = [
        compiler,
        "-std=c++17",
        "-O2",
        "-DFG_EMULATE",
        f"-I{include}",
        str(file),
        "-o",
        str(program),
        "-Wl,--unresolved-symbols=ignore-all",
    ]
    subprocess.run(command, check=True, capture_output=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split("\n")
    expected = [f"{name} {getattr(ForwardStruct, name).offset}" for name in fields] + [f"size {ctypes.sizeof(ForwardStruct)}"]
    assert [line for line in lines if line] == expected


def test_a_huge_window_keeps_every_key_visible() -> None:
    left, right = window_bounds(problem(Mask.window(-1, 2**31 - 1)))
    # Row 0 stands on diagonal 3 - 6 = -3; the last key is 2.
    assert -3 + right >= 2 and -3 - left <= 0
    assert left < 2**30 and right < 2**30


def test_causal_is_a_window_without_right_side() -> None:
    assert window_bounds(problem(Mask.causal()))[1] == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_not_positive_and_finite_is_refused(scale: float) -> None:
    operand = Operand(0, (0, 0, 64))
    with pytest.raises(InvalidProblem, match="positive finite"):
        forward_params(problem(Mask()), scale, operand, operand, operand, operand, 0, 0)


@pytest.mark.parametrize(
    ("address", "row", "aligned"), [(256, 64, True), (258, 64, False), (256, 65, False), (264, 64, False), (256, 0, True)]
)
def test_vector_access_needs_every_row_on_16_bytes(address: int, row: int, aligned: bool) -> None:
    assert all_rows_aligned([Operand(256, (0, 0, 64)), Operand(address, (4096, 512, row))], 2) is aligned


def test_a_bucket_of_zero_is_that_of_one() -> None:
    assert launch.log2_bucket(0) == launch.log2_bucket(1) == 0.0
