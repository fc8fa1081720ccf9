"""What people see: live progress on stderr, tables of results on stdout. Without a terminal: no colours, no redrawing, few lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from flashgen.model import Certificate, DeviceLimits, Outcome, Variant, Verdict

PIPED_WIDTH = 100
PREDICTED = "predicted by the cost model, not measured"

_OUTCOME_STYLE = {Outcome.OK: "green", Outcome.INEXACT: "red", Outcome.TIMED_OUT: "red", Outcome.LAUNCH_FAILED: "red"}


def output() -> Console:
    """Stdout, for results."""
    return _console(stderr=False)


def progress_console() -> Console:
    """Stderr, for progress."""
    return _console(stderr=True)


def show(renderable: RenderableType) -> None:
    """Print a result on stdout. Piped, lines have no blanks at their ends and break at a fixed width."""
    console = output()
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=False)


# Words ----------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """9 s, 1 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def microseconds(us: float) -> str:
    """Four significant digits or more, no exponent."""
    return f"{us:,.0f}" if us >= 10_000 else f"{us:.1f}" if us >= 100 else f"{us:.2f}"


def params_text(variant: Variant, names: Iterable[str] | None = None) -> str:
    """Parameters of a variant, all or the named ones."""
    chosen = variant.as_dict()
    return " ".join(f"{name}={int(chosen[name])}" for name in (chosen if names is None else names) if name in chosen)


def tally(outcomes: Mapping[Outcome, int]) -> Text:
    """Trials by outcome, the good ones first."""
    parts = [
        Text(f"{outcomes[each]} {each.replace('_', ' ')}", _OUTCOME_STYLE.get(each, "yellow")) for each in Outcome if outcomes.get(each)
    ]
    return Text(" · ", "dim").join(parts) if parts else Text("none yet", "dim")


def device_text(device: DeviceLimits) -> str:
    """Name and architecture."""
    return f"{device.name} (sm_{device.sm})"


def certificate_text(certificate: Certificate) -> str:
    """A certificate in one line."""
    if certificate.verdict is not Verdict.EXACT:
        return f"INEXACT after {certificate.cases} cases ({certificate.executor}): {certificate.failure}"
    same_bits = "; deterministic" if certificate.deterministic else ""
    return (
        f"exact in {certificate.cases} cases, {certificate.bitwise_cases} of them bit for bit ({certificate.suite}, {certificate.executor} "
        f"executor); worst error {certificate.worst_error_ratio:.2f} of the allowed 2.00{same_bits}"
    )


def plain_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """The one table style: a heading line, no frame. `right` names columns of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold")
    return table


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """Names and values in two columns."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
