"""Which kernel serves a problem, when it is proved again, and that serving costs no file, no search and no parsing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from table_entries import DEVICE, problem

import flashgen
from flashgen import dispatch, paths, search, suite, table, table_image, trust
from flashgen.backends import Launch, Loaded
from flashgen.dispatch import Dispatcher, Origin
from flashgen.errors import CompileError, LaunchError, MissingDependency, UnsupportedProblem, UntunedProblem, UntunedProblemWarning
from flashgen.model import (
    Certificate,
    DeviceLimits,
    DType,
    ExecutorName,
    Measurement,
    Problem,
    Provenance,
    Source,
    TableEntry,
    Variant,
    Verdict,
)
from flashgen.render import render
from flashgen.space import Space, load_space

CUBIN = "sha256:" + "ab" * 32
FAST, OTHER = ({"block_q": 128, "num_warps": 4, "q_in_registers": False}, {"block_q": 64, "num_warps": 2, "q_in_registers": False})

AMPERE = replace(DEVICE, sm=80)  # where no other family is predicted faster than a near match of ampere_forward


class FakeBackend:
    """A device that compiles everything to one cubin, certifies what it is told to, and counts."""

    name = ExecutorName.DEVICE

    def __init__(self, limits: DeviceLimits = DEVICE, cubin: str = CUBIN, inexact: Sequence[str] = (), broken: Sequence[str] = ()) -> None:
        self.limits, self.cubin, self.inexact, self.broken = limits, cubin, inexact, broken
        self.loads: list[Source] = []
        self.proofs: list[Source] = []
        self.captures = False

    def check_process(self) -> None:
        pass

    def capturing(self, stream: int) -> bool:
        return self.captures

    def load(self, source: Source) -> Loaded:
        if any(word in str(source.variant) for word in self.broken):
            raise CompileError(f"{source.variant} does not compile")
        self.loads.append(source)
        return Loaded(source, None, self.cubin)

    def quick(self, space: Space, loaded: Loaded, problem: Problem) -> Certificate:
        self.proofs.append(loaded.source)
        wrong = any(word in str(loaded.source.variant) for word in self.inexact)
        verdict = Verdict.INEXACT if wrong else Verdict.EXACT
        return Certificate(verdict, suite.SUITE, "ab" * 32, self.name, 8, 4, 1.0, "", 0.0, "o[0] = 1, must be 2" if wrong else "")

    def prepare(self, loaded: Loaded, problem: Problem, grids: Sequence[int], scale: float, strides: Sequence[Any]) -> Launch:
        return lambda *_: None


def entry(of: Problem, source: str = "measured", cubin: str = CUBIN, digest: str = "", **params: int) -> TableEntry:
    """An entry of ampere_forward whose digests are those of today's text."""
    space = load_space("ampere_forward")
    bound = space.bind(of, DEVICE)
    variant = bound.variant(bound.seeds()[0].as_dict() | params)
    executor = ExecutorName.DEVICE if source == "measured" else ExecutorName.EMULATED
    text = render(space, of.klass(), variant)
    return TableEntry(
        problem=of, variant=variant, source_digest=digest or text.digest, cubin_digest=cubin, options=(),
        measurement=Measurement(400.0, 399.0, 402.0, 200, 333.25, source, None),
        certificate=Certificate(Verdict.EXACT, suite.SUITE, "a9" * 32, executor, 64, 24, 1.18, "ragged", 3.1e-06),
        provenance=Provenance("2026-08-24T10:15:00Z", "0.1.0", "tpe", 1, 143, 60, "77" * 32, "13.0", "580.65", "14.2.0", "NVIDIA H200"),
    )  # fmt: skip


def write(folder: Path, *entries: TableEntry, device: DeviceLimits = DEVICE) -> Path:
    for each in entries:
        table.merge(folder / "table.yaml", device, each)
    return folder


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    """A directory for tables, with an empty FLASHGEN_HOME for images and proofs."""
    found = tmp_path / "tables"
    found.mkdir()
    return found


# Which entry --------------------------------------------------------------------------------------------------------------


def test_a_pinned_entry_is_served_without_another_proof(folder: Path) -> None:
    write(folder, entry(problem(), **FAST))
    backend = FakeBackend()
    served = Dispatcher(backend, [folder]).serve(problem(), strict=True)
    assert served.answer.origin is Origin.TABLE and served.answer.entry is not None
    assert served.answer.variant == entry(problem(), **FAST).variant
    assert len(backend.loads) == 1 and not backend.proofs


def test_the_users_table_goes_before_the_shipped_one(folder: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write(shipped, entry(problem(), **FAST))
    write(folder, entry(problem(), **OTHER))
    assert Dispatcher(FakeBackend(), [folder, shipped]).serve(problem()).answer.variant == entry(problem(), **OTHER).variant


def test_an_entry_of_a_sister_device_is_proved_here_before_it_serves(folder: Path) -> None:
    sister = replace(DEVICE, name="NVIDIA H100", dram_gb_per_s=3352.0)
    write(folder, entry(problem(), **FAST), device=sister)
    backend = FakeBackend()
    served = Dispatcher(backend, [folder]).serve(problem())
    assert served.answer.origin is Origin.SISTER and len(backend.proofs) == 1


def test_a_predicted_entry_serves_above_the_fallback_after_one_proof(folder: Path) -> None:
    write(folder, entry(problem(), "predicted", **FAST))
    backend = FakeBackend()
    dispatcher = Dispatcher(backend, [folder])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert dispatcher.serve(problem(), strict=True).answer.origin is Origin.PREDICTED
    assert len(backend.proofs) == 1


def test_the_fallback_warns_once_with_the_command_and_strict_raises(folder: Path) -> None:
    dispatcher = Dispatcher(FakeBackend(), [folder])
    with pytest.warns(
        UntunedProblemWarning, match="flashgen tune --head-dim 128 --dtype bfloat16 --seqlen 4096 --batch 4 --heads 16"
    ) as told:
        assert dispatcher.serve(problem()).answer.origin is Origin.FALLBACK
        dispatcher.serve(problem())
        dispatcher.serve(problem(4097))
    assert len(told) == 1
    with pytest.raises(UntunedProblem, match="--kv-heads 4 --causal"):
        dispatcher.serve(problem(), strict=True)


def test_what_no_family_computes_is_refused_with_every_reason(folder: Path) -> None:
    with pytest.raises(UnsupportedProblem, match=r"(?s)ampere_forward: .*264.*simt_forward: .*264"):
        Dispatcher(FakeBackend(), [folder]).serve(problem(head_dim=264, head_dim_v=264))


def test_two_unlike_devices_use_their_own_entries(folder: Path) -> None:
    small = replace(DEVICE, name="NVIDIA A100", sm=80, sm_count=108, shared_bytes_per_cta=166912, shared_bytes_per_sm=167936)
    write(folder, entry(problem(), **FAST))
    table.merge(folder / "small.yaml", small, entry(problem(), **OTHER))
    found = [Dispatcher(FakeBackend(limits), [folder]).serve(problem()).answer.variant for limits in (DEVICE, small)]
    assert found == [entry(problem(), **params).variant for params in (FAST, OTHER)]


# Stale entries ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stale", [{"digest": "3f" * 32}, {"cubin": "sha256:" + "77" * 32}], ids=["other text", "other binary"])
def test_a_stale_entry_is_proved_once_and_the_proof_is_remembered(folder: Path, stale: dict[str, str]) -> None:
    write(folder, entry(problem(), **stale, **FAST))
    first, second = FakeBackend(), FakeBackend()
    for backend in (first, second):  # the second as a new process would be
        assert Dispatcher(backend, [folder]).serve(problem(), strict=True).answer.origin is Origin.TABLE
    assert (len(first.proofs), len(second.proofs)) == (1, 0)


@pytest.mark.parametrize("fault", ["inexact", "broken"])
def test_an_entry_that_fails_here_is_set_aside_with_one_warning_and_the_call_succeeds(folder: Path, fault: str) -> None:
    near = problem(2048)
    write(folder, entry(problem(), digest="3f" * 32, **FAST), entry(near, **OTHER), device=AMPERE)
    dispatcher = Dispatcher(FakeBackend(AMPERE, **{fault: ["block_q=128"]}), [folder])
    with pytest.warns(UserWarning, match="is set aside") as told:
        served = [dispatcher.serve(problem(length)) for length in (4096, 4096, 4000)]
    assert len(told) == 1 and {each.answer.variant for each in served} == {entry(near, **OTHER).variant}


def test_when_every_entry_fails_the_fallback_serves(folder: Path) -> None:
    write(folder, entry(problem(), digest="3f" * 32, **FAST))
    with pytest.warns(UserWarning):
        served = Dispatcher(FakeBackend(inexact=["block_q=128"]), [folder]).serve(problem())
    assert served.answer.origin is Origin.FALLBACK


def test_a_fallback_that_does_not_compile_gives_way_to_the_next(folder: Path) -> None:
    with pytest.warns(UntunedProblemWarning):
        served = Dispatcher(FakeBackend(broken=["ampere", "hopper"]), [folder]).serve(problem())
    assert served.answer.variant.family == "simt_forward"
    assert any("does not compile" in step for step in served.answer.steps)


def test_a_failed_proof_is_remembered_too(folder: Path) -> None:
    write(folder, entry(problem(), digest="3f" * 32, **FAST))
    second = FakeBackend()
    for backend in (FakeBackend(inexact=["block_q=128"]), second):
        with pytest.warns(UserWarning):
            assert Dispatcher(backend, [folder]).serve(problem()).answer.origin is Origin.FALLBACK
    assert not second.proofs


def test_a_damaged_proof_is_no_proof(folder: Path) -> None:
    write(folder, entry(problem(), digest="3f" * 32, **FAST))
    Dispatcher(FakeBackend(), [folder]).serve(problem())
    (proof,) = paths.proof_store().glob("*.json")
    proof.write_text("{")
    backend = FakeBackend()
    Dispatcher(backend, [folder]).serve(problem())
    assert len(backend.proofs) == 1


# The hot path -------------------------------------------------------------------------------------------------------------

_opened: list[str] = []
_listening = False


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event in ("open", "os.listdir", "os.scandir", "compile", "import"):
        _opened.append(f"{event} {arguments[:1]}")


def test_a_served_problem_opens_no_file_and_imports_nothing(folder: Path) -> None:
    global _listening
    write(folder, entry(problem(), **FAST))
    dispatcher = Dispatcher(FakeBackend(), [folder])
    dispatcher.serve(problem())
    sys.addaudithook(_listen)
    _opened.clear()
    _listening = True
    try:
        dispatcher.serve(problem())
        again = list(_opened)
        dispatcher.serve(problem(4100))  # a new length of a known class
        new = list(_opened)
    finally:
        _listening = False
    assert not again and not [each for each in new if "yaml" in each]


def test_a_new_key_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, entry(problem(), **FAST))
    dispatcher = Dispatcher(FakeBackend(), [folder])
    with caplog.at_level(logging.INFO, "flashgen"):
        for length in (4096, 4096, 4090):
            dispatcher.serve(problem(length))
    assert len([record for record in caplog.records if record.name == "flashgen"]) == 1


@pytest.mark.parametrize(("rows", "alike"), [(1, True), (200, True), (1192, False)])
def test_few_queries_are_served_as_their_bucket_and_many_by_a_look_up_of_their_own(folder: Path, rows: int, alike: bool) -> None:
    write(folder, entry(problem(), **FAST))
    asked = replace(problem(), seqlen_q=rows, seqlen_kv=3000)
    answer = Dispatcher(FakeBackend(), [folder]).serve(asked).answer
    assert any("the middle of its bucket" in step for step in answer.steps) == alike


def test_threads_that_come_at_once_load_one_kernel(folder: Path) -> None:
    write(folder, entry(problem(), **FAST))
    backend = FakeBackend()
    dispatcher = Dispatcher(backend, [folder])
    gate = threading.Barrier(8)
    found: list[object] = []

    def call() -> None:
        gate.wait()
        found.append(dispatcher.serve(problem()).loaded)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(map(id, found))) == 1 and len(found) == 8 and len(backend.loads) == 1


def test_during_graph_capture_nothing_is_loaded_and_the_warm_up_is_named(folder: Path) -> None:
    write(folder, entry(problem(), **FAST))
    backend = FakeBackend()
    dispatcher = Dispatcher(backend, [folder])
    backend.captures = True
    with pytest.raises(LaunchError, match=r"Warm up first: call flashgen\.attention once"):
        dispatcher.serve(problem())
    backend.captures = False
    dispatcher.serve(problem())
    backend.captures = True
    assert dispatcher.serve(problem()).answer.origin is Origin.TABLE
    assert dispatcher.serve(problem(4100)).answer.origin is Origin.TABLE, "a known kernel needs no loading"


def test_after_forgetting_a_new_entry_is_seen(folder: Path) -> None:
    dispatcher = Dispatcher(FakeBackend(), [folder])
    with pytest.warns(UntunedProblemWarning):
        dispatcher.serve(problem())
    write(folder, entry(problem(), **FAST))
    dispatcher.plans["kept"] = "plan"
    dispatcher.forget()
    assert dispatcher.serve(problem()).answer.origin is Origin.TABLE and not dispatcher.plans


def test_the_kernel_of_a_length_does_not_depend_on_what_was_asked_before(folder: Path) -> None:
    lengths = (600, 1000, 1448, 1449, 2000, 2900, 3000, 4096, 6000, 11000)
    write(folder, entry(problem(1024), **OTHER), entry(problem(3000), **FAST), entry(problem(8192), **FAST))
    choices = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for order in (lengths, lengths[::-1]):
            dispatcher = Dispatcher(FakeBackend(), [folder])
            found = {length: dispatcher.serve(problem(length)).answer for length in order}
            choices.append({length: found[length].variant for length in lengths})
            assert found[3000].entry is not None and found[3000].entry.problem == problem(3000), "an entry always serves its own shape"
    assert choices[0] == choices[1]


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 2**31 - 1])
def test_the_middle_of_a_bucket_is_in_it(length: int) -> None:
    middle = dispatch.bucket_middle(problem(8, seqlen_kv=length))
    assert middle.seqlen_kv == (length if length < 2 else 2 ** table.shape_bucket(problem(8, seqlen_kv=length))[1]) or length > 2**30


def test_an_answer_tells_the_whole_story(folder: Path) -> None:
    write(folder, entry(problem(), **FAST))
    text = str(Dispatcher(FakeBackend(), [folder]).serve(problem()).answer)
    assert "ampere_forward[block_q=128" in text and str(folder / "table.yaml") in text and "1. NVIDIA H200" in text


# Images -------------------------------------------------------------------------------------------------------------------


def test_the_second_reading_parses_no_yaml(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, entry(problem(), **FAST), entry(problem(512), "predicted", **OTHER))
    first = table_image.load_all([folder])
    monkeypatch.setattr(table, "read", lambda *_, **__: pytest.fail("YAML was parsed"))
    assert table_image.load_all([folder]) == first


@pytest.mark.parametrize("damage", ["cut", "older schema", "gone"])
def test_a_bad_image_is_made_anew(folder: Path, damage: str) -> None:
    path = write(folder, entry(problem(), **FAST)) / "table.yaml"
    wanted = table_image.load(path)
    image = table_image.image_path(path)
    if damage == "gone":
        image.unlink()
    else:
        image.write_text(image.read_text()[:-40] if damage == "cut" else image.read_text().replace(table_image.SCHEMA, "flashgen.image/0"))
    assert table_image.load(path) == wanted and table_image.load(path) == wanted


def test_an_edited_table_is_read_again_and_a_touched_one_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(folder, entry(problem(), **FAST)) / "table.yaml"
    table_image.load(path)
    write(folder, entry(problem(512), **OTHER))
    assert len(table_image.load(path).entries) == 2
    os.utime(path)
    monkeypatch.setattr(table, "read", lambda *_, **__: pytest.fail("YAML was parsed"))
    assert len(table_image.load(path).entries) == 2


def test_an_unwritable_home_costs_the_image_only(folder: Path, home: Path) -> None:
    path = write(folder, entry(problem(), **FAST)) / "table.yaml"
    home.parent.mkdir(parents=True, exist_ok=True)
    home.write_text("a file where the home should be")
    assert len(table_image.load(path).entries) == 1


def test_a_bad_table_is_one_warning(folder: Path) -> None:
    (folder / "bad.yaml").write_text("schema: flashgen.table/9\n")
    write(folder, entry(problem(), **FAST))
    with pytest.warns(UserWarning, match="Tuned table ignored") as told:
        assert len(table_image.load_all([folder])) == 1
    assert len(told) == 1


# Processes without a GPU, and forks -----------------------------------------------------------------------------------------


def run(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
import numpy, flashgen
from flashgen import DType, Problem
problem = Problem(DType.BFLOAT16, 40, 40, 1, 8, 8, 512, 512)
print(flashgen.lookup(problem, gpu="h200").explain())
q = numpy.zeros((1, 2, 8, 16), numpy.float32)
try:
    flashgen.attention(q, q, q)
except Exception as error:
    print(type(error).__name__, error)
from flashgen import dispatch
try:
    dispatch.for_device(0)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("blocked", [("torch",), ("torch", "cupy"), ()], ids=["no torch", "neither torch nor CuPy", "no GPU"])
def test_without_gpu_import_and_look_up_work_and_a_launch_says_one_clear_sentence(blocked: tuple[str, ...], tmp_path: Path) -> None:
    out = run(BLOCKED.format(blocked=blocked), CUDA_VISIBLE_DEVICES="", FLASHGEN_HOME=str(tmp_path))
    assert "no entry serves" in out
    assert "UnsupportedProblem q must be on a CUDA device; got numpy.ndarray in host memory" in out
    assert "MissingDependency" in out


FORK = """
import os, flashgen
from flashgen import backends
from flashgen.errors import LaunchError
if {started}:
    backends._watch_forks()  # as the first backend of a GPU does
child = os.fork()
if child == 0:
    try:
        backends.DeviceBackend(0)
    except LaunchError as error:
        os._exit(7 if "forked" in str(error) and "spawn" in str(error) else 8)
    except Exception:
        os._exit(9)  # no GPU here: the way was open
    os._exit(10)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("started", [True, False])
def test_a_fork_is_refused_after_cuda_has_started_and_free_before(started: bool) -> None:
    code = int(run(FORK.format(started=started)))
    assert code == 7 if started else code in (9, 10)


def test_every_device_has_its_own_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def backend(index: int) -> FakeBackend:
        if index == 7:
            raise MissingDependency("GPU 7 was asked for")
        made.append(index)
        return FakeBackend()

    monkeypatch.setattr(dispatch, "DeviceBackend", backend)
    monkeypatch.setattr(dispatch, "_devices", {})
    found = [dispatch.for_device(index) for index in (1, 0, 1)]
    assert found[0] is found[2] is not found[1] and made == [1, 0]
    with pytest.raises(MissingDependency):
        dispatch.for_device(7)


def test_a_proof_belongs_to_device_binary_and_suite(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem()
    space = load_space("ampere_forward")
    source = render(space, of.klass(), entry(of, **FAST).variant)
    changes: list[Callable[[], FakeBackend]] = [
        FakeBackend, lambda: FakeBackend(cubin="sha256:" + "11" * 32), lambda: FakeBackend(replace(DEVICE, name="another")),
    ]  # fmt: skip
    for make in changes:
        backend = make()
        for _ in range(2):
            trust.Proofs(backend).prove(space, backend.load(source), of)
        assert len(backend.proofs) == 1


@pytest.mark.usefixtures("nothing_shipped")
def test_look_up_and_tuning_are_functions_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(FakeBackend())
    monkeypatch.setattr(dispatch, "_emulated", dispatcher)

    def tune(of: Problem, device: DeviceLimits, **options: Any) -> str:
        assert options == {"executor": ExecutorName.EMULATED, "budget": 1}
        table.merge(paths.user_tables() / "table.yaml", device, entry(of, **FAST))
        return "tuned"

    monkeypatch.setattr(search, "tune", tune)
    assert dispatcher.serve(problem()).answer.origin is not Origin.TABLE
    assert flashgen.tune(problem(), gpu="h200", executor="emulated", budget=1) == "tuned"  # type: ignore[comparison-overlap]
    found = flashgen.lookup(problem(), gpu="h200").found
    assert found is not None and found.entry.variant == entry(problem(), **FAST).variant
    assert dispatcher.serve(problem()).answer.origin is Origin.TABLE, "this process uses the new entry at once"


def test_dtype_is_part_of_the_key(folder: Path) -> None:
    write(folder, entry(problem(), **FAST))
    half = problem(dtype=DType.FLOAT16)
    with pytest.warns(UntunedProblemWarning):
        assert Dispatcher(FakeBackend(), [folder]).serve(half).answer.origin is Origin.FALLBACK


def test_variants_of_one_source_are_loaded_once(folder: Path) -> None:
    write(folder, entry(problem(), **FAST), device=AMPERE)
    backend = FakeBackend(AMPERE)
    dispatcher = Dispatcher(backend, [folder])
    served = [dispatcher.serve(problem(length)) for length in (2100, 4096, 9000)]
    assert len({each.loaded.source.digest for each in served}) == 1 and len(backend.loads) == 1
    assert len({each.grids for each in served}) == 3
    assert isinstance(served[0].answer.variant, Variant)
