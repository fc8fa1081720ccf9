"""`flashgen tune --standard`: a whole list of problems into one table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.console import duration
from flashgen.errors import InvalidProblem
from flashgen.model import ExecutorName

if TYPE_CHECKING:
    from flashgen.standard import Done
    from flashgen.wishes import Wish

DONE, FAILED, INTERRUPTED = 0, 1, 130
ENOUGH_SECONDS = 20.0
"""Of expected work, before its pace says something."""


def tune_list(name: str, part: str | None, within: float | None, request: shared.Request, options: dict[str, Any]) -> int:
    """Bring the device's table up to date with a list.

    Exit code 1 when a problem was skipped, 130 when stopped or out of time: run it again to go on.
    """
    from flashgen import standard, table
    from flashgen.cli.tune import require_writable
    from flashgen.console.progress import TuneProgress
    from flashgen.search import stopped_by_signals
    from flashgen.staleness import tools_in_use

    wishes = _wishes(name, part, request, options)
    if options["compile_only"]:
        return _compile_list(wishes, options)
    target = shared.target_of(options["gpu"], options["executor"])
    path = options["table"] or table.table_path(target.device)
    require_writable(path)
    progress = TuneProgress()
    if target.note:
        progress.note(target.note)
    done: list[standard.Done] = []
    code = DONE
    pace = Pace(wishes)
    try:
        with stopped_by_signals():
            for each in standard.tune(
                wishes, target.device, target.executor, tools_in_use(), path=path, budget=options["budget"], seconds=options["seconds"],
                within=within, seed=options["seed"],
            ):  # fmt: skip
                done.append(each)
                why = f" ({each.why})" if each.why else ""
                click.echo(f"{len(done)}/{len(wishes)} {each.how}: {each.wish.problem}{why}{pace.after(each)}", err=True)
    except KeyboardInterrupt:
        click.echo("stopped; the same command goes on from here", err=True)
        code = INTERRUPTED
    if code == DONE and len(done) < len(wishes):
        click.echo(f"time is up, {len(wishes) - len(done)} problems are left; the same command goes on from here", err=True)
        code = INTERRUPTED
    if code == DONE and any(each.how == "skipped" for each in done):
        code = FAILED
    counts = Counter(each.how for each in done)
    if options["as_json"]:
        record = {"schema": "flashgen.standard/1", "list": name, "part": part, "table": str(path), "done": dict(counts)}
        shared.print_json(record | {"left": len(wishes) - len(done)})
    else:
        click.echo(f"{path}: {', '.join(f'{count} {how}' for how, count in counts.items()) or 'nothing done'}")
    return code


def _wishes(name: str, part: str | None, request: shared.Request, options: dict[str, Any]) -> list[Wish]:
    """The list, or of it what --op, --deterministic and --part ask for. Raises InvalidProblem."""
    from flashgen import wishes

    if request.head_dim is not None or options["families"]:
        raise InvalidProblem("--standard names its problems itself; leave out --head-dim and --family.")
    found = wishes.LISTS[name]()
    if request.deterministic:
        found = wishes.gradients(found)
    elif click.get_current_context().get_parameter_source("op") is click.core.ParameterSource.COMMANDLINE:
        found = [each for each in found if each.problem.op == request.op]
    if not found:
        raise InvalidProblem(
            f"The standard list {name!r} holds forward problems only. Use --standard full, or name problems by --head-dim."
        )
    return wishes.part_of(found, part)


class Pace:
    """How long the rest of a list will take: expected times, corrected by how those so far compare with the clock."""

    def __init__(self, wishes: Sequence[Wish]) -> None:
        from flashgen.wishes import seconds

        self._seconds = seconds
        self._left = sum(map(seconds, wishes))
        self._expected, self._began = 0.0, time.monotonic()

    def after(self, done: Done) -> str:
        """The time left, in words, once enough was done to tell."""
        took = self._seconds(done.wish)
        self._left -= took
        if done.how == "kept":
            return ""
        self._expected += took
        left = self._left * (time.monotonic() - self._began) / self._expected
        return f", about {duration(left)} left" if self._expected >= ENOUGH_SECONDS and left >= 1.0 else ""


def _compile_list(wishes: Sequence[Wish], options: dict[str, Any]) -> int:
    """Fill the cubin store with what the searches of a list will ask for first. Needs no GPU."""
    from flashgen import search
    from flashgen.compiler import binding, default_store

    binding()
    device = shared.target_of(options["gpu"], "emulated").device
    searched = [each for each in wishes if each.searched]
    for number, each in enumerate(searched, 1):
        budget = options["budget"] or each.budget or search.DEFAULT_BUDGET[ExecutorName.DEVICE]
        search.compile_ahead(each.problem, device, budget=budget)
        click.echo(f"{number}/{len(searched)} compiled: {each.problem}", err=True)
    held = default_store().statistics()
    record = {"schema": "flashgen.compile/1", "device": device.name, "store": str(held.path), "kernels": held.kernels, "bytes": held.bytes}
    if options["as_json"]:
        shared.print_json(record)
    else:
        click.echo(f"{held.path}: {held.kernels} kernels")
    return DONE
