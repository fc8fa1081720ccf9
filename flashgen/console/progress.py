"""Live progress of a search on stderr: redrawn in place on a terminal, else one line every few seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flashgen.console import device_text, duration, facts, microseconds, progress_console, tally
from flashgen.model import ExecutorName, Outcome, Problem, Trial
from flashgen.trials import Event, FinalistCertified, FinalRound, SearchBegan, TrialEnded

LINE_SECONDS = 3.0
"""Least time between two progress lines where nothing can be redrawn."""


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
    finalists: int = 0
    certified: int = 0
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
        """Take one event of a search."""
        if isinstance(event, SearchBegan):
            predicted = event.executor is ExecutorName.EMULATED
            self._state = _State(f"{self._heading} on {device_text(event.device)}", predicted, event.budget, resumed=event.resumed)
            kept = f", {event.resumed} trials known from before" if event.resumed else ""
            offered = ", ".join(f"{count} of {family}" for family, count in event.feasible.items())
            self._line(f"{self._state.title}: {offered} feasible{kept}; budget {event.budget}", always=True)
        elif isinstance(event, TrialEnded):
            self._take(event)
            self._line(f"  {self._counts()}; best {self._best_time()}; {self._clock()}")
        elif isinstance(event, FinalRound):
            self._state.finalists = len(event.variants)
            self._state.phase = f"certifying {_counted(len(event.variants), 'finalist')}"
            self._line(f"  {self._counts()}; best {self._best_time()}; {self._state.phase}", always=True)
        elif isinstance(event, FinalistCertified):
            self._state.certified += 1
            self._state.phase = f"certified {self._state.certified} of {_counted(self._state.finalists, 'finalist')}"
            found = event.certificate
            how = f"{found.verdict} in {_counted(found.cases, 'case')}" if found.cases else "could not run"
            self._line(f"  {how}: {event.variant}", always=True)

    def note(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self._console.print(Text(text))

    def _take(self, event: TrialEnded) -> None:
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

    def _best_time(self) -> str:
        best = self._state.best
        if best is None or best.measurement is None:
            return "none yet"
        kind = "predicted " if self._state.predicted else ""
        return f"{kind}{microseconds(best.measurement.median_us)} µs, {best.measurement.tflops:.0f} TFLOP/s"

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
        elapsed = duration(time.monotonic() - state.began)
        clock = f"{state.phase}, {elapsed}" if state.phase else self._clock()
        bar = Table.grid(padding=(0, 2, 0, 0))
        bar.add_row(
            ProgressBar(max(1, state.budget), state.done, width=30, complete_style="cyan", finished_style="green"),
            Text(f"{state.done}/{state.budget} trials"),
            Text(clock, "dim", overflow="ellipsis", no_wrap=True),
        )
        variant = Text("") if state.best is None else Text(str(state.best.variant), "dim", overflow="ellipsis", no_wrap=True)
        rows = facts((("best", Text(self._best_time())), ("", variant), ("trials", tally(state.outcomes))))
        return Group(Text(state.title, "bold", overflow="ellipsis", no_wrap=True), bar, rows)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
