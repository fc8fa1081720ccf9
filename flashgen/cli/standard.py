"""`flashgen tune --standard`: a whole list of problems into one table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from flashgen.cli import options as shared
from flashgen.errors import InvalidProblem

DONE, FAILED, INTERRUPTED = 0, 1, 130
TAKEN = ("budget", "seconds", "seed", "table", "resume", "as_json")


def tune_list(name: str, part: str | None, request: shared.Request, options: dict[str, Any]) -> int:
    """Bring the device's table up to date with a list. Exit code 130 when stopped: the same command goes on from there."""
    from flashgen import standard, table
    from flashgen.cli.tune import require_writable
    from flashgen.console.progress import TuneProgress
    from flashgen.search import stopped_by_signals
    from flashgen.staleness import tools_in_use

    if request.head_dim is not None or options["families"] or options["compile_only"]:
        raise InvalidProblem("--standard names its problems itself; leave out --head-dim, --family and --compile-only.")
    wishes = standard.part_of(standard.LISTS[name](), part)
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
    counts = Counter(each.how for each in done)
    if options["as_json"]:
        shared.print_json({"schema": "flashgen.standard/1", "list": name, "part": part, "table": str(path), "done": dict(counts)})
    else:
        click.echo(f"{path}: {', '.join(f'{count} {how}' for how, count in counts.items()) or 'nothing done'}")
    return code
