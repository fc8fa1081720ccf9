"""The report: one small page that asks for nothing, computes what Python computes, and works with keys and on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Browser

from flashgen import device, explorer, explorer_page
from flashgen.errors import NotWritable
from flashgen.explorer import Exploration
from flashgen.explorer_page.data import formula
from flashgen.model import DType, Mask, Problem
from flashgen.shapes import with_capacity
from flashgen.space import load_space

H200 = device.preset("h200")
PROBLEM = Problem(DType.BFLOAT16, 64, 64, 4, 16, 16, 2048, 2048, Mask.causal())
KIB = 1024


@pytest.fixture(scope="module")
def found() -> Exploration:
    return explorer.explore(PROBLEM, H200, lengths=[128, 2048], compare=False)


@pytest.fixture(scope="module")
def page(found: Exploration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    explorer_page.write_page(found, path)
    return path


def test_the_page_is_small_and_names_no_address(page: Path) -> None:
    text = page.read_text()
    assert page.stat().st_size <= explorer_page.MAX_BYTES
    assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|url\((?!data:)", text)
    assert "<!--TITLE-->" not in text and "/*DATA*/" not in text and "/*STYLE*/" not in text


def test_the_page_carries_the_formulas_of_the_space(found: Exploration) -> None:
    assert formula("16 * (chunks + min(1, chunks % 8))") == ["*", 16, ["+", "chunks", ["min", 1, ["%", "chunks", 8]]]]
    assert formula("problem.head_dim // -2") == ["//", "problem.head_dim", ["-", 0, 2]]


def test_a_place_that_cannot_be_written_is_refused(found: Exploration, tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match="Choose another --out"):
        explorer_page.write_page(found, tmp_path / "absent" / "report.html")


# ---- in a browser

browser_only = pytest.mark.browser


@pytest.fixture(scope="module")
def tab(page: Path) -> Iterator[Browser]:
    with Browser() as opened:
        opened.open(page)
        yield opened


def face(tab: Browser) -> list[list[str]]:
    """What the heat map shows."""
    script = "return [...document.querySelectorAll('.tile')].map(t => [t.dataset.tile, t.textContent, t.style.background])"
    shown: list[list[str]] = tab.run(script)
    return shown


def slide(tab: Browser, control: str, value: int) -> None:
    script = "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"
    tab.run(script, control, value)


@browser_only
def test_moving_the_sliders_changes_the_heat_map_and_nothing_is_asked_for_or_complained_about(tab: Browser, page: Path) -> None:
    start = face(tab)
    slide(tab, "capacity", 128)
    small = face(tab)
    assert [each[0] for each in small] == [each[0] for each in start]
    assert small != start and tab.run("return document.getElementById('capacity-text').textContent") == "128 KiB"
    slide(tab, "length", 0)
    assert face(tab) != small
    slide(tab, "capacity", 227)
    slide(tab, "length", 1)
    assert face(tab) == start
    assert tab.complaints() == []
    assert tab.requests() == [page.resolve().as_uri()]


@browser_only
@pytest.mark.parametrize("length", [128, 2048])
@pytest.mark.parametrize("kib", [8, 33, 48, 99, 227, 256])
def test_the_page_computes_what_python_computes(tab: Browser, found: Exploration, kib: int, length: int) -> None:
    step, capacity = found.lengths.index(length), kib * KIB
    script = """return flashgenExplorer.grid(arguments[0], arguments[1], arguments[2])
                .map(c => [c.tile, c.fits, c.fits ? c.us : 0, c.fits ? c.ctas : 0, c.at.shared_bytes])"""
    for index, family in enumerate(found.families):
        shown: dict[tuple[int, ...], list[Any]] = {tuple(each[0]): each[1:] for each in tab.run(script, index, capacity, step)}
        asked = family.at(length).problem
        cells = tile_cells(family, asked, capacity)
        assert {tile for tile, each in shown.items() if each[0]} == {tile for tile, cell in cells.items() if cell.feasible}
        for tile, cell in cells.items():
            if cell.feasible:
                assert shown[tile][1] == pytest.approx(cell.predicted_us, rel=1e-3)
        at = load_space(family.name).bind(asked, with_capacity(H200, capacity))
        assert len(cells) == len(shown) and at.device.shared_bytes_per_cta == capacity


def tile_cells(family: Any, asked: Problem, capacity: int) -> dict[tuple[int, ...], Any]:
    from flashgen.tile_grid import cells_of

    return {(cell.block_q, cell.block_kv, cell.num_stages): cell for cell in cells_of(family, asked, capacity, {})}


@browser_only
def test_arrow_keys_walk_over_the_tiles_and_the_detail_follows(tab: Browser) -> None:
    tab.press(".tile[aria-pressed=true]", "\ue013")  # up
    first = tab.run("return [document.activeElement.dataset.tile, document.querySelector('#detail h3').textContent]")
    tab.press(".tile[aria-pressed=true]", "\ue014")  # right
    second = tab.run("return [document.activeElement.dataset.tile, document.querySelector('#detail h3').textContent]")
    assert first != second
    assert second[1].startswith(second[0].split(",")[0])


@browser_only
def test_everything_that_can_be_used_has_a_name(tab: Browser) -> None:
    script = """return [...document.querySelectorAll('button, input, select, svg[role=img], [role=region]')].filter(e =>
      !(e.getAttribute('aria-label') || e.textContent.trim() || e.getAttribute('aria-labelledby') || (e.labels && e.labels.length)))
      .map(e => e.outerHTML.slice(0, 200))"""
    assert tab.run(script) == []


@browser_only
def test_a_heading_sorts_the_table(tab: Browser) -> None:
    tab.run("document.querySelector('[data-sort=shared]').click()")
    script = "return [...document.querySelectorAll('#table tbody tr')].map(r => r.cells[3].textContent)"
    shown = tab.run(script)
    units = {"B": 1, "KiB": 1024, "MiB": 2**20}
    sizes = [float(text.split()[0].replace(",", "")) * units[text.split()[1]] for text in shown]
    assert sizes == sorted(sizes)
    assert tab.run("return document.querySelector('th[aria-sort=ascending]').textContent") == "shared"


@browser_only
def test_a_phone_shows_the_page_without_scrolling_sideways(page: Path) -> None:
    with Browser(390, 844) as phone:
        phone.open(page)
        assert phone.run("return document.documentElement.scrollWidth") <= 390
        assert phone.complaints() == []


AWKWARD = {
    "decode, grouped heads": (replace(PROBLEM, head_dim=128, head_dim_v=128, batch=64, heads_kv=2, seqlen_q=1, seqlen_kv=8192), "a100"),
    "float32, no tensor cores": (replace(PROBLEM, dtype=DType.FLOAT32, batch=1, seqlen_q=1000, seqlen_kv=1000, mask=Mask()), "t4"),
    "few tiles fit": (replace(PROBLEM, head_dim=256, head_dim_v=256, mask=Mask.window(100, 0)), "rtx4090"),
}


@browser_only
@pytest.mark.slow
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_problems_show_no_hole_at_any_capacity(name: str, tmp_path: Path) -> None:
    asked, gpu = AWKWARD[name]
    path = tmp_path / "report.html"
    explorer_page.write_page(explorer.explore(asked, device.preset(gpu), compare=False), path)
    with Browser() as opened:
        opened.open(path)
        for kib in (8, 48, 99, 256):
            slide(opened, "capacity", kib)
            assert opened.run("return document.querySelector('main').innerHTML.match(/NaN|undefined|Infinity/g)") is None
        assert opened.complaints() == []
