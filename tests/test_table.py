"""Tuned tables: format, refusals with line numbers, merge, concurrent writers, look-up rule."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import table, yaml_io
from flashgen.errors import InvalidTable, NotWritable
from flashgen.model import (
    Alignment,
    Certificate,
    DeviceLimits,
    DType,
    ExecutorName,
    Mask,
    Measurement,
    Problem,
    Provenance,
    TableEntry,
    Variant,
    Verdict,
)
from flashgen.table_schema import device_record
from flashgen.yaml_io import Flow, dump, load_strict

DEVICE = DeviceLimits(
    "NVIDIA H200", 90, 132, 232448, 233472, 65536, 2048, 32, 60 * 2**20, 4800.0, 990.0, 67.0, 1980, source="test"
)  # fmt: skip
PARAMS = {"block_q": 128, "block_kv": 64, "q_in_registers": True}


def problem(seqlen: int = 4096, **changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "dtype": DType.BFLOAT16, "head_dim": 128, "head_dim_v": 128, "batch": 4, "heads_q": 16, "heads_kv": 4,
        "seqlen_q": seqlen, "seqlen_kv": seqlen, "mask": Mask.causal(),
    }  # fmt: skip
    return Problem(**(fields | changes))


def entry(of: Problem | None = None, *, source: str = "measured", median: float = 412.625, **params: int) -> TableEntry:
    executor = ExecutorName.DEVICE if source == "measured" else ExecutorName.EMULATED
    return TableEntry(
        problem=of or problem(),
        variant=Variant.of("ampere_forward", PARAMS | params),
        source_digest="sha256:" + "3f" * 32,
        cubin_digest="sha256:" + "9b" * 32,
        options=("--gpu-architecture=sm_90a", "--std=c++17"),
        measurement=Measurement(median, median - 1, median + 2, 200, 333.25, source, (1965, 1980), ("power cap",)),
        certificate=Certificate(Verdict.EXACT, "attention-forward/1", "sha256:" + "a9" * 32, executor, 64, 24, 1.18, "ragged", 3.1e-06),
        provenance=Provenance("2026-08-24T10:15:00Z", "0.1.0", "tpe", 1, 143, 60, "77" * 32, "13.0", "580.65", "14.2.0", "NVIDIA H200"),
        runner_up=(Variant.of("simt_forward", PARAMS), median + 10),
    )


def written(path: Path, *entries: TableEntry) -> str:
    for each in entries:
        table.merge(path, DEVICE, each)
    return path.read_text()


def sealed(text: str) -> str:
    """The text with a digest that fits its (edited) entries, so that only the edit can be refused."""
    entries = yaml_io.load_strict(text, "edited", error=InvalidTable)["entries"]
    return re.sub(r"entries: \d+\n  digest: .*", f'entries: {len(entries)}\n  digest: "{table.entries_digest(entries)}"', text, count=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nvidia-h200.yaml"


# ---------------------------------------------------------------------------------------------------------------- format


def test_an_entry_survives_writing_and_reading(path: Path) -> None:
    window = entry(problem(mask=Mask.window(127, 0, Alignment.TOP_LEFT), dtype=DType.FLOAT16, seqlen_q=1, batch=3))
    wide = replace(entry(problem(77)), measurement=replace(entry().measurement, wide_scores_us=450.125))
    written(path, entry(), window, wide)
    assert set(table.read(path, strict=True).entries) == {entry(), window, wide}


def test_a_table_is_the_same_text_whatever_the_order_of_merges(tmp_path: Path) -> None:
    entries = [entry(problem(length)) for length in (512, 1024, 16384, 200)]
    texts = {
        written(tmp_path / f"{number}.yaml", *order) for number, order in enumerate((entries, entries[::-1], entries[2:] + entries[:2]))
    }
    assert len(texts) == 1
    assert re.findall(r"seqlen_q: (\d+)", texts.pop()) == ["200", "512", "1024", "16384"]


def test_booleans_and_integers_keep_their_types_in_the_file(path: Path) -> None:
    assert "params: {block_q: 128, block_kv: 64, q_in_registers: true}" in written(path, entry())


def test_a_time_is_marked_as_measured_or_predicted(path: Path) -> None:
    text = written(path, entry(), entry(problem(512), source="predicted"))
    assert text.count("source: measured") == text.count("source: predicted") == 1


def test_an_inexact_variant_cannot_be_written(path: Path) -> None:
    inexact = replace(entry(), certificate=replace(entry().certificate, verdict=Verdict.INEXACT, failure="selection: key 3"))
    with pytest.raises(InvalidTable, match="Only exact variants"):
        table.merge(path, DEVICE, inexact)
    assert not path.exists()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, min_size=1, max_size=3).map(Flow),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_what_is_dumped_is_read_back_exactly(document: dict[str, Any]) -> None:
    assert load_strict(dump(document), "dumped") == document


@pytest.mark.parametrize(
    "word", ["no", "NO", "y", "null", "~", "017", "1_000", "1:30", "1e3", "2024-01-01", ".inf", "=", "<<", "- x", "a: b", ""]
)
def test_text_that_other_readers_would_convert_stays_text(word: str) -> None:
    text = dump({"field": word})
    assert load_strict(text, "mine") == yaml.safe_load(text) == {"field": word}


# -------------------------------------------------------------------------------------------------- hostile and wrong text


@pytest.fixture(params=["libyaml", "pure Python"])
def each_loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both parsers of PyYAML (case Y03)."""
    chosen = getattr(yaml, "CSafeLoader", None) if request.param == "libyaml" else yaml.SafeLoader
    if chosen is None:
        pytest.skip("this PyYAML was built without libyaml")
    monkeypatch.setattr(yaml_io, "loader", lambda: chosen)
    return str(request.param)


@pytest.mark.usefixtures("each_loader")
@pytest.mark.parametrize(
    "value",
    ["!!python/object/apply:os.system ['touch {marker}']", "!!binary aGVsbG8=", "!own 1", "!!int 3", "&anchor 3", "*anchor", "! x"],
    ids=["object", "binary", "custom", "int", "anchor", "alias", "bare"],
)
def test_tags_and_anchors_are_refused_without_side_effect(path: Path, value: str) -> None:
    marker = path.parent / "marker"
    text = written(path, entry()).replace("block_q: 128", "block_q: " + value.format(marker=marker))
    path.write_text(text)
    with pytest.raises(InvalidTable, match=rf"{re.escape(str(path))}:\d+: (tag|anchor|alias)|not readable as YAML"):
        table.read(path, strict=True)
    with pytest.raises(InvalidTable):
        table.read(path, strict=False)
    assert not marker.exists()


HOSTILE = [
    "'64; asm(\"trap;\")'", "'{{ 7*7 }}'", "64; asm", "017", "1_000", "128.0", "'128'", "-64", "9" * 30, "9" * 5000, ".inf", ".nan", "null",
    "2024-01-01", "1:30", "NO", "1e3", "[64]", "{a: 1}", "65537",
]  # fmt: skip


@pytest.mark.usefixtures("each_loader")
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: value[:20])
def test_a_parameter_can_only_be_a_small_integer_or_a_boolean(path: Path, value: str) -> None:
    text = written(path, entry()).replace("block_q: 128", f"block_q: {value}")
    path.write_text(text if len(value) >= 30 else sealed(text))
    with pytest.raises(InvalidTable) as caught:
        table.read(path, strict=True)
    message = str(caught.value)
    assert re.match(rf"{re.escape(str(path))}:\d+: ", message), message
    assert len(value) >= 30 or "block_q" in message or "params" in message, message


@pytest.mark.parametrize(("wrong", "said"), [("true", "choices 64, 128"), ("0", "choices 64, 128"), ("96", "choices 64, 128")])
def test_a_value_outside_the_choices_of_its_space_is_refused(path: Path, wrong: str, said: str) -> None:
    def check(candidate: TableEntry) -> str | None:
        value = candidate.variant.as_dict()["block_q"]
        return None if value in (64, 128) and not isinstance(value, bool) else f"block_q = {value}; choices 64, 128"

    path.write_text(sealed(written(path, entry()).replace("block_q: 128", f"block_q: {wrong}")))
    with pytest.raises(InvalidTable, match=said):
        table.read(path, strict=True, check=check)


FIELDS = [
    ("seqlen_q: 4096", "seqlen_q: '4096'", "shape.seqlen_q"),
    ("seqlen_q: 4096", "seqlen_q: 0", "shape.seqlen_q"),
    ("head_dim: 128", "head_dim: true", "key.head_dim"),
    ("dtype: bfloat16", "dtype: float8", "key.dtype"),
    ("deterministic: false", "deterministic: NO", "key.deterministic"),
    ("family: ampere_forward", "family: ../../etc", "variant.family"),
    ("median_us: 412.625", "median_us: .inf", "measurement.median_us"),
    ("median_us: 412.625", "median_us: 0", "measurement.median_us"),
    ("verdict: exact", "verdict: inexact", "certificate.verdict"),
    ("verdict: exact", "verdict: true", "certificate.verdict"),
    ("batch: 4", "batch: 5", "batch_heads"),
    ("mask: causal", "mask: window", "window"),
    ("    shape:", "    surprise: 1\n    shape:", "surprise"),
    ("      gqa_group: 4\n", "", "gqa_group"),
    ('nvrtc: "13.0"', "nvrtc: 13.0", "provenance.nvrtc"),
    ('"--std=c++17"', '"--std=c++17 -I/evil"', "source.options"),
    ("--std=c++17", "plain", "source.options"),
]


@pytest.mark.parametrize(("right", "wrong", "named"), FIELDS, ids=lambda value: str(value).strip()[:28])
def test_a_wrong_field_is_refused_by_file_line_and_name(path: Path, right: str, wrong: str, named: str) -> None:
    text = written(path, entry())
    if right not in text:
        right = right.strip('"')
        wrong = f'"{wrong.strip(chr(34))}"' if " " in wrong else wrong
    assert right in text, text
    path.write_text(sealed(text.replace(right, wrong, 1)))
    with pytest.raises(InvalidTable, match=re.escape(named)) as caught:
        table.read(path, strict=True)
    assert re.match(rf"{re.escape(str(path))}:\d+: entry", str(caught.value))


def test_a_key_given_twice_is_refused_with_both_lines(path: Path) -> None:
    text = written(path, entry()).replace("      head_dim: 128\n", "      head_dim: 128\n      head_dim: 64\n")
    path.write_text(text)
    line = text.splitlines().index("      head_dim: 64") + 1
    with pytest.raises(InvalidTable, match=f"{re.escape(str(path))}:{line}: key 'head_dim' again .first on line {line - 1}"):
        table.read(path, strict=True)


def test_an_entry_given_twice_is_refused_with_both_lines(path: Path) -> None:
    text = written(path, entry())
    body = text[text.index("  - key:") :]
    path.write_text(sealed(text + body.replace("block_q: 128", "block_q: 64")))
    second = len(text.splitlines()) + 1
    first = text.splitlines().index("  - key:") + 1
    with pytest.raises(InvalidTable, match=rf"{re.escape(str(path))}:{second}: entry for .* again .first on line {first}"):
        table.read(path, strict=True)


@pytest.mark.parametrize("deep", ["[", "{a: ", "- "], ids=["lists", "maps", "blocks"])
@pytest.mark.usefixtures("each_loader")
def test_deep_nesting_is_refused_and_exhausts_nothing(path: Path, deep: str) -> None:
    path.write_text(deep * 50_000)
    with pytest.raises(InvalidTable):
        table.read(path, strict=True)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[]", b"3", b"schema: flashgen.table/1", b"a: b: c", b"\x00"], ids=repr)
def test_a_file_that_is_no_table_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidTable, match=re.escape(str(path))):
        table.read(path, strict=False)


@pytest.mark.parametrize("schema", ["schema: flashgen.table/2\n", "", "schema: 1\n"], ids=["newer", "missing", "number"])
def test_another_schema_refuses_the_whole_file_with_one_warning(path: Path, schema: str) -> None:
    path.write_text(written(path, entry()).replace("schema: flashgen.table/1\n", schema))
    with pytest.raises(InvalidTable, match=r"this version reads 'flashgen\.table/1' only"):
        table.read(path, strict=True)
    with pytest.warns(UserWarning, match="ignored") as caught:
        assert table.load_all([path.parent]) == ()
    assert len(caught) == 1


def test_one_bad_entry_among_a_hundred_is_skipped_with_its_line(path: Path) -> None:
    text = table.render_table(device_record(DEVICE), [entry(problem(length)) for length in range(1, 102)])
    text = sealed(text.replace("seqlen_q: 50\n", "seqlen_q: fifty\n"))
    path.write_text(text)
    line = text[: text.index("fifty")].count("\n") + 1
    with pytest.warns(UserWarning, match="1 fault") as caught:
        (read,) = table.load_all([path.parent])
    assert len(caught) == 1
    assert len(read.entries) == 100
    (skipped,) = read.skipped
    assert "shape.seqlen_q" in skipped
    found = int(skipped.split(":")[1])
    assert line - 10 < found < line, "the line of the entry, a few above the field"
    with pytest.raises(InvalidTable, match=r"shape\.seqlen_q"):
        table.read(path, strict=True)


def test_a_flipped_digit_or_a_cut_is_noticed(path: Path) -> None:
    text = written(path, entry(), entry(problem(512)))
    flipped = text.replace("block_kv: 64", "block_kv: 96", 1)
    cut = text[: text.rindex("  - key:")]
    for changed in (flipped, cut):
        path.write_text(changed)
        with pytest.raises(InvalidTable, match="cut or edited"):
            table.read(path, strict=True)


def test_reseal_accepts_an_edit_by_hand_and_nothing_else(path: Path) -> None:
    text = written(path, entry())
    path.write_text(text.replace("block_kv: 64", "block_kv: 96", 1))
    table.reseal(path)
    assert table.read(path, strict=True).entries[0].variant.as_dict()["block_kv"] == 96
    broken = text.replace("block_kv: 64", "block_kv: asm", 1)
    path.write_text(broken)
    with pytest.raises(InvalidTable):
        table.reseal(path)
    assert path.read_text() == broken


# ----------------------------------------------------------------------------------------------------------------- merge


def test_a_measured_entry_is_never_replaced_by_a_predicted_one(path: Path) -> None:
    before = written(path, entry(median=500.0))
    change = table.merge(path, DEVICE, entry(source="predicted", median=100.0))
    assert not change.written
    assert path.read_text() == before
    assert "never replaced" in change.describe()


def test_a_predicted_entry_gives_way_to_a_measured_one_and_the_others_stay(path: Path) -> None:
    written(path, entry(source="predicted", median=100.0), entry(problem(512)))
    change = table.merge(path, DEVICE, entry(median=500.0, block_q=64))
    assert change.written
    assert set(table.read(path, strict=True).entries) == {entry(median=500.0, block_q=64), entry(problem(512))}
    assert "block_q: 128 → 64" in change.describe()
    assert "100.0 µs" in change.describe()
    assert "predicted" in change.describe()


def test_a_merge_into_a_faulty_table_changes_nothing(path: Path) -> None:
    broken = written(path, entry()).replace("block_kv: 64", "block_kv: 96")
    path.write_text(broken)
    with pytest.raises(InvalidTable):
        table.merge(path, DEVICE, entry(problem(512)))
    assert path.read_text() == broken


def test_a_table_of_another_device_is_refused(path: Path) -> None:
    written(path, entry())
    with pytest.raises(InvalidTable, match="belongs to NVIDIA H200"):
        table.merge(path, replace(DEVICE, sm_count=114), entry())


def test_a_full_disk_leaves_the_old_table_and_no_rubbish(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written(path, entry())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritable, match="No space left"):
        table.merge(path, DEVICE, entry(problem(512)))
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir() if not file.name.endswith(".lock")] == [path.name]


@pytest.mark.skipif(os.name != "posix", reason="POSIX permissions")
def test_a_table_in_a_shared_directory_can_be_read_and_locked_by_others(path: Path) -> None:
    mask = os.umask(0)
    try:
        written(path, entry())
    finally:
        os.umask(mask)
    assert {oct(file.stat().st_mode & 0o666) for file in path.parent.iterdir()} == {oct(0o666)}


def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotWritable, match="--table"):
        table.merge(tmp_path / "file" / "t.yaml", DEVICE, entry())


# ---------------------------------------------------------------------------------------------------- concurrency, case T06

WRITER = """
import sys
from pathlib import Path
from tests.test_table import DEVICE, entry, problem
from flashgen import table
first, count = int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for number in range(first, first + count):
    table.merge(Path(sys.argv[1]), DEVICE, entry(problem(number)))
"""


def _start(path: Path, first: int, count: int) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(first), str(count)], cwd=root, env=environment, stdout=subprocess.PIPE, text=True
    )


def _read_until(path: Path, stop: Any, faults: Any, reads: Any) -> None:
    while not stop.is_set():
        if path.exists():
            try:
                table.read(path, strict=True)
                reads.value += 1
            except Exception as problem:
                faults.put(repr(problem))
                return


@pytest.mark.parametrize(("writers", "readers", "each", "rounds"), [(3, 1, 4, 1), pytest.param(8, 8, 12, 20, marks=pytest.mark.slow)])
def test_concurrent_writers_lose_nothing_and_a_killed_one_blocks_nobody(
    tmp_path: Path, writers: int, readers: int, each: int, rounds: int
) -> None:
    rng = random.Random(6)
    context = multiprocessing.get_context("spawn")
    for number in range(rounds):
        path = tmp_path / f"round{number}.yaml"
        stop, faults = context.Event(), context.Queue()
        counts = [context.Value("i", 0) for _ in range(readers)]
        watching = [context.Process(target=_read_until, args=(path, stop, faults, count), daemon=True) for count in counts]
        for reader in watching:
            reader.start()
        running = [_start(path, 1 + writer * each, each) for writer in range(writers)]
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        victim = running[0]
        time.sleep(rng.uniform(0, 0.05 * each))
        victim.send_signal(signal.SIGKILL)
        assert [process.wait(120) for process in running[1:]] == [0] * (writers - 1)
        victim.wait(10)
        while not all(count.value for count in counts) and faults.empty():
            time.sleep(0.01)
        stop.set()
        for reader in watching:
            reader.join(30)
        assert faults.empty(), faults.get()
        survivors = set(range(1 + each, 1 + writers * each))
        assert survivors <= {found.problem.seqlen_q for found in table.read(path, strict=True).entries}


HOLDER = """
import sys, time
from pathlib import Path
from flashgen import table
with table._locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_killed_holder_is_free_at_once(path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], cwd=root, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait(10)
    start = time.monotonic()
    table.merge(path, DEVICE, entry())
    assert time.monotonic() - start < 5


# --------------------------------------------------------------------------------------------------------------- look-up


def never(_: TableEntry) -> str | None:
    return None


def tables(tmp_path: Path, *entries: TableEntry, device: DeviceLimits = DEVICE, name: str = "a.yaml") -> tuple[table.Table, ...]:
    for each in entries:
        table.merge(tmp_path / name, device, each)
    return table.load_all([tmp_path])


HARD = [
    {"dtype": DType.FLOAT16},
    {"head_dim": 64},
    {"head_dim_v": 64},
    {"mask": Mask()},
    {"mask": Mask.window(64, 0)},
    {"deterministic": True},
]


@pytest.mark.parametrize("changed", HARD, ids=lambda changed: next(iter(changed)))
def test_one_changed_hard_field_is_a_miss(tmp_path: Path, changed: dict[str, Any]) -> None:
    found = table.lookup(problem(**changed), DEVICE, tables(tmp_path, entry()), never)
    assert found.found is None
    assert "0 with the key" in found.explain()


@pytest.mark.parametrize("alignment", Alignment)
def test_alignment_is_a_run_time_value_and_shares_the_entry(tmp_path: Path, alignment: Alignment) -> None:
    found = table.lookup(problem(mask=Mask.causal(alignment)), DEVICE, tables(tmp_path, entry()), never)
    assert found.found is not None


@pytest.mark.parametrize(
    ("asked", "served"), [(1, None), (3, None), (4, 16), (24, 16), (127, 128), (129, 128), (1500, 1024), (2897, 1024), (100_000, None)]
)
def test_the_nearest_tuned_length_serves_and_far_ones_do_not(tmp_path: Path, asked: int, served: int | None) -> None:
    known = tables(tmp_path, *(entry(problem(length)) for length in (16, 128, 1024, 8192)))
    found = table.lookup(problem(asked), DEVICE, known, never).found
    assert (found.entry.problem.seqlen_q if found else None) == (8192 if asked == 2897 else served)


def test_any_length_falls_into_one_of_a_few_buckets() -> None:
    rng = random.Random(20)
    assert len({table.shape_bucket(problem(rng.randint(1, 8192))) for _ in range(500)}) <= 14


def test_every_length_of_a_bucket_is_served_by_the_entry_tuned_for_the_bucket(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024)))
    same = [length for length in range(1, 4096) if table.shape_bucket(problem(length)) == table.shape_bucket(problem(1024))]
    assert (same[0], same[-1]) == (725, 1448)
    assert all(table.lookup(problem(length), DEVICE, known, never).found for length in (same[0], 1023, 1025, same[-1]))


def test_an_entry_that_cannot_compute_the_problem_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024), block_q=256), entry(problem(2048)))
    found = table.lookup(problem(1024), DEVICE, known, lambda e: "too long a tile" if e.variant.as_dict()["block_q"] == 256 else None)
    assert found.found is not None
    assert found.found.entry.problem.seqlen_q == 2048
    assert "too long a tile" in found.explain()


def test_equal_distances_take_the_smaller_tile(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(512), block_q=256), entry(problem(2048), block_q=64))
    found = table.lookup(problem(1024), DEVICE, known, never).found
    assert found is not None
    assert found.entry.variant.as_dict()["block_q"] == 64


def test_a_predicted_entry_never_outranks_a_measured_one(tmp_path: Path) -> None:
    known = tables(tmp_path, entry(problem(1024), source="predicted"), entry(problem(2048)))
    found = table.lookup(problem(1024), DEVICE, known, never).found
    assert found is not None
    assert found.entry.measurement.source == "measured"


def test_the_users_table_goes_before_the_shipped_one(tmp_path: Path) -> None:
    for name, block_q in (("shipped", 64), ("user", 256)):
        table.merge(tmp_path / name / "t.yaml", DEVICE, entry(block_q=block_q))
    found = table.lookup(problem(), DEVICE, table.load_all([tmp_path / "user", tmp_path / "shipped"]), never)
    assert found.found is not None
    assert found.found.entry.variant.as_dict()["block_q"] == 256
    assert "user" in found.explain()


def test_a_measured_shipped_entry_goes_before_the_users_predicted_one(tmp_path: Path) -> None:
    table.merge(tmp_path / "shipped" / "t.yaml", DEVICE, entry(block_q=64))
    table.merge(tmp_path / "user" / "t.yaml", DEVICE, entry(source="predicted", block_q=256))
    found = table.lookup(problem(), DEVICE, table.load_all([tmp_path / "user", tmp_path / "shipped"]), never)
    assert found.found is not None
    assert found.found.entry.variant.as_dict()["block_q"] == 64


@pytest.mark.parametrize(("asked", "served"), [(100, 127), (900, 1023)])
def test_the_nearest_window_serves(tmp_path: Path, asked: int, served: int) -> None:
    known = tables(tmp_path, *(entry(problem(mask=Mask.window(left, 0))) for left in (127, 1023)))
    found = table.lookup(problem(mask=Mask.window(asked, 0)), DEVICE, known, never).found
    assert found is not None
    assert found.entry.problem.mask.left == served


SISTERS = {
    "NVIDIA H100 80GB HBM3": {"dram_gb_per_s": 3350.0},
    "NVIDIA H100 PCIe": {"sm_count": 114, "dram_gb_per_s": 2000.0},
    "NVIDIA H100 NVL": {"dram_gb_per_s": 3900.0},
    "a slice of an H200": {"sm_count": 60, "dram_gb_per_s": 2400.0},
}


@pytest.mark.parametrize("name", SISTERS)
def test_a_sister_device_is_a_labelled_match(tmp_path: Path, name: str) -> None:
    sister = replace(DEVICE, name=name, **SISTERS[name])  # type: ignore[arg-type]
    assert not table.same_device(device_record(sister), device_record(DEVICE))
    found = table.lookup(problem(), sister, tables(tmp_path, entry()), never).found
    assert found is not None
    assert found.sister


def test_a_name_neither_joins_nor_parts_devices(tmp_path: Path) -> None:
    renamed = replace(DEVICE, name="NVIDIA H200 141GB", dram_gb_per_s=4813.0)
    found = table.lookup(problem(), renamed, tables(tmp_path, entry()), never).found
    assert found is not None
    assert not found.sister
    assert table.table_path(renamed, tmp_path) == tmp_path / "a.yaml"
    namesake = replace(DEVICE, sm_count=60)
    table.merge(tmp_path / "nvidia-h200.yaml", DEVICE, entry())
    assert table.table_path(namesake, tmp_path) == tmp_path / "nvidia-h200-60sm-4800gbps.yaml"


def test_a_device_of_another_architecture_gets_nothing(tmp_path: Path) -> None:
    found = table.lookup(problem(), replace(DEVICE, name="NVIDIA RTX PRO 6000", sm=120), tables(tmp_path, entry()), never)
    assert found.found is None
    assert "no entry serves" in found.explain()
