"""Bundles on a GPU: without a compiler, from Python and from C, the bits of the kernels that were compiled here; refreshing a table."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import bundle_alone
import pytest
import shipping
from bundle_alone import digest, operands
from shipping import problem, source_of

from flashgen import bundle, certify, cli, compiler, gpu, table
from flashgen.device import present
from flashgen.model import ExecutorName, Mask, Problem, Verdict
from flashgen.runtime import DeviceExecutor
from flashgen.space import load_space
from flashgen.table_schema import device_record

pytestmark = [pytest.mark.device, pytest.mark.skipif(gpu.device_count() == 0, reason="needs a GPU")]

ROOT = Path(__file__).resolve().parents[2]
KERNELS = 20


def problems() -> list[Problem]:
    """Twenty problems whose kernels differ, with ragged lengths and grouped heads."""
    masks, dims = (Mask(), Mask.causal(), Mask.window(100, 3)), (64, 72, 80, 96, 128, 192, 256)
    return [problem(700 + 13 * dim // 8, dim, mask, heads_q=6) for dim in dims for mask in masks][:KERNELS]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> table.Table:
    """A table of this GPU whose entries pin what its compiler makes; certified as far as the bundle cares."""
    limits, entries = present(), []
    for asked in problems():
        space = load_space("ampere_forward")
        bound = space.bind(asked, limits)
        chosen = (bound.seeds() or [bound.fallback()])[0]
        base = shipping.entry(asked, chosen=chosen)
        built = compiler.compile_source(source_of(asked, chosen), compiler.architecture(source_of(asked, chosen), limits.sm))
        tools = replace(base.provenance, nvrtc=built.report.nvrtc, device=limits.name)
        entries.append(replace(base, cubin_digest=built.report.cubin_digest, options=built.report.options, provenance=tools))
    path = tmp_path_factory.mktemp("tables") / "here.yaml"
    path.write_text(table.render_table(device_record(limits), entries))
    return table.read(path, strict=True)


@pytest.fixture(scope="module")
def packed(tuned: table.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "bundle"
    made = bundle.write(out, tuned, tuned.entries)
    assert made.kernels == KERNELS
    print(f"bundle of {made.kernels} kernels: {made.bytes} bytes")
    return out


@pytest.fixture(scope="module")
def expected(tuned: table.Table) -> dict[Problem, str]:
    """sha256 of output and log-sum-exp of every problem, by the kernels compiled here."""
    executor, found = DeviceExecutor(), {}
    for each in tuned.entries:
        data = operands(each.problem)
        executor.forward(source_of(each.problem, each.variant), each.problem, data, each.problem.scale)
        found[each.problem] = digest(data)
    return found


WITHOUT_COMPILER = """
import time, flashgen
started = time.perf_counter()
bundle = flashgen.load_bundle(sys.argv[1])
read = time.perf_counter() - started
for entry in bundle.table.entries:
    bundle.load(entry.problem)
print(f"read and verified in {read * 1e3:.1f} ms, all loaded after {(time.perf_counter() - started) * 1e3:.1f} ms", file=sys.stderr)
for entry in bundle.table.entries:
    data = bundle_alone.operands(entry.problem)
    bundle.forward(entry.problem, data)
    print(bundle_alone.digest(data))
guard.verdict()
"""


def test_a_bundle_runs_without_nvrtc_bit_for_bit(packed: Path, tuned: table.Table, expected: dict[Problem, str], tmp_path: Path) -> None:
    result = bundle_alone.start(bundle_alone.environment(tmp_path, gpu=True), WITHOUT_COMPILER, str(packed))
    assert result.returncode == 0, result.stderr
    print(result.stderr)
    assert result.stdout.split() == [expected[each.problem] for each in tuned.entries]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_c_example_gives_the_same_bits(packed: Path, tuned: table.Table, expected: dict[Problem, str], tmp_path: Path) -> None:
    from test_bundle import STUB, cuda_headers

    include = next(iter(cuda_headers()), STUB)
    places = (Path(folder) / "libcuda.so.1" for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"))
    driver = next((str(path) for path in places if path.exists()), "-lcuda")
    command = ["gcc", "-O2", "-std=c99", f"-I{packed}", f"-I{include}", str(packed / "example.c"), "-o", str(tmp_path / "example")]
    subprocess.run([*command, driver, "-lm"], check=True)
    whole = subprocess.run([str(tmp_path / "example"), str(packed)], capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for number, each in enumerate(tuned.entries):
        data = operands(each.problem)
        files = [tmp_path / f"{name}.bin" for name in ("q", "k", "v", "o", "lse")]
        for path, tensor in zip(files, (data.q, data.k, data.v), strict=False):
            tensor.buffer.tofile(path)
        arguments = [str(tmp_path / "example"), str(packed), f"{number}", *map(str, files)]
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
        found = hashlib.sha256(files[3].read_bytes() + files[4].read_bytes()).hexdigest()
        assert found == expected[each.problem], each.problem


def test_a_refresh_proves_a_stale_entry_on_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits, asked = present(), problem(1024, 64, Mask.causal())
    old = shipping.entry(asked)
    old = replace(old, source_digest="0" * 64, cubin_digest="sha256:" + "0" * 64)
    path = tmp_path / "here.yaml"
    path.write_text(table.render_table(device_record(limits), [old]))
    assert cli.run(["table", "check", str(path)]) == 1
    started = time.monotonic()
    assert cli.run(["table", "refresh", str(path)]) == 0
    print(f"one entry refreshed in {time.monotonic() - started:.1f} s")
    assert cli.run(["table", "check", "--compile", str(path)]) == 0
    (fresh,) = table.read(path, strict=True).entries
    assert fresh.certificate.executor is ExecutorName.DEVICE and fresh.measurement.source == "measured"
    assert fresh.certificate.verdict is Verdict.EXACT and fresh.certificate.suite_digest == certify.suite_digest()


def test_the_shipped_table_of_this_gpu_passes_its_check() -> None:
    from flashgen import paths

    limits = device_record(present())
    shipped = [table.read(path, strict=True) for path in sorted(paths.shipped_tables().glob("*.yaml"))]
    files = [each.path for each in shipped if table.same_device(each.device, limits)]
    if not files:
        pytest.skip(f"no table is shipped for {limits.name}")
    assert cli.run(["table", "check", str(files[0])]) == 0
