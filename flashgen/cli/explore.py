"""`flashgen explore`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from flashgen.cli import options as shared
from flashgen.errors import InvalidProblem, UnsupportedProblem
from flashgen.model import ExecutorName, Op

DONE = 0
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20}


def _sizes(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Sizes separated by commas, such as 48K,99K,232448."""
    return tuple(_size(part) for part in text.split(",")) if text else ()


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KkMmBb]?)(?:i?[Bb])?", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no size; write bytes or 48K, 227K, separated by commas.")
    return int(match[1]) * _UNITS[match[2].upper()]


@click.command()
@shared.problem_options
@shared.family_option
@shared.gpu_option
@click.option("--sram", callback=_sizes, metavar="SIZE,…", help="Shared memory per CTA, such as 48K,99K,227K.  [default: those of GPUs]")
@click.option(
    "--measured",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Measured times: a table (.yaml), a study (.jsonl), or a folder of studies with their spaces.  [default: the tables]",
)
@click.option("--compile", "compile_best", type=click.IntRange(0, 200), default=0, metavar="N", help="Compile the N best: real registers.")
@click.option("--compare/--no-compare", default=True, show_default=True, help="Run exact and approximate methods on one input.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the report as one HTML page.")
@shared.json_option
def explore(**options: Any) -> int:
    """Show which tiles fit which shared memory, what they take and move, and what binds.

    Needs no GPU. The first --seqlen is explored in full; all of them (default: 128 to 32768) are steps of the report's slider. Full
    attention, unless --causal or --window is given.
    """
    from flashgen import console, explorer
    from flashgen.console import explored

    request = shared.request_of(options)
    problem = request.problems()[0]
    if problem.op is not Op.FORWARD:
        raise UnsupportedProblem(f"explore accounts for forward kernels; got --op {problem.op}. `flashgen show space` shows the others.")
    if options["out"] is not None and not options["out"].parent.is_dir():
        raise InvalidProblem(f"--out {options['out']}: the folder {options['out'].parent} does not exist. Make it first.")
    device = shared.target_of(options["gpu"], str(ExecutorName.EMULATED)).device
    found = explorer.explore(
        problem, device, families=options["families"], capacities=options["sram"], measured_from=options["measured"],
        lengths=request.seqlen if len(request.seqlen) > 1 else (), compile_best=options["compile_best"], compare=options["compare"],
    )  # fmt: skip
    size = None
    if options["out"] is not None:
        from flashgen.explorer_page import write_page

        size = write_page(found, options["out"])
    if options["as_json"]:
        click.echo(json.dumps(explorer.record(found), indent=1))
        return DONE
    console.show(explored.exploration_report(found))
    if size is not None:
        click.echo(f"{options['out']}: {console.size(size)}, one page; open it in a browser")
    return DONE
