"""compute-sanitizer finds nothing in one variant of each family, for Hopper of each head dim."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    "family",
    ["ampere_forward", "simt_forward", "standard_forward", "hopper_forward", "hopper_forward 64 80 96 128", "hopper_forward 160 192 256"],
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_kernel_is_clean_under_compute_sanitizer(tool: str, family: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    script = Path(__file__).with_name("run_kernels.py")
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--kernel-regex",
        "kns=^(forward|scores|softmax|product)$",
        sys.executable,
        str(script),
        *family.split(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]
