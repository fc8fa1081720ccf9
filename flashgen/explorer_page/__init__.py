"""An exploration as one self-contained HTML page: own styles, own script, the space's formulas as data, nothing from a network.

The page evaluates the search space's own expressions when a slider moves; predicted times are the cost model's, tabulated for every shape,
length and number of resident CTAs. A test compares what the page computes with what Python computes.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path

from flashgen.errors import NotWritable
from flashgen.explorer import Exploration
from flashgen.explorer_page.data import page_data

MAX_BYTES = 300_000
"""A page stays below this, so that it opens at once and can be mailed."""


def render_page(exploration: Exploration) -> str:
    """The page's text."""
    here = files("flashgen.explorer_page")
    parts = {name: (here / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    record = json.dumps(page_data(exploration), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    title = f"{exploration.problem} on {exploration.device.name}"
    text = parts["html"].replace("<!--TITLE-->", html.escape(title)).replace("/*STYLE*/", parts["css"])
    return text.replace("/*DATA*/", record.replace("<", "\\u003c")).replace("/*SCRIPT*/", parts["js"])


def write_page(exploration: Exploration, path: Path) -> int:
    """Write the page; its size in bytes. Raises NotWritable."""
    content = render_page(exploration).encode()
    try:
        path.write_bytes(content)
    except OSError as problem:
        raise NotWritable(f"The report cannot be written to {path}: {problem.strerror}. Choose another --out.") from problem
    return len(content)
