"""The command line: what it asks for, what it refuses, what it writes and prints."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flashgen import bench, cli, compiler, device, search, side_by_side, table
from flashgen.cli import options, show
from flashgen.console.progress import TuneProgress
from flashgen.errors import BusyDeviceWarning, InfeasibleVariant
from flashgen.model import (
    Certificate,
    CompileReport,
    DType,
    ExecutorName,
    Mask,
    Measurement,
    Outcome,
    Problem,
    Provenance,
    TableEntry,
    Trial,
    Variant,
    Verdict,
)
from flashgen.render import render
from flashgen.search import Finalist, TuneResult
from flashgen.side_by_side import SideBySide
from flashgen.space import load_space
from flashgen.table import Change
from flashgen.timing import Ratio
from flashgen.trials import FinalRound, SearchBegan, TrialEnded

AMPERE_SEED = "block_q=64,block_kv=64,num_warps=4,num_stages=1,q_in_registers=0,ctas_per_sm=1,rescale_threshold=8,tile_order=1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "home"
    monkeypatch.setenv("FLASHGEN_HOME", str(place))
    return place


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_present", lambda: False)


Captured = pytest.CaptureFixture[str]


def refused(arguments: str, capsys: Captured) -> str:
    """Run a command that must be refused; its error text."""
    code = cli.run(arguments.split())
    captured = capsys.readouterr()
    assert code == cli.REFUSED, captured.err
    assert captured.out == ""
    return " ".join(captured.err.replace("│", " ").split())


def answered(arguments: str, capsys: Captured, code: int = 0) -> str:
    """Run a command; its stdout."""
    assert cli.run(arguments.split()) == code
    return capsys.readouterr().out


def problems(*arguments: str) -> tuple[Problem, ...]:
    """The problems that options ask for."""
    from flashgen.cli.tune import tune

    with tune.make_context("tune", list(arguments)) as context:
        return options.request_of(dict(context.params)).problems()


# Requests ---------------------------------------------------------------------------------------------------------------


def test_a_head_dim_alone_asks_for_full_and_causal_bfloat16_of_4096_rows() -> None:
    full, causal = problems("--head-dim", "128")
    assert full == Problem(DType.BFLOAT16, 128, 128, 4, 16, 16, 4096, 4096, Mask())
    assert causal == Problem(DType.BFLOAT16, 128, 128, 4, 16, 16, 4096, 4096, Mask.causal())


def test_a_list_of_lengths_gives_one_problem_per_length_and_mask() -> None:
    found = problems("--head-dim", "64", "--seqlen", "512,1024", "--seqlen-kv", "2048", "--causal")
    assert [(each.seqlen_q, each.seqlen_kv) for each in found] == [(512, 2048), (1024, 2048)]


def test_a_window_replaces_both_masks() -> None:
    (only,) = problems("--head-dim", "64", "--window", "127,0", "--kv-heads", "4", "--dtype", "fp16", "--head-dim-v", "32")
    assert only.mask == Mask.window(127, 0)
    assert (only.heads_kv, only.dtype, only.head_dim_v) == (4, DType.FLOAT16, 32)


def test_a_window_may_begin_with_a_minus_sign() -> None:
    assert problems("--head-dim", "64", "--window", "-1,-1")[0].mask == Mask.window(-1, -1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("tune", "--head-dim is needed"),
        ("tune --head-dim 0 --gpu h200", "head_dim must be at least 1; got 0"),
        ("tune --head-dim 100 --gpu h200", "multiple of 8"),
        ("tune --head-dim 1024 --gpu h200", "1024"),
        ("tune --head-dim 128 --heads 16 --kv-heads 3", "got 16 query heads and 3 KV heads"),
        ("tune --head-dim 128 --gpu h9000", "no preset for the GPU 'h9000'"),
        ("tune --head-dim 128 --causal --window 5,0", "exclude each other"),
        ("tune --head-dim 128 --window 5", "takes two bounds"),
        ("tune --head-dim 128 --window -3,0", "-1 for unlimited"),
        ("tune --head-dim 128 --seqlen 1k", "no list of integers"),
        ("tune --head-dim 128 --seqlen 0 --gpu h200", "at least 1 to tune"),
        ("tune --head-dim 128 --dtype int8", "not one of float32"),
        ("tune --head-dim 128 --budget 0", "--budget must be more than 0; got 0"),
        ("tune --head-dim 128 --family hopper_backward --gpu h200", "no family hopper_backward"),
        ("tune --head-dim 128 --family ampere_forward --gpu t4", "needs sm_80 or newer"),
        ("tune --head-dim 128 --no-such-option", "--no-such-option"),
        ("certify --head-dim 128 --params block_q=64", "belongs to one family"),
        ("certify --head-dim 128 --family ampere_forward --params block_q=65", "ampere_forward"),
        ("certify --head-dim 64 --policy sometimes", "such as greedy-early:1"),
        ("show source --head-dim 64 --seqlen 1,2", "takes one --seqlen"),
        ("show source --head-dim 64 --family nothing", "no search space for the family 'nothing'"),
        ("show cache --max-size 5M", "add --prune"),
        ("show cache --prune --older-than yesterday", "such as 12h, 30d, 2w"),
        ("bench --against sdpa-fast", "names peers among sdpa-flash"),
        ("bench --rounds 2", "at least 6"),
        ("bench --head-dim 64", "`flashgen doctor` says why"),
        ("unknown", "No such command"),
    ],
    ids=lambda value: value if " " not in value or value.startswith(("tune", "show", "certify", "bench")) else "",
)  # fmt: skip
@pytest.mark.usefixtures("no_gpu")
def test_a_bad_request_names_the_rule_and_writes_nothing(arguments: str, told: str, home: Path, capsys: Captured) -> None:
    assert told in refused(arguments, capsys)
    assert not home.exists()


def test_one_bad_problem_among_several_stops_all_of_them(home: Path, capsys: Captured) -> None:
    told = refused("tune --head-dim 128 --head-dim-v 1000 --seqlen 128,256 --gpu h200 --executor emulated", capsys)
    assert "head_dim_v" in told
    assert not home.exists()


def test_parameters_are_numbers_by_name_each_once() -> None:
    assert options.parse_params("block_q=64, q_in_registers=true") == {"block_q": 64, "q_in_registers": 1}
    for wrong in ("block_q", "block_q=x", "block_q=1,block_q=2", "=3"):
        with pytest.raises(InfeasibleVariant, match="NAME=NUMBER"):
            options.parse_params(wrong)


def test_every_policy_of_a_certificate_is_read_back_from_its_name() -> None:
    from flashgen.emulate import FAST, POLICIES

    for policy in (*POLICIES, FAST):
        assert options.parse_policy(str(policy)) == policy


@pytest.mark.parametrize(("text", "value"), [("500M", 500 * 2**20), ("2G", 2**31), ("1.5k", 1536), ("2GiB", 2**31)])
def test_sizes_have_binary_units(text: str, value: float) -> None:
    assert show._amount(text, "--max-size", show._SIZE_BYTES, "") == value


# Places -----------------------------------------------------------------------------------------------------------------


def in_process(arguments: str, before: str = "", limit: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in its own process, after some Python; `limit` is the largest file that it may write."""
    code = f"import sys\n{before}\nfrom flashgen.cli import main\nmain({arguments.split()!r})"
    limited = None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    surroundings = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=surroundings, preexec_fn=limited, check=False, timeout=120
    )


def test_e05_a_home_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = in_process("tune --head-dim 64 --gpu h200 --executor emulated", FLASHGEN_HOME=str(tmp_path / "file" / "home"))
    assert done.returncode == cli.REFUSED, done.stderr
    assert "cannot be written" in done.stderr
    assert "FLASHGEN_HOME" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.compiled
def test_e05_a_full_disk_is_refused_before_the_search_and_leaves_nothing(tmp_path: Path) -> None:
    done = in_process("tune --head-dim 64 --gpu h200 --executor emulated", limit=1024, FLASHGEN_HOME=str(tmp_path / "home"))
    assert done.returncode == cli.REFUSED, done.stderr
    assert "cannot be written (File too large" in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_output_that_finds_no_space_is_an_error_in_words() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "flashgen", "show", "source", "--head-dim", "64", "--gpu", "h200"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert done.returncode == cli.REFUSED
    assert "No space is left" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_that_lacks_a_character_shows_a_question_mark(encoding: str, tmp_path: Path) -> None:
    done = in_process("show cache", FLASHGEN_HOME=str(tmp_path / "█"), PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    command = f"{shlex.quote(sys.executable)} -m flashgen show space --gpu h200 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["tune", "certify", "bench"])
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_outside_32_bits_are_refused(command: str, seed: int, home: Path, capsys: Captured) -> None:
    assert "4294967295" in refused(f"{command} --head-dim 64 --gpu h200 --seed {seed}", capsys)
    assert not home.exists()


def test_a_table_of_a_newer_schema_is_refused(tmp_path: Path, capsys: Captured) -> None:
    table = tmp_path / "table.yaml"
    table.write_text("schema: flashgen.table/9\n")
    told = refused(f"tune --head-dim 64 --gpu h200 --executor emulated --table {table}", capsys)
    assert "flashgen.table/9" in told
    assert table.read_text() == "schema: flashgen.table/9\n"


def test_hostile_yaml_in_a_table_is_refused(tmp_path: Path, capsys: Captured) -> None:
    table = tmp_path / "table.yaml"
    table.write_text("!!python/object/apply:os.system ['touch /tmp/never']\n")
    assert str(table) in refused(f"show entry --head-dim 64 --gpu h200 --table {table}", capsys)


@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": ""}], ids=["as it is", "no visible device"])
def test_e01_sources_spaces_and_tables_need_no_gpu(variables: dict[str, str], tmp_path: Path) -> None:
    for command in ("show source --head-dim 64 --gpu h200", "show space", "show cache", "--version"):
        done = in_process(command, FLASHGEN_HOME=str(tmp_path), **variables)
        assert done.returncode == 0, done.stderr


HIDDEN = "for name in ('cupy', 'torch', 'optuna', 'pynvml'): sys.modules[name] = None"


def test_e01_without_cupy_everything_but_compiling_works(tmp_path: Path) -> None:
    for command in ("show source --head-dim 64", "show space ampere_forward --head-dim 64", "show cache", "show --help"):
        done = in_process(command, before=HIDDEN, FLASHGEN_HOME=str(tmp_path))
        assert done.returncode == 0, done.stderr
    done = in_process("tune --head-dim 64", before=HIDDEN, FLASHGEN_HOME=str(tmp_path))
    assert done.returncode == cli.REFUSED
    assert 'pip install "flashgen[cuda13]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_e02_two_cupy_wheels_are_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    for name in ("cupy_cuda12x", "cupy_cuda13x"):
        folder = tmp_path / "site" / f"{name}-14.2.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 14.2.0\n")
    before = f"sys.path.insert(0, {str(tmp_path / 'site')!r})"
    done = in_process("tune --head-dim 64 --gpu h200 --executor emulated", before=before, FLASHGEN_HOME=str(tmp_path / "home"))
    assert done.returncode == cli.REFUSED, done.stderr
    assert "pip uninstall -y cupy-cuda13x cupy-cuda12x" in done.stderr
    assert not (tmp_path / "home").exists()


def test_without_a_host_compiler_the_search_does_not_begin(tmp_path: Path) -> None:
    arguments = "tune --head-dim 64 --gpu h200 --executor emulated"
    done = in_process(arguments, FLASHGEN_HOME=str(tmp_path / "home"), PATH=str(tmp_path))
    assert done.returncode == cli.REFUSED, done.stderr
    assert "apt-get install g++" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("family", ["ampere_forward", "simt_forward", "standard_forward"])
def test_e07_a_source_includes_no_header_outside_the_emulator(family: str) -> None:
    space = load_space(family)
    problem = Problem(DType.FLOAT16, 64, 64, 1, 1, 1, 128, 128)
    variant = space.bind(problem, device.PRESETS["h200"]).fallback()
    included = re.findall(r"^\s*#\s*include\s*(.*)$", render(space, problem.klass(), variant).text, re.MULTILINE)
    assert all(name.startswith('"emu/') for name in included), included


# Output -----------------------------------------------------------------------------------------------------------------


def test_help_comes_at_once() -> None:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "flashgen", "--help"], capture_output=True, check=True)
        times.append(time.perf_counter() - started)
    bare = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import click"], check=True)
    assert min(times) < max(0.3, 2.5 * (time.perf_counter() - bare))


def test_help_lists_every_command_and_the_exit_codes(capsys: Captured) -> None:
    text = answered("--help", capsys)
    for name in (*cli.COMMANDS, "130"):
        assert name in text
    for name in cli.COMMANDS:
        assert answered(f"{name} --help", capsys)


def test_show_source_prints_what_is_compiled_and_nothing_else(home: Path, capsys: Captured) -> None:
    text = answered(f"show source --head-dim 64 --causal --gpu h200 --family ampere_forward --params {AMPERE_SEED}", capsys)
    problem = Problem(DType.BFLOAT16, 64, 64, 4, 16, 16, 4096, 4096, Mask.causal())
    space = load_space("ampere_forward")
    variant = space.bind(problem, device.PRESETS["h200"]).variant(options.parse_params(AMPERE_SEED))
    assert text == render(space, problem.klass(), variant).text
    assert not home.exists()


def test_show_space_explains_an_infeasible_point_with_both_sides(home: Path, capsys: Captured) -> None:
    params = AMPERE_SEED.replace("block_q=64", "block_q=256")
    text = answered(f"show space ampere_forward --head-dim 128 --gpu h200 --params {params}", capsys, code=1)
    assert "few_rows" in text
    assert "64 > 32" in text
    document = json.loads(answered(f"show space ampere_forward --head-dim 128 --gpu h200 --params {params} --json", capsys, code=1))
    assert document["violations"]["few_rows"] == 1.0
    assert document["predicted_us"] is None


def test_show_entry_without_a_table_says_so_and_fails(home: Path, capsys: Captured) -> None:
    document = json.loads(answered("show entry --head-dim 72 --gpu t4 --causal --json", capsys, code=1))
    assert document["answers"][0]["entry"] is None
    assert document["answers"][0]["steps"]


def test_show_cache_prunes_what_is_too_much(home: Path, capsys: Captured) -> None:
    store = home / "cubins"
    store.mkdir(parents=True)
    for name in ("a", "b"):
        (store / f"{name}.cubin").write_bytes(b"0" * 2048)
        (store / f"{name}.json").write_bytes(b"{}")
    assert json.loads(answered("show cache --json", capsys))["cubins"] == 2
    assert json.loads(answered("show cache --prune --max-size 3K --json", capsys))["deleted"] == 1
    assert len(list(store.glob("*.cubin"))) == 1


def progress_text(terminal: bool, events: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    progress = TuneProgress(console)
    problem = Problem(DType.BFLOAT16, 64, 64, 1, 1, 1, 128, 128)
    with progress.running(1, 1, problem):
        progress(SearchBegan(problem, device.PRESETS["h200"], ExecutorName.EMULATED, {"ampere_forward": 5}, events, 0, None))
        for number in range(1, events + 1):
            trial = Trial(Variant.of("ampere_forward", {"block_q": 64}), Outcome.OK, "", Measurement(9.0, 9.0, 9.0, 0, 1.0, "predicted"))
            progress(TrialEnded(number, events, trial, trial, False, 0.1, None))
        progress(FinalRound((trial.variant,)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_piped_progress_has_few_lines_and_no_control_characters() -> None:
    text = progress_text(terminal=False, events=50)
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 3
    assert "50/50 trials: 50 ok; best predicted 9.00 µs" in text


def test_progress_on_a_terminal_is_wiped_when_the_search_ends() -> None:
    text = progress_text(terminal=True, events=5)
    assert "\x1b[2K" in text
    assert "5/5 trials" in text


@pytest.mark.compiled
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_tune_reports_what_it_has_and_writes_no_table(number: signal.Signals, tmp_path: Path) -> None:
    code = "from flashgen.cli import main; main('tune --head-dim 128 --gpu a100 --executor emulated --json'.split())"
    command, surroundings = [sys.executable, "-c", code], {**os.environ, "FLASHGEN_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings) as running:
        assert running.stderr is not None
        assert "feasible" in running.stderr.readline()
        time.sleep(1.5)  # into a compilation
        running.send_signal(number)
        out, err = running.communicate(timeout=60)
    assert running.returncode == cli.INTERRUPTED, err
    (result,) = json.loads(out)["results"]
    assert (result["partial"], result["written"], result["entry"]) == (True, False, None)
    assert not (tmp_path / "tables").exists()


# The main job without a GPU ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, object]]]:
    """`tune` with two trials, once for all tests below: its home and its document."""
    home = tmp_path_factory.mktemp("tuned home")
    arguments = "tune --head-dim 32 --seqlen 256 --causal --gpu a100 --executor emulated --budget 2 --family ampere_forward --json"
    done = in_process(arguments, FLASHGEN_HOME=str(home))
    assert done.returncode == 0, done.stderr
    yield home, json.loads(done.stdout)


@pytest.mark.compiled
@pytest.mark.emulated
def test_tune_without_a_gpu_writes_a_predicted_entry_with_an_emulated_certificate(tuned: tuple[Path, dict[str, object]]) -> None:
    home, document = tuned
    (result,) = document["results"]  # type: ignore[misc, str-unpack]
    assert (result["times"], result["executor"], result["partial"], result["written"]) == ("predicted", "emulated", False, True)
    assert result["entry"]["measurement"]["source"] == "predicted"
    assert result["entry"]["certificate"]["executor"] == "emulated"
    assert Path(result["table"]).parent == home / "tables"
    assert len(result["trials"]) == 2


@pytest.mark.compiled
@pytest.mark.emulated
def test_the_tuned_entry_is_what_show_source_shows(
    tuned: tuple[Path, dict[str, object]], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    home, document = tuned
    monkeypatch.setenv("FLASHGEN_HOME", str(home))
    source = json.loads(answered("show source --head-dim 32 --seqlen 256 --causal --gpu a100 --json", capsys))
    entry = document["results"][0]["entry"]  # type: ignore[index]
    assert source["digest"] == entry["source"]["digest"]
    assert source["origin"].startswith("entry of ")
    text = answered("show entry --head-dim 32 --seqlen 256 --causal --gpu a100", capsys)
    assert "predicted, not measured" in text
    assert "\x1b" not in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.compiled
@pytest.mark.emulated
def test_a_second_tune_goes_on_from_the_first_and_marks_everything_predicted(tuned: tuple[Path, dict[str, object]]) -> None:
    home, _ = tuned
    arguments = "tune --head-dim 32 --seqlen 256 --causal --gpu a100 --executor emulated --budget 2 --family ampere_forward"
    done = in_process(arguments, FLASHGEN_HOME=str(home))
    assert done.returncode == 0, done.stderr
    assert "2 trials known from before" in done.stderr
    assert "predicted by the cost model, not measured" in done.stdout
    assert "median" not in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.emulated
def test_certify_runs_one_case_and_a_whole_suite(home: Path, capsys: Captured) -> None:
    kernel = f"certify --family ampere_forward --params {AMPERE_SEED} --head-dim 32 --causal --gpu h200 --executor emulated --json"
    case = json.loads(answered(f"{kernel} --case averaging-0 --policy greedy-early:1", capsys))
    assert case["results"][0]["case"]["failure"] == ""
    assert "has no case" in refused(f"{kernel} --case nonsense-9", capsys)


@pytest.mark.emulated
def test_certify_against_another_kernel_counts_every_element_once(home: Path, capsys: Captured) -> None:
    kernel = f"certify --family ampere_forward --params {AMPERE_SEED} --head-dim 16 --no-causal --gpu h200 --executor emulated --json"
    document = json.loads(answered(f"{kernel} --against simt_forward", capsys))
    ulp = document["results"][0]["ulp"]
    assert ulp["repeats"] == [True, True]
    assert sum(count for _, _, count in ulp["buckets"]) > 10_000


@pytest.mark.compiled
def test_compile_only_fills_the_store_and_writes_no_table(home: Path, capsys: Captured) -> None:
    document = json.loads(answered("tune --head-dim 32 --causal --gpu a100 --compile-only --budget 2 --json", capsys))
    assert document["compiled"] + document["failed"] == 2
    assert len(list((home / "cubins").glob("*.cubin"))) == document["kernels"] > 0
    assert not (home / "tables").exists()


@pytest.mark.compiled
def test_e03_the_store_holds_device_code_of_the_real_architecture_and_no_ptx(home: Path, capsys: Captured) -> None:
    answered("tune --head-dim 32 --causal --gpu a100 --compile-only --budget 1 --json", capsys)
    for path in (home / "cubins").glob("*.cubin"):
        assert path.read_bytes()[:4] == b"\x7fELF"
        assert json.loads(path.with_suffix(".json").read_text())["architecture"] == "sm_80"


# With a GPU, played ------------------------------------------------------------------------------------------------------

CAUSAL = Problem(DType.BFLOAT16, 128, 128, 4, 16, 16, 4096, 4096, Mask.causal())
WINNER = Variant.of("ampere_forward", options.parse_params(AMPERE_SEED))


def measured(us: float) -> Measurement:
    return Measurement(us, us * 0.99, us * 1.01, 50, 275e3 / us, clock_mhz=(1965, 1950), throttle=("power_cap",))


def found_on_device(path: Path) -> TuneResult:
    """What a search on a GPU returns: a winner, the fallback behind it, one variant that broke."""
    second = Variant.of("simt_forward", {"block_q": 64})
    exact = Certificate(Verdict.EXACT, "attention-forward/1", "ab" * 32, ExecutorName.DEVICE, 64, 21, 0.5, "ragged-1", 1e-7)
    origin = Provenance("2026-01-01T00:00:00Z", "0.1.0", "tpe", 0, 3, 2, "cd" * 32, "13.0", "580.65", "14.2.0", "NVIDIA H200")
    entry = TableEntry(CAUSAL, WINNER, "ef" * 32, "sha256:" + "01" * 32, (), measured(800.0), exact, origin)
    report = CompileReport("sha256:" + "01" * 32, 168, 0, 0, 0, (), 0.3, "13.0", ())
    trials = (
        Trial(WINNER, Outcome.OK, "", measured(801.0), report),
        Trial(second, Outcome.OK, "", measured(1200.0), report),
        Trial(Variant.of("simt_forward", {"block_q": 128}), Outcome.TIMED_OUT, "no answer"),
    )
    finalists = (Finalist(WINNER, "challenger", exact, measured(800.0)), Finalist(second, "fallback", exact, measured(1190.0)))
    h200 = device.PRESETS["h200"]
    change = Change(path, None, entry, True)
    return TuneResult(CAUSAL, h200, ExecutorName.DEVICE, entry, change, trials, finalists, trials[0], False, 42.0, None)


def side_by_side_of(problem: Problem, *_: object) -> SideBySide:
    names = (str(WINNER), "sdpa-flash")
    times = {names[0]: measured(800.0), "sdpa-flash": measured(880.0)}
    return SideBySide(problem, names[:1], times, {"sdpa-flash": Ratio(1.1, 1.08, 1.12, 20)}, {"fa3": "it is not installed"})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A machine whose GPU is an H200, with a search and a comparison that answer at once."""
    monkeypatch.setattr(device, "is_present", lambda: True)
    monkeypatch.setattr(device, "present", lambda: device.PRESETS["h200"])
    monkeypatch.setattr(compiler, "binding", lambda: None)
    monkeypatch.setattr(search, "tune", lambda *_, **__: found_on_device(home / "tables" / "nvidia-h200.yaml"))
    monkeypatch.setattr(side_by_side, "compare", side_by_side_of)
    busy = BusyDeviceWarning("Times will be too long: the GPU is 80 % busy with other work.")
    monkeypatch.setattr(bench, "warn_when_busy", lambda: warnings.warn(busy, stacklevel=2))


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_tune_shows_measured_times_the_ratio_to_sdpa_and_warns_when_busy(capsys: Captured) -> None:
    assert cli.run(["tune", "--head-dim", "128", "--causal"]) == cli.DONE
    captured = capsys.readouterr()
    words = " ".join(captured.out.split())
    assert "NVIDIA H200 (sm_90): measured" in words
    assert "predicted" not in captured.out
    assert "1.100× as fast, 95 % within [1.080, 1.120]" in words
    assert "2 ok · 1 timed out" in words
    assert "exact, fallback" in words
    assert captured.err.count("80 % busy") == 1
    assert all(len(line) <= 100 for line in captured.out.splitlines())


@pytest.mark.usefixtures("gpu")
def test_another_gpu_than_the_present_one_is_predicted_for_and_said_so() -> None:
    target = options.target_of("a100", "auto")
    assert target.predicted
    assert "The GPU here is NVIDIA H200, not NVIDIA A100-SXM4-80GB" in target.note
    assert not options.target_of("h200", "auto").predicted
    assert options.target_of("auto", "emulated").predicted


@pytest.mark.usefixtures("gpu", "nothing_shipped")
def test_bench_times_the_measured_entries_of_the_device_with_geomeans(home: Path, capsys: Captured) -> None:
    entry = found_on_device(home / "t.yaml").entry
    assert entry is not None
    table.merge(home / "tables" / "nvidia-h200.yaml", device.PRESETS["h200"], entry)
    text = answered("bench --against sdpa-flash,fa3", capsys)
    assert "1.100× [1.080, 1.120]" in text
    assert "fa3: it is not installed" in text
    assert "geomean 1.100×, least 1.100×, 1 of 1 problems" in " ".join(text.split())
    assert "power_cap" in text
    document = json.loads(answered("bench --json", capsys))
    assert document["geomeans"]["sdpa-flash"]["mean"] == pytest.approx(1.1)


@pytest.mark.usefixtures("gpu")
def test_bench_fails_where_no_entry_serves(capsys: Captured) -> None:
    assert cli.run(["bench", "--head-dim", "40", "--causal"]) == cli.FAILED
    assert "no table entry serves it" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu", "nothing_shipped")
def test_predicted_entries_are_not_benchmarked(home: Path, capsys: Captured) -> None:
    entry = found_on_device(home / "t.yaml").entry
    assert entry is not None
    guess = replace(entry, measurement=Measurement(800.0, 800.0, 800.0, 0, 300.0, "predicted"))
    table.merge(home / "tables" / "nvidia-h200.yaml", device.PRESETS["h200"], guess)
    assert "No table holds a measured entry" in refused("bench", capsys)
