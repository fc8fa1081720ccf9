"""What people see: live progress on stderr, tables of results on stdout. Without a terminal: no colours, no redrawing, few lines."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flashgen.model import Certificate, DeviceLimits, Outcome, Problem, Trial, Variant, Verdict

if TYPE_CHECKING:
    from flashgen.search import Event, TuneResult

PIPED_WIDTH = 100
LINE_SECONDS = 3.0
"""Least time between two progress lines where nothing can be redrawn."""
TOP = 8
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
    return (
        f"exact in {certificate.cases} cases, {certificate.bitwise_cases} of them bit for bit ({certificate.suite}, {certificate.executor} "
        f"executor); worst error {certificate.worst_error_ratio:.2f} of the allowed 2.00"
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


# Progress of a search -------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What is known of the running search."""

    title: str = ""
    predicted: bool = False
    budget: int = 0
    done: int = 0
    resumed: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    best: Trial | None = None
    began: float = field(default_factory=time.monotonic)
    remaining_s: float | None = None
    phase: str = ""


class TuneProgress:
    """Shows the events of searches on stderr: redrawn in place on a terminal, else one line every few seconds."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        """On `console` (default stderr); `quiet` shows nothing."""
        self._console = console or progress_console()
        self._quiet = quiet
        self._state = _State()
        self._heading = ""
        self._last_line = 0.0

    @contextmanager
    def running(self, number: int, total: int, problem: Problem) -> Iterator[None]:
        """Around one search; afterwards the terminal is clean for its result."""
        self._heading = f"[{number}/{total}] {problem}" if total > 1 else f"{problem}"
        self._state = _State()
        if self._quiet or not self._console.is_terminal:
            yield
            return
        # Only stderr is redirected: results on stdout must get there, whatever it is.
        picture = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True, redirect_stdout=False)
        with picture:
            yield

    def __call__(self, event: Event) -> None:
        """Take one event of `search.tune`."""
        from flashgen.search import FinalistCertified, FinalRound, SearchBegan, TrialEnded

        if isinstance(event, SearchBegan):
            predicted = event.executor == "emulated"
            self._state = _State(f"{self._heading} on {device_text(event.device)}", predicted, event.budget, resumed=event.resumed)
            kept = f", {event.resumed} trials known from before" if event.resumed else ""
            offered = ", ".join(f"{count} of {family}" for family, count in event.feasible.items())
            self._line(f"{self._state.title}: {offered} feasible{kept}; budget {event.budget}", always=True)
        elif isinstance(event, TrialEnded):
            self._take(event)
            self._line(f"  {self._counts()}; best {self._best_words()}; {self._clock()}")
        elif isinstance(event, FinalRound):
            self._state.phase = f"certifying {len(event.variants)} finalists"
            self._line(f"  {self._counts()}; best {self._best_words()}; {self._state.phase}", always=True)
        elif isinstance(event, FinalistCertified):
            self._state.phase = f"certified: {event.certificate.verdict} {event.variant}"
            self._line(f"  {event.certificate.verdict} in {event.certificate.cases} cases: {event.variant}", always=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(Text(text))

    def _take(self, event: Any) -> None:
        state = self._state
        state.done, state.budget, state.best, state.remaining_s = event.number, event.budget, event.best, event.remaining_s
        state.outcomes[event.trial.outcome] += 1

    def _line(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        if self._quiet or self._console.is_terminal or not (always or now - self._last_line >= LINE_SECONDS):
            return
        self._last_line = now
        self._console.print(Text(text), soft_wrap=True)

    def _counts(self) -> str:
        return f"{self._state.done}/{self._state.budget} trials: {tally(self._state.outcomes).plain}"

    def _best_words(self) -> str:
        best = self._state.best
        if best is None or best.measurement is None:
            return "none yet"
        kind = "predicted " if self._state.predicted else ""
        return f"{kind}{microseconds(best.measurement.median_us)} µs ({best.measurement.tflops:.0f} TFLOP/s) {best.variant}"

    def _clock(self) -> str:
        state = self._state
        elapsed = time.monotonic() - state.began
        guess = elapsed / state.done * max(0, state.budget - state.done) if state.done else None
        left = min((each for each in (guess, state.remaining_s) if each is not None), default=None)
        return duration(elapsed) + ("" if left is None else f", about {duration(left)} left")

    def _picture(self) -> RenderableType:
        state = self._state
        if not state.title:
            return Text(self._heading or "starting", "dim")
        bar = Table.grid(padding=(0, 2, 0, 0))
        bar.add_row(
            ProgressBar(max(1, state.budget), state.done, width=30),
            Text(f"{state.done}/{state.budget} trials"),
            Text(state.phase or self._clock(), "dim", overflow="ellipsis", no_wrap=True),
        )
        rows = facts((("best", Text(self._best_words(), overflow="ellipsis", no_wrap=True)), ("so far", tally(state.outcomes))))
        return Group(Text(state.title, "bold", overflow="ellipsis", no_wrap=True), bar, rows)


# Result of a search ---------------------------------------------------------------------------------------------------


def tune_report(result: TuneResult, comparison: Sequence[str] = ()) -> RenderableType:
    """One search: heading, best variants, entry, change of the table."""
    predicted = result.executor == "emulated"
    kind = Text(f"  {PREDICTED}", "yellow") if predicted else Text("  measured", "green")
    heading = Text.assemble((f"{result.problem}", "bold"), f" on {device_text(result.device)}", kind)
    shown: list[tuple[str, RenderableType]] = [("trials", Text.assemble(tally(result.outcomes()), f" in {duration(result.seconds)}"))]
    if result.partial:
        shown.append(("state", Text("interrupted before the final round: nothing was written; run the same command to go on", "yellow")))
    if result.entry is not None:
        shown.append(("exact", certificate_text(result.entry.certificate)))
    shown += [("against", line) for line in comparison]
    if result.change is not None:
        shown += [("table", Text(result.change.describe()))]
    return Group(heading, Text(), top_table(result, predicted), Text(), facts(shown), Text())


def top_table(result: TuneResult, predicted: bool) -> RenderableType:
    """The best variants; what they have in common is said once."""
    reports = {trial.variant: trial.report for trial in result.trials}
    rows = _ranked(result)[:TOP]
    if not rows:
        return Text("No variant ran.", "red")
    varying = _varying([variant for variant, _, _ in rows])
    time_name = "predicted µs" if predicted else "median µs"
    numbers = ("", time_name, "TFLOP/s", "registers", "spilled B")
    table = plain_table(*numbers, "certified", "variant", right=numbers)
    for number, (variant, measurement, verdict) in enumerate(rows, 1):
        report = reports.get(variant)
        spread = "" if predicted or not measurement.spread else f" ±{measurement.spread / 2:.1%}"
        table.add_row(
            f"{number}", f"{microseconds(measurement.median_us)}{spread}", f"{measurement.tflops:.1f}",
            f"{report.registers}" if report else "", f"{report.spill_bytes}" if report else "", verdict,
            Text(f"{variant.family} {params_text(variant, varying.get(variant.family, ()))}".strip()),
            style="bold" if number == 1 else "",
        )  # fmt: skip
    common = [
        f"{family}: {params_text(next(variant for variant, _, _ in rows if variant.family == family), same)}"
        for family, same in _common([variant for variant, _, _ in rows]).items()
        if same
    ]
    return Group(table, *(Text(f"all of {line}", "dim") for line in common))


def _ranked(result: TuneResult) -> list[tuple[Variant, Any, Text]]:
    """(variant, measurement, verdict): finalists in their order, then the other good trials by time."""
    rows = []
    for finalist in result.finalists:
        if finalist.measurement is not None:
            exact = finalist.certificate.verdict is Verdict.EXACT
            role = "" if finalist.role == "challenger" else f", {finalist.role}"
            rows.append(
                (finalist.variant, finalist.measurement, Text(f"{finalist.certificate.verdict}{role}", "green" if exact else "red"))
            )
    named = {variant for variant, _, _ in rows}
    refused = {finalist.variant for finalist in result.finalists if finalist.certificate.verdict is not Verdict.EXACT}
    quick = Text("-" if result.executor == "emulated" else "quickly", "dim")
    others = [
        trial for trial in result.trials if trial.outcome is Outcome.OK and trial.measurement and trial.variant not in named | refused
    ]
    others.sort(key=lambda trial: (trial.measurement.median_us if trial.measurement else 0.0, str(trial.variant)))
    return rows + [(trial.variant, trial.measurement, quick) for trial in others]


def _varying(variants: Sequence[Variant]) -> dict[str, tuple[str, ...]]:
    """Per family the parameters whose values differ among the variants."""
    common = _common(variants)
    return {variant.family: tuple(name for name in variant.as_dict() if name not in common[variant.family]) for variant in variants}


def _common(variants: Sequence[Variant]) -> dict[str, tuple[str, ...]]:
    """Per family the parameters on which all its variants agree; none for a variant that is alone."""
    found: dict[str, tuple[str, ...]] = {}
    for family in dict.fromkeys(variant.family for variant in variants):
        members = [variant.as_dict() for variant in variants if variant.family == family]
        agreed = (name for name in members[0] if all(member[name] == members[0][name] for member in members))
        found[family] = tuple(agreed) if len(members) > 1 else ()
    return found
