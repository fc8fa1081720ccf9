"""Bundles: what is in them, what they refuse, and that they launch what the table's certificate speaks of."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundle_alone
import numpy as np
import pytest
from shipping import H200, compiled, entry, gradients, problem, source_of, stale, store_with, table_of, variant

import flashgen
from flashgen import bundle, cli, compiler, device, formula, launch, table, traffic
from flashgen.bundle_reader import MANIFEST, SIGNATURES, Bundle, load_bundle, sealed
from flashgen.errors import CompileError, InvalidBundle, InvalidTable, MissingDependency, NotWritable, UnsupportedProblem
from flashgen.model import DType, Mask, Op, Problem, TableEntry, Variant
from flashgen.space import load_space

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "tests" / "data" / "stub_cuda"
Captured = pytest.CaptureFixture[str]


def entries() -> tuple[TableEntry, ...]:
    causal, whole = problem(), problem(2048, mask=Mask())
    window = problem(512, mask=Mask.window(100, 3))
    return (entry(causal), entry(problem(4096)), entry(whole, chosen=variant(whole, block_kv=64)), entry(window))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without NVRTC whose store holds the machine code of all entries."""

    def absent() -> None:
        raise MissingDependency("no NVRTC here")

    store = store_with(entries(), tmp_path / "cubins")
    monkeypatch.setattr(compiler, "default_store", lambda: store)
    monkeypatch.setattr(compiler, "binding", absent)


@pytest.fixture
def made(no_compiler: None, tmp_path: Path) -> Path:
    """A bundle in a folder."""
    found = table_of(tmp_path / "nvidia-h200.yaml", *entries())
    bundle.write(tmp_path / "bundle", found, found.entries)
    return tmp_path / "bundle"


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Writing --------------------------------------------------------------------------------------------------------------


def test_a_bundle_holds_machine_code_table_licence_code_and_a_manifest_of_everything(made: Path) -> None:
    files = content(made)
    manifest = json.loads(files[MANIFEST])
    assert {"table.yaml", "LICENSE", "flashgen.h", "kernels.h", "example.c"} < set(manifest["files"])
    assert set(files) == {MANIFEST, *manifest["files"]}
    for name, facts in manifest["files"].items():
        assert (facts["sha256"], facts["bytes"]) == (hashlib.sha256(files[name]).hexdigest(), len(files[name]))
    assert len(manifest["kernels"]) == 3, "two of the four entries have the same text"


def test_the_same_inputs_give_the_same_bytes_in_any_place_and_order(made: Path, tmp_path: Path) -> None:
    found = table.read(tmp_path / "nvidia-h200.yaml", strict=True)
    bundle.write(tmp_path / "elsewhere" / "again", found, found.entries[::-1])
    assert content(tmp_path / "elsewhere" / "again") == content(made)
    for name in ("a.zip", "b.zip"):
        bundle.write(tmp_path / name, found, found.entries)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert {
        info.filename: zipfile.ZipFile(tmp_path / "a.zip").read(info) for info in zipfile.ZipFile(tmp_path / "a.zip").infolist()
    } == content(made)


def test_a_stale_entry_is_not_bundled(no_compiler: None, tmp_path: Path) -> None:
    found = table_of(tmp_path / "a.yaml", stale(entries()[0]))
    with pytest.raises(InvalidTable, match=r"stale.*table refresh"):
        bundle.write(tmp_path / "out", found, found.entries)
    assert not (tmp_path / "out").exists()


def test_an_entry_of_which_another_variant_would_run_is_not_bundled(no_compiler: None, tmp_path: Path) -> None:
    found = table_of(tmp_path / "a.yaml", gradients(clear_ahead=32))
    with pytest.raises(InvalidTable, match=r"another variant than runs, clear_ahead 32 → 0\..*table refresh"):
        bundle.write(tmp_path / "out", found, found.entries)
    assert not (tmp_path / "out").exists()


def test_machine_code_that_is_neither_stored_nor_to_be_made_is_named(no_compiler: None, tmp_path: Path) -> None:
    found = table_of(tmp_path / "a.yaml", entry(problem(head_dim=32)))
    with pytest.raises(CompileError, match="no NVRTC here"):
        bundle.write(tmp_path / "out", found, found.entries)


def test_machine_code_other_than_the_certified_is_not_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "default_store", lambda: store_with((), tmp_path / "cubins"))
    monkeypatch.setattr(compiler, "compile_source", lambda source, arch: compiled(source, arch, b"\x7fELF other", "13.5"))
    found = table_of(tmp_path / "a.yaml", entry())
    with pytest.raises(InvalidTable, match=r"NVRTC 13\.5 makes other machine code"):
        bundle.write(tmp_path / "out", found, found.entries)


def test_machine_code_for_another_architecture_is_marked_as_uncertified_and_not_served(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        compiler, "compile_source", lambda source, arch: compiled(source, arch, b"\x7fELF for " + arch.encode() + source.digest.encode())
    )
    found = table.read(tmp_path / "nvidia-h200.yaml", strict=True)
    bundle.write(tmp_path / "both", found, found.entries, ["sm_80"])
    loaded = load_bundle(tmp_path / "both")
    assert {(each.sm, each.record.certified) for each in loaded.kernels} == {(90, "device"), (80, "none")}
    assert loaded.lookup(problem(), replace(device.preset("a100"), sm=80)).found is None
    with pytest.raises(UnsupportedProblem, match="needs sm_80 or newer"):
        bundle.write(tmp_path / "old", found, found.entries, ["sm_75"])


def test_a_place_that_is_taken_is_left_alone_unless_it_is_a_bundle_to_be_replaced(made: Path, tmp_path: Path) -> None:
    found = table.read(tmp_path / "nvidia-h200.yaml", strict=True)
    with pytest.raises(NotWritable, match="exists already"):
        bundle.write(made, found, found.entries)
    bundle.write(made, found, found.entries[:1], replace=True)
    assert len(load_bundle(made).table.entries) == 1
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("two years")
    with pytest.raises(NotWritable, match="is no bundle"):
        bundle.write(precious, found, found.entries, replace=True)
    assert (precious / "thesis.txt").read_text() == "two years"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_the_licence_and_the_code_of_a_bundle_are_the_projects() -> None:
    assert bundle._data("LICENSE") == (ROOT / "LICENSE").read_bytes()


# Loading --------------------------------------------------------------------------------------------------------------


def test_folder_and_archive_load_alike(made: Path, tmp_path: Path) -> None:
    found = table.read(tmp_path / "nvidia-h200.yaml", strict=True)
    bundle.write(tmp_path / "a.zip", found, found.entries)
    folder, archive = flashgen.load_bundle(made), flashgen.load_bundle(tmp_path / "a.zip")
    assert folder.digest == archive.digest and folder.table.entries == archive.table.entries == found.entries
    assert [each.cubin for each in folder.kernels] == [each.cubin for each in archive.kernels]


def test_the_machine_code_that_serves_a_problem_is_the_one_that_its_entry_pins(made: Path) -> None:
    loaded = load_bundle(made)
    for each in loaded.table.entries:
        kernel = loaded.kernel_for(each.problem, H200)
        assert kernel.compiled.report.cubin_digest == each.cubin_digest
        assert kernel.source.digest == each.source_digest


def test_near_problems_are_served_and_others_refused_with_the_steps(made: Path) -> None:
    loaded = load_bundle(made)
    assert loaded.kernel_for(problem(1500), H200).record.mask == "causal"
    with pytest.raises(UnsupportedProblem, match="0 with the key"):
        loaded.kernel_for(problem(1500, head_dim=128), H200)
    small = replace(H200, shared_bytes_per_cta=1000)
    with pytest.raises(UnsupportedProblem, match="bytes of shared memory"):
        loaded.kernel_for(problem(), small)


def test_grids_and_workspaces_are_those_of_the_search_space(made: Path) -> None:
    loaded = load_bundle(made)
    for each in loaded.table.entries:
        bound = load_space(each.variant.family).bind(each.problem, H200)
        here = loaded.bound(loaded.kernel_for(each.problem, H200).source, each.problem, H200.sm_count)
        assert here.grids(each.variant) == bound.grids(each.variant)
        assert here.workspace_bytes(each.variant) == bound.workspace_bytes(each.variant)


READ_ALONE = """
import flashgen
bundle = flashgen.load_bundle(sys.argv[1])
print(len(bundle.kernels), [name for name in ("cupy", "torch", "optuna", "jinja2") if name in sys.modules])
guard.verdict()
"""


def test_loading_needs_neither_compiler_nor_search_nor_templates(made: Path, tmp_path: Path) -> None:
    result = bundle_alone.start(bundle_alone.environment(tmp_path / "alone", gpu=False), READ_ALONE, str(made))
    assert (result.returncode, result.stdout) == (0, "3 []\n"), result.stderr
    flip(first(made, "cubins/*"))
    refused = bundle_alone.start(tmp_path / "alone", READ_ALONE, str(made))
    assert "InvalidBundle" in refused.stderr and "is not the file that was bundled" in refused.stderr


def test_cupy_without_nvrtc_is_noticed_when_it_looks_for_one(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    script = "import cupy, flashgen.runtime\nguard.verdict()\nfrom cupy.cuda import runtime\nprint(runtime.runtimeGetVersion() > 0)"
    result = bundle_alone.start(bundle_alone.environment(tmp_path / "alone", gpu=True), script)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
    late = bundle_alone.start(tmp_path / "alone", "from cupy.cuda import nvrtc\ntry: nvrtc.getVersion()\nexcept Exception: guard.verdict()")
    assert late.returncode == 1 and "asked for" in late.stderr and "libnvrtc" in late.stderr


def test_a_bundle_can_be_pinned_by_the_digest_of_its_manifest(made: Path) -> None:
    digest = hashlib.sha256((made / MANIFEST).read_bytes()).hexdigest()
    assert load_bundle(made, digest).digest == digest
    with pytest.raises(InvalidBundle, match="not the wanted"):
        load_bundle(made, "0" * 64)


def test_signatures_may_lie_beside_the_manifest(made: Path) -> None:
    for end in SIGNATURES:
        (made / f"{MANIFEST}{end}").write_bytes(b"signed")
    load_bundle(made)


# Damage ---------------------------------------------------------------------------------------------------------------


def edit(path: Path, right: str, wrong: str) -> None:
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong, 1))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def kernel(**changes: str) -> Callable[[Path], None]:
    return lambda at: resealed(at, lambda raw: raw["kernels"][0].update(changes))


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter the manifest and give it a digest that fits, as a clumsy forger would."""
    from flashgen.bundle_reader import _digest

    raw = json.loads((folder / MANIFEST).read_text())
    change(raw)
    raw["digest"] = _digest(raw)
    (folder / MANIFEST).write_text(json.dumps(raw))


def first(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[0]


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap(folder: Path) -> None:
    one, other = sorted(folder.glob("cubins/*"))[:2]
    shutil.copy(one, other)


def misname(folder: Path) -> None:
    """One kernel's record names the other's machine code."""
    resealed(folder, lambda raw: raw["kernels"][0].update({name: raw["kernels"][1][name] for name in ("cubin", "bytes")}))


OUTSIDE = {"../x": {"sha256": "0" * 64, "bytes": 1}}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of machine code": (lambda at: flip(first(at, "cubins/*")), "is not the file that was bundled"),
    "machine code cut": (lambda at: cut(first(at, "cubins/*")), "is not the file that was bundled"),
    "machine code missing": (lambda at: first(at, "cubins/*").unlink(), "is missing"),
    "machine code swapped": (swap, "is not the file that was bundled"),
    "the table edited": (lambda at: edit(at / "table.yaml", "100.0", "200.0"), "table.yaml is not the file"),
    "the header edited": (lambda at: flip(at / "flashgen.h"), "flashgen.h is not the file"),
    "the manifest edited": (lambda at: edit(at / MANIFEST, '"threads": 128', '"threads": 256'), "does not match its own digest"),
    "the manifest cut": (lambda at: cut(at / MANIFEST), "not readable"),
    "the manifest missing": (lambda at: (at / MANIFEST).unlink(), "cannot be read"),
    "a name twice in the manifest": (lambda at: edit(at / MANIFEST, '"schema"', '"digest": "", "schema"'), "a name twice"),
    "a file more": (lambda at: (at / "cubins" / "extra.cubin").write_bytes(b"\x7fELF"), "is in no manifest"),
    "a link": (lambda at: (at / "link").symlink_to("/etc/passwd"), "is no plain file"),
    "another schema": (lambda at: resealed(at, lambda raw: raw.update(schema="flashgen.bundle/9")), "flashgen.bundle/9"),
    "an unknown field": (lambda at: resealed(at, lambda raw: raw.update(surprise=1)), "surprise"),
    "a name that leaves the folder": (lambda at: resealed(at, lambda raw: raw["files"].update(OUTSIDE)), "not readable"),
    "a formula that calls": (kernel(workspace_bytes="open('x')"), "open"),
    "a formula of unknown names": (kernel(workspace_bytes="kernel.registers"), "means nothing at a launch"),
    "another device": (lambda at: resealed(at, lambda raw: raw["device"].update(sm_count=7)), "belongs to"),
    "an entry without machine code": (lambda at: resealed(at, lambda raw: raw["kernels"].pop()), "pins machine code"),
    "a kernel that names another's code": (misname, "pins machine code that is not in the bundle"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_bundle_is_refused_before_anything_is_loaded(made: Path, damage: str) -> None:
    harm, said = DAMAGES[damage]
    harm(made)
    with pytest.raises(InvalidBundle) as refused:
        load_bundle(made)
    assert said in str(refused.value)


def test_a_flipped_bit_anywhere_in_an_archive_is_refused_or_harmless(made: Path, tmp_path: Path) -> None:
    found = table.read(tmp_path / "nvidia-h200.yaml", strict=True)
    bundle.write(tmp_path / "a.zip", found, found.entries)
    whole, good = (tmp_path / "a.zip").read_bytes(), load_bundle(tmp_path / "a.zip")
    rng, refused = random.Random(1), 0
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "b.zip").write_bytes(data)
        try:
            other = load_bundle(tmp_path / "b.zip")
        except InvalidBundle:
            refused += 1
            continue
        assert other.digest == good.digest and [each.cubin for each in other.kernels] == [each.cubin for each in good.kernels]
    assert refused > 100


@pytest.mark.parametrize("content_", [b"", b"PK", b"\x00" * 1000, b"no archive"])
def test_what_is_no_bundle_is_refused(tmp_path: Path, content_: bytes) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(content_)
    with pytest.raises(InvalidBundle, match=r"a\.zip"):
        load_bundle(path)
    with pytest.raises(InvalidBundle):
        load_bundle(tmp_path / "nowhere")


def test_an_archive_that_inflates_beyond_its_manifest_is_read_no_further(made: Path, tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content(made).items():
            archive.writestr(name, bytes(200 * 2**20) if name == "LICENSE" else data)
    (tmp_path / "bomb.zip").write_bytes(out.getvalue())
    with pytest.raises(InvalidBundle, match="LICENSE is not the file"):
        load_bundle(tmp_path / "bomb.zip")


# Formulas -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["ampere_forward", "simt_forward", "standard_forward"])
def test_settled_formulas_have_the_values_of_the_space_on_every_shape(family: str) -> None:
    space, rng = load_space(family), random.Random(5)
    for _ in range(30):
        heads_kv = rng.randint(1, 4)
        asked = Problem(
            DType.FLOAT16, rng.randrange(8, 257, 8), rng.randrange(8, 257, 8), rng.randint(0, 5), heads_kv * rng.randint(1, 3), heads_kv,
            rng.randint(0, 5000), rng.randint(0, 5000),
        )  # fmt: skip
        bound = space.bind(asked, H200)
        chosen = bound.variant(space.definition.fallback)
        grids, workspace = formula.launch_formulas(space, asked.klass(), chosen)
        names = {name: getattr(H200 if name.startswith("device") else asked, name.partition(".")[2]) for name in formula.RUN_TIME_NAMES}
        from flashgen.expression import parse_expression

        assert tuple(parse_expression(each).value(names) for each in grids) == bound.grids(chosen)
        assert parse_expression(workspace).value(names) == bound.workspace_bytes(chosen)


# C --------------------------------------------------------------------------------------------------------------------


def build_example(folder: Path, include: Path, out: Path) -> Path:
    flags = ["-O1", "-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{folder}", f"-I{include}"]
    stub = [
        "gcc",
        "-O1",
        "-std=gnu11",
        f"-I{include}",
        "-shared",
        "-fPIC",
        str(STUB / "stub.c"),
        "-o",
        str(out.parent / "libcuda.so"),
        "-lm",
    ]
    subprocess.run(stub, check=True)
    subprocess.run(["gcc", *flags, str(folder / "example.c"), "-o", str(out), f"-L{out.parent}", "-lcuda", "-lm"], check=True)
    return out


def run_example(example: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    log = example.parent / "launches.txt"
    log.unlink(missing_ok=True)
    extra = {"LD_LIBRARY_PATH": str(example.parent), "FG_STUB_LOG": str(log), **environment}
    return subprocess.run([str(example), *arguments], capture_output=True, text=True, env=os.environ | extra, timeout=120)


def cuda_headers() -> list[Path]:
    found = [Path("/usr/local/cuda/include")]
    for root in map(Path, sys.path):
        found += root.glob("nvidia/*/include") if root.is_dir() else ()
    return [folder for folder in found if (folder / "cuda.h").is_file()]


needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc")


@needs_gcc
@pytest.mark.skipif(not cuda_headers(), reason="needs the CUDA driver API's cuda.h, such as pip install nvidia-cuda-runtime")
def test_the_example_compiles_against_the_toolkits_header(made: Path, tmp_path: Path) -> None:
    assert build_example(made, cuda_headers()[0], tmp_path / "example").is_file()


@needs_gcc
def test_the_example_runs_every_tuned_problem_and_finds_it_right(made: Path, tmp_path: Path) -> None:
    example = build_example(made, STUB, tmp_path / "example")
    result = run_example(example, str(made))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("largest error") == 4
    wrong = run_example(example, str(made), FG_STUB_COMPUTES="0")
    assert wrong.returncode == 1, "zeros are not attention"
    assert run_example(example, str(made), FG_STUB_SM="80").returncode == 2


@needs_gcc
def test_the_example_launches_as_python_does_bit_for_bit(made: Path, tmp_path: Path) -> None:
    example = build_example(made, STUB, tmp_path / "example")
    loaded = load_bundle(made)
    for number, each in enumerate(loaded.table.entries):
        asked = each.problem
        files = [tmp_path / f"{name}.bin" for name in ("q", "k", "v", "o", "lse")]
        for path, heads, rows in zip(
            files, (asked.heads_q, asked.heads_kv, asked.heads_kv), (asked.seqlen_q, asked.seqlen_kv, asked.seqlen_kv), strict=False
        ):
            np.zeros(asked.batch * heads * rows * asked.head_dim, np.uint16).tofile(path)
        result = run_example(example, str(made), f"{number}", *map(str, files), FG_STUB_COMPUTES="0")
        assert result.returncode in (0, 1), result.stderr
        name, grid, threads, shared, params = (example.parent / "launches.txt").read_text().split()
        kernel = loaded.kernel_for(asked, H200)
        (point,) = kernel.source.entry_points
        grids = loaded.bound(kernel.source, asked, 132).grids(each.variant)
        assert (name, int(grid), int(threads), int(shared)) == (point.name, grids[0], point.threads, point.shared_bytes)
        assert bytes_but_addresses(bytes.fromhex(params)) == bytes_but_addresses(python_params(asked))


def python_params(asked: Problem) -> bytes:
    def operand(heads: int, rows: int, columns: int) -> launch.Operand:
        return launch.Operand(512, (heads * rows * columns, rows * columns, columns))

    q, o = operand(asked.heads_q, asked.seqlen_q, asked.head_dim), operand(asked.heads_q, asked.seqlen_q, asked.head_dim_v)
    k, v = operand(asked.heads_kv, asked.seqlen_kv, asked.head_dim), operand(asked.heads_kv, asked.seqlen_kv, asked.head_dim_v)
    return bytes(launch.forward_params(asked, asked.scale, q, k, v, o, 512, 0))


def bytes_but_addresses(params: bytes) -> bytes:
    return params[6 * 8 :]


@needs_gcc
def test_the_example_refuses_altered_machine_code_before_loading_it(made: Path, tmp_path: Path) -> None:
    example = build_example(made, STUB, tmp_path / "example")
    for path in (made / "cubins").iterdir():
        flip(path)
    result = run_example(example, str(made))
    assert result.returncode == 2 and "not the one that was bundled" in result.stderr
    assert not (example.parent / "launches.txt").exists()
    shutil.rmtree(made / "cubins")
    assert "is missing" in run_example(example, str(made)).stderr


@needs_gcc
@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_the_digest_in_c_is_sha256(made: Path, tmp_path: Path, size: int) -> None:
    lines = ["unsigned char data[2000]; char hex[65];", "fg_sha256(data, fread(data, 1, 2000, stdin), hex);", "puts(hex); return 0;"]
    (tmp_path / "digest.c").write_text('#include "flashgen.h"\nint main(void) {' + "\n".join(lines) + "}\n")
    flags = ["-std=c99", "-w", f"-I{made}", f"-I{STUB}", "-Wl,--unresolved-symbols=ignore-all"]
    subprocess.run(["gcc", *flags, str(tmp_path / "digest.c"), "-o", str(tmp_path / "digest"), "-lm"], check=True)
    data = bytes(random.Random(size).randbytes(size))
    found = subprocess.run([str(tmp_path / "digest")], input=data, capture_output=True, check=True).stdout.decode().strip()
    assert found == hashlib.sha256(data).hexdigest()


MAPS = """
#include "flashgen.h"
int main(void) {
  fg_problem p = {DTYPE, DIM, DIM_V, 0, BATCH, HEADS_Q, HEADS_KV, ROWS_Q, ROWS_KV, -1, -1, 0, 1.0};
  fg_forward_params params = {.q = 1024, .k = 2048, .v = 4096, .o = 8192};
  CUtensorMap map;
  params.q_strides = fg_contiguous(p.heads_q, p.seqlen_q, p.head_dim);
  params.k_strides = fg_contiguous(p.heads_kv, p.seqlen_kv, p.head_dim);
  params.v_strides = fg_contiguous(p.heads_kv, p.seqlen_kv, p.head_dim_v);
  params.o_strides = fg_contiguous(p.heads_q, p.seqlen_q, p.head_dim_v);
  for (int i = 0; i < 4; ++i)
    if (fg_map(&p, &params, i, 64 + i, &map)) return 1;
  printf("%zu %zu\\n", sizeof params, sizeof(fg_mapped_params));
  return 0;
}
"""


def flat(argument: Any) -> list[int]:
    if isinstance(argument, ctypes.Array):
        return list(argument)
    return [argument.value]


@needs_gcc
@pytest.mark.parametrize(("batch", "rows_q", "rows_kv"), [(3, 100, 200), (1, 1, 77)])
def test_tensor_maps_in_c_are_those_of_python(made: Path, tmp_path: Path, batch: int, rows_q: int, rows_kv: int) -> None:
    asked = Problem(DType.BFLOAT16, 128, 64, batch, 6, 2, rows_q, rows_kv)
    build_example(made, STUB, tmp_path / "example")
    (tmp_path / "maps.c").write_text(MAPS)
    values = {"DTYPE": 2, "DIM": 128, "DIM_V": 64, "BATCH": batch, "HEADS_Q": 6, "HEADS_KV": 2, "ROWS_Q": rows_q, "ROWS_KV": rows_kv}
    flags = ["-std=c99", "-w", f"-I{made}", f"-I{STUB}", *(f"-D{name}={value}" for name, value in values.items())]
    link = ["-o", str(tmp_path / "maps"), f"-L{tmp_path}", "-lcuda", "-lm"]
    subprocess.run(["gcc", *flags, str(tmp_path / "maps.c"), *link], check=True)
    *lines, sizes = run_example(tmp_path / "maps").stdout.splitlines()
    assert sizes.split() == [str(ctypes.sizeof(launch.ForwardStruct)), str(ctypes.sizeof(launch.MappedForwardStruct))]
    heads = {"q": (6, rows_q, 128), "k": (2, rows_kv, 128), "v": (2, rows_kv, 64), "o": (6, rows_q, 64)}
    operands = [
        launch.Operand(address, (count * rows * columns, rows * columns, columns))
        for address, (count, rows, columns) in zip((1024, 2048, 4096, 8192), heads.values(), strict=True)
    ]
    plain = launch.forward_params(asked, 1.0, *operands, 512, 0)  # type: ignore[arg-type]
    for number, (name, line) in enumerate(zip(heads, lines, strict=True)):
        _, *arguments = launch.map_of(name, 64 + number, plain, asked).driver_arguments(1)
        assert list(map(int, line.split())) == [value for argument in arguments for value in flat(argument)]


# The command ----------------------------------------------------------------------------------------------------------


def test_the_bundle_command_takes_the_entries_that_serve_a_log(made: Path, tmp_path: Path, capsys: Captured) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(f"{traffic.line_of(problem())}\n{traffic.line_of(problem(77, head_dim=128))}\n")
    out = tmp_path / "part.zip"
    assert cli.run(["bundle", str(out), "--table", str(tmp_path / "nvidia-h200.yaml"), "--problems", str(log), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["entries"], record["kernels"]) == (1, 1)
    assert load_bundle(out, record["manifest_sha256"]).table.entries[0].problem == problem()
    assert cli.run(["bundle", str(out), "--table", str(tmp_path / "nvidia-h200.yaml")]) == 2
    assert "exists already" in " ".join(capsys.readouterr().err.split())
    assert cli.run(["bundle", str(out), "--table", str(tmp_path / "nvidia-h200.yaml"), "--force"]) == 0
    assert "4 entries, 3 kernels" in capsys.readouterr().out


def test_the_bundle_command_leaves_gradients_out_and_says_so(made: Path, tmp_path: Path, capsys: Captured) -> None:
    backward = gradients()
    compiler.default_store().put(compiled(source_of(backward.problem, backward.variant)))
    both = table_of(tmp_path / "both.yaml", *entries(), backward)
    assert cli.run(["bundle", str(tmp_path / "both.zip"), "--table", str(both.path), "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["entries"], json.loads(captured.out)["left_out"]) == (4, 1)
    assert "1 entries of the backward pass are left out" in " ".join(captured.err.split())
    alone = table_of(tmp_path / "alone.yaml", backward)
    assert cli.run(["bundle", str(tmp_path / "alone.zip"), "--table", str(alone.path)]) == 2
    with pytest.raises(UnsupportedProblem, match="Leave the entry out"):
        bundle.write(tmp_path / "refused.zip", both, both.entries)


def test_the_bundle_command_leaves_out_what_names_another_variant_than_runs(made: Path, tmp_path: Path, capsys: Captured) -> None:
    whole = problem(8192, mask=Mask())
    settled = load_space("hopper_forward").bind(whole, H200).fallback()
    odd = entry(whole, chosen=Variant.of(settled.family, settled.as_dict() | {"head_section": 8}))
    found = table_of(tmp_path / "odd.yaml", *entries(), odd)
    assert cli.run(["bundle", str(tmp_path / "odd.zip"), "--table", str(found.path), "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["entries"], json.loads(captured.out)["left_out"]) == (4, 1)
    assert "1 entries that name another variant than runs are left out" in " ".join(captured.err.split())


def test_a_manifest_is_written_as_it_is_read(made: Path) -> None:
    loaded: Bundle = load_bundle(made)
    assert sealed(loaded.manifest) == (made / MANIFEST).read_bytes()
    assert loaded.manifest.kernels[0].op is Op.FORWARD


@pytest.mark.compiled
@needs_gcc
def test_a_bundle_of_compiled_kernels_is_reproducible_and_builds(tmp_path: Path, home: Path) -> None:
    made = []
    for number in range(2):
        store = compiler.CubinStore(tmp_path / f"cubins{number}")
        chosen = []
        for asked in (problem(head_dim=16), problem(head_dim=16, mask=Mask())):
            base = entry(asked)
            built = compiler.compile_source(source_of(asked, base.variant), "sm_90", store)
            provenance = replace(base.provenance, nvrtc=built.report.nvrtc)
            chosen.append(replace(base, cubin_digest=built.report.cubin_digest, provenance=provenance))
        found = table_of(tmp_path / f"{number}.yaml", *chosen)
        made.append(bundle.build(found, found.entries))
    assert made[0] == made[1]
