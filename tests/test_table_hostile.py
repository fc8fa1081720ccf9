"""Tables from strangers: whatever the bytes, the answer is the named error, in bounded time and memory, and nothing is executed."""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shipping import H200, entry, problem, table_of

from flashgen import paths, table, yaml_io
from flashgen.errors import InvalidTable
from flashgen.table_schema import device_record

ORIGIN = Path("strange.yaml")
TEXT = table.render_table(device_record(H200), [entry(), entry(problem(512))]).encode()
WHOLE = table.parse(TEXT, ORIGIN)


def accepted(content: bytes) -> bool:
    """Whether the bytes are a table; anything but that and InvalidTable fails the test. What is accepted says the same as the original."""
    try:
        found = table.parse(content, ORIGIN)
    except InvalidTable as refused:
        assert "strange.yaml" in str(refused)
        return False
    assert (found.device, found.entries) == (WHOLE.device, WHOLE.entries)
    return True


def cuts(step: int) -> list[int]:
    return list(range(0, len(TEXT) - 1, step))


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_a_table_cut_at_any_byte_is_refused(step: int) -> None:
    assert [at for at in cuts(step) if accepted(TEXT[:at])] == []


@pytest.mark.parametrize("share", [0.01, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_table_with_one_flipped_bit_is_refused_or_says_the_same(share: float) -> None:
    rng, refused, flips = random.Random(2), 0, 0
    for at in range(len(TEXT)):
        for bit in range(8):
            if rng.random() <= share:
                flips += 1
                refused += not accepted(TEXT[:at] + bytes([TEXT[at] ^ 1 << bit]) + TEXT[at + 1 :])
    assert refused > 0.9 * flips


LINES = [line for line in TEXT.decode().splitlines(keepends=True)]
SCRAPS = st.sampled_from(
    [*LINES, "- ", "{", "}", "[", "]", ": ", "? ", "&a ", "*a", "<<: *a\n", "!!python/object/apply:os.system [true]\n", "!!binary x\n",
     "--- \n", "... \n", "%YAML 1.1\n", "\t", "\u0000", "\ufeff", "\u2028", "'", '"', "|\n", ">\n", "#", "9" * 40, "9" * 5000, "1e999",
     "{{ 7*7 }}", "64; asm(\"trap;\")", "null", "~", ".nan", "\U0001f600"]
)  # fmt: skip


@st.composite
def strange(draw: st.DrawFn) -> bytes:
    """Random bytes, scraps of YAML, or a table with something done to it."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return draw(st.binary(max_size=200))
    if kind == 1:
        return "".join(draw(st.lists(SCRAPS, max_size=12))).encode("utf-8", "surrogatepass")
    data = bytearray(TEXT)
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        scrap = draw(SCRAPS).encode("utf-8", "surrogatepass")
        if draw(st.booleans()):
            data[at:at] = scrap
        else:
            data[at : min(end, at + 40)] = scrap
    return bytes(data)


@settings(max_examples=150, deadline=None, database=None)
@given(strange())
def test_strange_bytes_end_in_the_named_error(content: bytes) -> None:
    accepted(content)


@pytest.mark.slow
@settings(max_examples=100_000, deadline=None, database=None)
@given(strange())
def test_a_hundred_thousand_strange_inputs_end_in_the_named_error(content: bytes) -> None:
    accepted(content)


BOMBS = {
    "200 MB of text": lambda path: path.write_bytes(b"a" * 200_000_000),
    "200 MB of nothing": lambda path: path.open("wb").truncate(200_000_000),
    "many values": lambda path: path.write_bytes(b"schema: flashgen.table/1\nentries:\n" + b"- 1\n" * 3_900_000),
    "many keys": lambda path: path.write_bytes(b"".join(b"k%d: 1\n" % number for number in range(1_200_000))),
    "deep brackets": lambda path: path.write_bytes(b"[" * 15_000_000),
    "deep blocks": lambda path: path.write_bytes(b"- " * 7_000_000),
    "one long scalar": lambda path: path.write_bytes(b'schema: "' + b"x" * 16_000_000 + b'"\n'),
    "one long number": lambda path: path.write_bytes(b"schema: " + b"9" * 16_000_000 + b"\n"),
    "aliases of aliases": lambda path: path.write_text("a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(30))),
}
READ = """
import resource, sys, time
from pathlib import Path
from flashgen import table
from flashgen.errors import InvalidTable
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
try:
    table.read(Path(sys.argv[1]), strict=True)
except InvalidTable as refused:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.monotonic() - started, str(refused)[:300].replace(chr(10), " "))
"""


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_within_a_gigabyte_and_a_minute(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.yaml"
    BOMBS[bomb](path)
    result = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0 and result.stdout, result.stderr[-500:]
    kilobytes, seconds, reason = result.stdout.split(" ", 2)
    assert "bomb.yaml" in reason
    assert int(kilobytes) < 2**20 and float(seconds) < 60, result.stdout


def test_too_many_values_are_refused_with_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_io, "MAX_VALUES", 1000)
    with pytest.raises(InvalidTable, match=r"strange\.yaml:9\d\d: more than 1000 values"):
        table.parse(b"entries:\n" + b"- 1\n" * 5000, ORIGIN)


def test_a_file_beyond_the_limit_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(2**33)  # 8 GiB, sparse
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InvalidTable, match=r"big\.yaml is larger than"):
        table.read(path, strict=True)
    assert time.monotonic() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024


def test_a_flip_in_the_devices_record_is_noticed(tmp_path: Path) -> None:
    path = table_of(tmp_path / "a.yaml", entry()).path
    for right, wrong in (("sm_count: 132", "sm_count: 133"), ("NVIDIA H200", "NVIDIA H201"), ("4800.0", "4800.1")):
        path.write_text(TEXT.decode().replace(right, wrong, 1))
        with pytest.raises(InvalidTable, match="not the sealed one"):
            table.read(path, strict=True)


# The shipped table of the H200, damaged -------------------------------------------------------------------------------

ENTRY = "  - key:\n"


def instead(old: str, new: str) -> Callable[[str], str]:
    """Put `new` in the place of one `old` in the middle of the file."""

    def change(text: str) -> str:
        at = text.index(old, len(text) // 2)
        return text[:at] + new + text[at + len(old) :]

    return change


def with_block(value: str) -> Callable[[str], str]:
    """Give a variant in the middle of the file another block_kv."""

    def change(text: str) -> str:
        at = text.index("    variant:\n", len(text) // 2)
        return text[:at] + re.sub(r"block_kv: \d+", lambda _: f"block_kv: {value}", text[at:], count=1)

    return change


def flipped(text: str) -> str:
    at = text.index("median_us: ", len(text) // 2) + len("median_us: ")
    return text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]


def swapped(text: str) -> str:
    parts = text.split(ENTRY)
    parts[200], parts[400] = parts[400], parts[200]
    return ENTRY.join(parts)


def dropped(text: str) -> str:
    parts = text.split(ENTRY)
    return ENTRY.join(parts[:200] + parts[201:])


LAUGHS = "- &a0 [x, x]\n" + "".join(f"      - &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
HARMS: dict[str, tuple[Callable[[str], str], str]] = {
    "one flipped bit": (flipped, "cut or edited"),
    "cut within brackets": (lambda text: text[: text.index("params: {", len(text) // 2) + 20], "not readable as YAML"),
    "cut within a word": (lambda text: text[: text.index("runner_up:\n", len(text) // 2) + 26], "Expected `object"),
    "cut after an entry": (lambda text: text[: text.index(ENTRY, len(text) // 2)], "cut or edited"),
    "one entry dropped": (dropped, "cut or edited"),
    "two entries swapped": (swapped, "cut or edited"),
    "a value edited without a new seal": (instead("samples: 30", "samples: 31"), "cut or edited"),
    "a variant outside its space": (with_block("63"), "block_kv"),
    "an alias bomb": (instead("    shape:\n", f"    shape:\n      {LAUGHS}"), "anchor &a0"),
    "a key given twice": (instead("    variant:\n", "    variant:\n      family: x\n"), "key 'family' again (first on line"),
    "an unsafe tag": (instead("verdict: exact", "verdict: !!python/object/apply:os.system [true]"), "tag"),
    "a huge integer": (instead("samples: 30", "samples: 3" + "0" * 100_000), "an integer of 100001 digits"),
    "deep nesting": (instead("verdict: exact", f"verdict: {'[' * 200}"), "nesting deeper than 32 levels"),
    "nesting beyond all": (instead("verdict: exact", f"verdict: {'[' * 100_000}"), "nesting"),
    "text for a template": (with_block("\"64; asm('trap;')\""), "block_kv"),
}
CHECK = """
import resource, sys
from flashgen import cli
code = cli.run(["table", "check", "--json", *sys.argv[1:]])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one `flashgen table check` says of every damaged copy."""
    folder = tmp_path_factory.mktemp("damaged")
    whole = (paths.shipped_tables() / "nvidia-h200.yaml").read_text()
    files = {harm: folder / f"{harm.replace(' ', '-')}.yaml" for harm in HARMS}
    for harm, path in files.items():
        path.write_text(HARMS[harm][0](whole))
        assert path.read_text() != whole
    result = subprocess.run([sys.executable, "-c", CHECK, *map(str, files.values())], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stderr[-500:]
    kilobytes, seconds = map(float, result.stderr.split()[-2:])
    assert kilobytes < 2**20 and seconds < 60, result.stderr
    found = {each["table"]: each["fault"] for each in json.loads(result.stdout)["tables"]}
    return {harm: found[str(path)] for harm, path in files.items()}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_copy_of_the_shipped_table_fails_its_check_with_the_reason(faults: dict[str, str], harm: str) -> None:
    assert f"{harm.replace(' ', '-')}.yaml" in faults[harm]
    assert HARMS[harm][1] in faults[harm]
