"""Tuned tables as text: format, and refusals with line numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from table_entries import DEVICE, entry, problem, sealed, written

from flashgen import table, yaml_io
from flashgen.errors import InvalidTable
from flashgen.model import (
    Alignment,
    DType,
    Mask,
    TableEntry,
    Verdict,
)
from flashgen.table_schema import device_record
from flashgen.yaml_io import Flow, dump, load_strict


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
