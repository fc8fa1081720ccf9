"""Tables from strangers: whatever the bytes, the answer is the named error, in bounded time and memory, and nothing is executed."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shipping import H200, entry, problem, table_of

from flashgen import table, yaml_io
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
