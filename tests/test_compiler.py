"""NVRTC without a GPU: keys, logs, errors, threads. Tests that really compile carry the mark `compiled`."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_kernels import COPY, STATIC_16, copy_source, small_source

from flashgen import compiler
from flashgen.compiler import architecture, compile_many, compile_source, key_of, options_for, read_log
from flashgen.cubins import Compiled, CubinStore, digest_of
from flashgen.errors import CompileError, ConflictingInstall, HomeNotWritable, MissingDependency
from flashgen.model import EntryPoint, Source

needs_nvrtc = [pytest.mark.compiled]

BROKEN = small_source('extern "C" __global__ void broken() { int x = ; }\n', ("broken", 32, 0))


def slow_source(number: int = 0) -> Source:
    """A kernel that takes a while to compile; other numbers are other texts."""
    loop = "float x = 0;\n#pragma unroll\nfor (int i = 0; i < 256; ++i) x = __expf(x) * p.q[i];\np.o[0] = x;"
    return small_source(f'extern "C" __global__ void slow(const __grid_constant__ Params p) {{ {loop} }}\n// {number}\n', ("slow", 32, 0))


LOG_13 = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes stack frame, 1024 bytes smem
ptxas info    : Compile time = 280.876 ms
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem
kernel.cu(7): warning #177-D: variable "unused" was declared but never referenced
Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"
"""


@pytest.fixture
def nvrtc() -> None:
    try:
        compiler.binding()
    except MissingDependency as error:
        pytest.skip(str(error))


@pytest.fixture
def store(tmp_path: Path) -> CubinStore:
    return CubinStore(tmp_path / "cubins")


def test_the_log_gives_the_worst_over_all_entry_points() -> None:
    report = read_log(LOG_13, "sha256:x", 1.0, "13.0", ("--std=c++17",))
    assert (report.registers, report.spill_bytes, report.stack_bytes, report.static_shared_bytes) == (168, 32, 16, 1024)


def test_serialised_wgmma_and_warnings_are_kept_but_not_remarks() -> None:
    report = read_log(LOG_13, "sha256:x", 1.0, "13.0", ())
    assert len(report.warnings) == 2 and "C7512" in report.warnings[0] and "#177-D" in report.warnings[1]
    assert report.serialised_products == 1


def test_a_log_without_resource_lines_is_an_error_not_a_zero() -> None:
    with pytest.raises(CompileError, match="no resource lines"):
        read_log("", "sha256:x", 1.0, "13.0", ())


@pytest.mark.parametrize(("family", "name"), [("simt_forward", "sm_90"), ("ampere_forward", "sm_90"), ("hopper_forward", "sm_90a")])
def test_only_hopper_families_ask_for_the_architecture_specific_form(family: str, name: str) -> None:
    assert architecture(replace(copy_source(), family=family), 90) == name


def changed_text(source: Source) -> Source:
    return replace(source, text=source.text + " ")


def changed_entry(source: Source) -> Source:
    return replace(source, entry_points=(EntryPoint("other", 64, 0),))


def test_the_key_covers_text_entry_names_options_and_compiler() -> None:
    source, options = copy_source(), options_for("sm_90")
    keys = {
        key_of(source, options, "13.0"),
        key_of(changed_text(source), options, "13.0"),
        key_of(changed_entry(source), options, "13.0"),
        key_of(source, options_for("sm_90a"), "13.0"),
        key_of(source, options_for("sm_90", line_info=True), "13.0"),
        key_of(source, options, "13.5"),
    }
    assert len(keys) == 6
    assert key_of(source, options, "13.0") == key_of(copy_source(), options, "13.0")


def test_parts_of_a_key_cannot_flow_into_each_other() -> None:
    assert key_of(copy_source(), ("ab", "c"), "13.0") != key_of(copy_source(), ("a", "bc"), "13.0")


def test_the_options_force_no_flush_to_zero_and_no_fast_math() -> None:
    assert not any("ftz" in option or "fast" in option for option in options_for("sm_90"))


def with_wheels(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    def version(name: str) -> str:
        if name in installed:
            return "14.2.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.fixture
def fresh_binding() -> Iterator[None]:
    compiler.binding.cache_clear()
    yield
    compiler.binding.cache_clear()


def test_two_cupy_wheels_are_refused_with_the_pip_command(monkeypatch: pytest.MonkeyPatch, fresh_binding: None) -> None:
    with_wheels(monkeypatch, "cupy-cuda12x", "cupy-cuda13x")
    with pytest.raises(ConflictingInstall, match=r"pip uninstall -y cupy-cuda13x cupy-cuda12x && pip install"):
        compiler.binding()


def test_without_cupy_the_extras_are_named(monkeypatch: pytest.MonkeyPatch, fresh_binding: None) -> None:
    with_wheels(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(MissingDependency, match=r"flashgen\[cuda13\].*flashgen\[cuda12\]"):
        compiler.binding()


@pytest.mark.parametrize(("wheel", "extra"), [("cupy-cuda13x", "cuda13"), ("cupy-cuda12x", "cuda12")])
def test_without_nvrtc_the_extra_of_the_installed_cupy_is_named(
    monkeypatch: pytest.MonkeyPatch, fresh_binding: None, wheel: str, extra: str
) -> None:
    def absent() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so was not found\nsearched here and there")

    with_wheels(monkeypatch, wheel)
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nvrtc=SimpleNamespace(getVersion=absent)))
    with pytest.raises(MissingDependency, match=rf'libnvrtc.so was not found\)\. Install it: pip install "flashgen\[{extra}\]"'):
        compiler.binding()


class TestWithNvrtc:
    """These compile small kernels (about 0.1 s each)."""

    pytestmark = needs_nvrtc

    def test_a_cubin_is_made_with_its_resources_and_ends_in_nul(self, nvrtc: None, store: CubinStore) -> None:
        source = small_source(STATIC_16, ("static_16", 64, 256))
        made = compile_source(source, "sm_90", store)
        assert made.cubin.startswith(b"\x7fELF") and made.cubin.endswith(b"\0") and b".version" not in made.cubin
        assert made.report.registers > 0 and made.report.static_shared_bytes == 16 and made.report.spill_bytes == 0
        assert made.report.cubin_digest == digest_of(made.cubin) and not made.cached
        assert made.report.nvrtc == compiler.nvrtc_version() and made.report.options == options_for("sm_90")

    def test_the_section_table_lies_inside_the_file(self, nvrtc: None, store: CubinStore) -> None:
        cubin = compile_source(copy_source(), "sm_90", store).cubin
        tables = [(32, 54, 56), (40, 58, 60)]  # (offset field, entry size field, count field) of programs and sections in an ELF64 header
        for at, size_at, count_at in tables:
            offset = int.from_bytes(cubin[at : at + 8], "little")
            size = int.from_bytes(cubin[size_at : size_at + 2], "little") * int.from_bytes(cubin[count_at : count_at + 2], "little")
            assert offset + size <= len(cubin), "cut short"

    def test_the_second_request_reads_the_store_and_the_same_report(self, nvrtc: None, store: CubinStore) -> None:
        first = compile_source(copy_source(), "sm_90", store)
        second = compile_source(copy_source(), "sm_90", CubinStore(store.path))
        assert second.cached and second.report == first.report and second.cubin == first.cubin

    def test_a_damaged_cubin_is_compiled_again(self, nvrtc: None, store: CubinStore) -> None:
        first = compile_source(copy_source(), "sm_90", store)
        (store.path / f"{first.key}.cubin").write_bytes(first.cubin[:-7])
        second = compile_source(copy_source(), "sm_90", store)
        assert not second.cached and second.cubin == first.cubin
        assert compile_source(copy_source(), "sm_90", store).cached

    def test_compiling_is_reproducible_bit_for_bit(self, nvrtc: None, tmp_path: Path) -> None:
        digests = {compile_source(copy_source(), "sm_90", CubinStore(tmp_path / str(run))).report.cubin_digest for run in range(2)}
        assert len(digests) == 1

    def test_nvrtcs_own_cache_does_not_hide_the_resources(self, nvrtc: None, tmp_path: Path) -> None:
        for run in range(2):
            made = compile_source(small_source(COPY + "// cached?\n", ("copy_rows", 64, 256)), "sm_90", CubinStore(tmp_path / str(run)))
            assert made.report.registers > 0

    def test_an_unwritable_home_still_compiles(self, nvrtc: None, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        store = CubinStore(tmp_path / "file" / "cubins")
        with pytest.warns(HomeNotWritable):
            first = compile_source(copy_source(), "sm_90", store)
        assert compile_source(copy_source(), "sm_90", store) is first or compile_source(copy_source(), "sm_90", store).cubin == first.cubin

    def test_a_refused_source_names_the_variant_and_shows_the_log(self, nvrtc: None, store: CubinStore) -> None:
        with pytest.raises(CompileError, match="expected an expression") as caught:
            compile_source(BROKEN, "sm_90", store)
        assert str(BROKEN.variant) in str(caught.value) and "flashgen show source" in str(caught.value)
        assert store.statistics().kernels == 0

    def test_an_architecture_that_nvrtc_does_not_know_is_named_with_those_it_knows(self, nvrtc: None, store: CubinStore) -> None:
        with pytest.raises(CompileError, match=r"cannot compile for sm_20; it knows .*sm_90"):
            compile_source(copy_source(), "sm_20", store)

    def test_many_sources_keep_their_order_and_their_errors(self, nvrtc: None, store: CubinStore) -> None:
        sources = [small_source(COPY + f"// {number}\n", ("copy_rows", 64, 256)) for number in range(4)]
        results = compile_many([*sources[:2], BROKEN, *sources[2:]], sm=90, jobs=2, store=store)
        good = [result for result in results if isinstance(result, Compiled)]
        assert isinstance(results[2], CompileError) and len(good) == 4
        assert [each.key for each in good] == [key_of(source, options_for("sm_90"), compiler.nvrtc_version()) for source in sources]

    @pytest.mark.parametrize(("leave", "code", "waits"), [("", 0, True), ("cli._leave(130)", 130, False)], ids=["interpreter", "command"])
    def test_the_interpreter_ends_after_what_compiles_and_the_command_at_once(
        self, leave: str, code: int, waits: bool, nvrtc: None, tmp_path: Path
    ) -> None:
        """NVRTC crashes when its own data are cleaned away while it works."""
        program = (
            "import atexit; atexit.register(lambda: print(compiler.UNDER_WAY.count))  # runs last\n"
            "import time; from pathlib import Path; from flashgen import cli, compiler, cubins; import test_compiler\n"
            f"pool = compiler.CompilePool(4, cubins.CubinStore(Path({str(tmp_path)!r})))\n"
            "for each in range(40): pool.submit(test_compiler.slow_source(each), 'sm_90')\n"
            "while not compiler.UNDER_WAY.count: time.sleep(0.01)\n"
            f"time.sleep(0.2); atexit.register(lambda: print(compiler.UNDER_WAY.count)); {leave}\n"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=120)
        assert (ended.returncode, ended.stderr) == (code, "")
        before, after = map(int, ended.stdout.split())
        assert before > 0 and (after == 0) is waits
        assert CubinStore(tmp_path).statistics().kernels < 40, "nothing more begins"

    def test_other_threads_run_while_nvrtc_compiles(self, nvrtc: None, store: CubinStore) -> None:
        compile_source(copy_source(), "sm_90", store)  # loads everything
        thread = threading.Thread(target=compile_source, args=(slow_source(), "sm_90", store))
        started, longest = time.perf_counter(), 0.0
        thread.start()
        while thread.is_alive():
            before = time.perf_counter()
            time.sleep(0)
            longest = max(longest, time.perf_counter() - before)
        assert longest < 0.5 * (time.perf_counter() - started), "the binding holds the GIL: threads cannot compile in parallel"
