"""`flashgen tune --standard`: a whole list of problems into one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.errors import InvalidProblem
from flashgen.model import ExecutorName, Op

if TYPE_CHECKING:
    from flashgen.standard import Wish

DONE, FAILED, INTERRUPTED = 0, 1, 130


def tune_list(name: str, part: str | None, request: shared.Request, options: dict[str, Any]) -> int:
    """Bring the device's table up to date with a list. Exit code 1 when a problem was skipped, 130 when stopped: run it again to go on."""
    from flashgen import standard, table
    from flashgen.cli.tune import require_writable
    from flashgen.console.progress import TuneProgress
    from flashgen.search import stopped_by_signals
    from flashgen.staleness import tools_in_use

    if request.head_dim is not None or options["families"]:
        raise InvalidProblem("--standard names its problems itself; leave out --head-dim and --family.")
    if request.op != Op.FORWARD:
        raise InvalidProblem(f"The standard lists hold forward problems; got --op {request.op}. Tune backward problems by --head-dim.")
    wishes = standard.part_of(standard.LISTS[name](), part)
    if options["compile_only"]:
        return _compile_list(wishes, options)
    target = shared.target_of(options["gpu"], options["executor"])
    path = options["table"] or table.table_path(target.device)
    require_writable(path)
    progress = TuneProgress()
    if target.note:
        progress.note(target.note)
    done = []
    code = DONE
    try:
        with stopped_by_signals():
            for each in standard.tune(
                wishes, target.device, target.executor, tools_in_use(), path=path, budget=options["budget"], seconds=options["seconds"],
                seed=options["seed"],
            ):  # fmt: skip
                done.append(each)
                click.echo(f"{len(done)}/{len(wishes)} {each.how}: {each.wish.problem}{f' ({each.why})' if each.why else ''}", err=True)
    except KeyboardInterrupt:
        click.echo("stopped; the same command goes on from here", err=True)
        code = INTERRUPTED
    if code == DONE and any(each.how == "skipped" for each in done):
        code = FAILED
    counts = Counter(each.how for each in done)
    if options["as_json"]:
        shared.print_json({"schema": "flashgen.standard/1", "list": name, "part": part, "table": str(path), "done": dict(counts)})
    else:
        click.echo(f"{path}: {', '.join(f'{count} {how}' for how, count in counts.items()) or 'nothing done'}")
    return code


def _compile_list(wishes: Sequence[Wish], options: dict[str, Any]) -> int:
    """Fill the cubin store with what the searches of a list will ask for first. Needs no GPU."""
    from flashgen import search
    from flashgen.compiler import binding, default_store

    binding()
    device = shared.target_of(options["gpu"], "emulated").device
    budget = options["budget"] or search.DEFAULT_BUDGET[ExecutorName.DEVICE]
    searched = [each.problem for each in wishes if each.searched]
    for number, problem in enumerate(searched, 1):
        search.compile_ahead(problem, device, budget=budget)
        click.echo(f"{number}/{len(searched)} compiled: {problem}", err=True)
    held = default_store().statistics()
    record = {"schema": "flashgen.compile/1", "device": device.name, "store": str(held.path), "kernels": held.kernels, "bytes": held.bytes}
    if options["as_json"]:
        shared.print_json(record)
    else:
        click.echo(f"{held.path}: {held.kernels} kernels")
    return DONE
