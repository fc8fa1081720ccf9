"""`flashgen tune`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.errors import FlashgenError, InvalidProblem, NotWritable
from flashgen.model import ExecutorName, Problem

if TYPE_CHECKING:
    from flashgen.console.progress import TuneProgress
    from flashgen.search import TuneResult

DONE, FAILED, INTERRUPTED = 0, 1, 130
PROBE_BYTES = 2**16
"""A search needs at least so much room, for its table and its journal."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be searched, and how."""

    problems: tuple[Problem, ...]
    target: shared.Target
    families: tuple[str, ...]
    budget: int | None
    seconds: float | None
    seed: int
    table: Path | None
    fresh: bool
    as_json: bool


@click.command()
@shared.problem_options
@shared.family_option
@shared.gpu_option
@shared.executor_option
@click.option("--budget", type=int, help="Trials per problem.  [default: 60 on a GPU, 12 without]")
@click.option("--seconds", type=float, help="Limit of the trials' time per problem; the final round comes on top.")
@shared.seed_option
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Table to write.  [default: the device's, in FLASHGEN_HOME]")
@click.option("--resume/--fresh", "resume", default=True, show_default=True, help="Go on with a stopped search, or forget it.")
@click.option("--standard", type=click.Choice(["small", "full"]), help="A standard list of problems instead; may be stopped and resumed.")
@click.option("--part", metavar="I/N", help="With --standard: this part of the list only, such as 2/4.")
@click.option(
    "--within", type=float, metavar="SECONDS", help="With --standard: begin nothing that would hardly end within so many seconds."
)
@click.option("--compile-only", is_flag=True, help="Only fill the cubin store; needs no GPU.")
@shared.json_option
def tune(**options: Any) -> int:
    """Search the fastest exact variant per problem and store it in the table.

    Both masks, 4096 rows, 16 heads, batch 4 and bfloat16 unless said otherwise. Without a GPU the best variants by the cost model are
    compiled for --gpu (default h200), ranked with the compiler's registers and certified by emulation; all times are then predictions.
    """
    request, standard, part, within = shared.request_of(options), *(options.pop(name) for name in ("standard", "part", "within"))
    _check_limits(options["budget"], options["seconds"], within)
    if standard is not None:
        from flashgen.cli.standard import tune_list

        return tune_list(standard, part, within, request, options)
    if part is not None:
        raise InvalidProblem(f"--part divides a standard list; add --standard. Got --part {part}.")
    if within is not None:
        raise InvalidProblem(f"--within limits a standard list; add --standard, or use --seconds. Got --within {within:g}.")
    problems = request.problems()
    compile_only = options.pop("compile_only")
    target = shared.target_of(options.pop("gpu"), str(ExecutorName.EMULATED) if compile_only else options.pop("executor"))
    options.pop("executor", None)
    order = Order(problems, target, fresh=not options.pop("resume"), **options)
    return _compile_only(order) if compile_only else _tune(order)


def _check_limits(budget: int | None, seconds: float | None, within: float | None) -> None:
    for name, value in (("--budget", budget), ("--seconds", seconds), ("--within", within)):
        if value is not None and not value > 0:
            raise InvalidProblem(f"{name} must be more than 0; got {value}.")


def _tune(order: Order) -> int:
    from flashgen import console
    from flashgen.console.progress import TuneProgress
    from flashgen.console.tuned import tune_report

    _check_everything(order)
    progress = TuneProgress()
    if order.target.note:
        progress.note(order.target.note)
    if not order.target.predicted:
        _warn_when_busy()
    found: list[tuple[TuneResult, tuple[str, ...]]] = []
    try:
        for number, problem in enumerate(order.problems, 1):
            with progress.running(number, len(order.problems), problem):
                result = _search(order, problem, progress)
            found.append((result, _against_sdpa(result)))
            if not order.as_json:
                console.show(tune_report(*found[-1]))
            if result.partial:
                return INTERRUPTED
    finally:
        if order.as_json:
            shared.print_json({"schema": "flashgen.tune/1", "results": [_record(*each) for each in found]})
    return DONE


def _search(order: Order, problem: Problem, progress: TuneProgress) -> TuneResult:
    from flashgen import search

    return search.tune(
        problem, order.target.device, budget=order.budget, seconds=order.seconds, seed=order.seed, executor=order.target.executor,
        fresh=order.fresh, table=order.table, families=order.families or None, progress=progress,
    )  # fmt: skip


def _check_everything(order: Order) -> None:
    """Raise what is wrong with any of the problems, the tools or the table before anything is written."""
    from flashgen import search, table
    from flashgen.compiler import binding

    for problem in order.problems:
        search.bind_families(problem, order.target.device, order.families or None)
    path = order.table or table.table_path(order.target.device)
    if path.exists():
        table.read(path, strict=True, check=search.space_check)
    binding()
    if order.target.predicted:
        from flashgen.emulate import shared_emulator

        shared_emulator()
    require_writable(path)


def require_writable(path: Path) -> None:
    """Raise NotWritable when no table can be written at `path`. Leaves nothing behind."""
    directory = path.parent
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as probe:
            probe.write(b"\0" * PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as problem:
        raise NotWritable(
            f"{path} cannot be written ({problem.strerror or problem}: {directory}). "
            "Choose another file with --table, or set FLASHGEN_HOME to a writable directory with free space."
        ) from problem


def _warn_when_busy() -> None:
    from flashgen import bench

    with contextlib.suppress(FlashgenError):
        bench.warn_when_busy()


def _against_sdpa(result: TuneResult) -> tuple[str, ...]:
    """How the new entry stands beside torch's SDPA, on a GPU."""
    if result.executor is ExecutorName.EMULATED or result.entry is None or result.partial:
        return ()
    from flashgen.side_by_side import compare

    try:
        return tuple(compare(result.problem, result.device, [result.entry.variant], ("sdpa-flash",)).lines())
    except FlashgenError as problem:  # the entry is written; a peer must not undo that
        return (f"no comparison: {problem}",)


def _compile_only(order: Order) -> int:
    from flashgen import console, search
    from flashgen.compiler import binding, default_store
    from flashgen.console.progress import TuneProgress

    binding()
    for problem in order.problems:
        search.bind_families(problem, order.target.device, order.families or None)
    require_writable(default_store().path / "probe")
    trials = []
    progress = TuneProgress()
    for number, problem in enumerate(order.problems, 1):
        with progress.running(number, len(order.problems), problem):
            budget = order.budget or search.DEFAULT_BUDGET[ExecutorName.DEVICE]
            trials += search.compile_ahead(problem, order.target.device, budget=budget, families=order.families or None, progress=progress)
    held = default_store().statistics()
    compiled = sum(trial.report is not None for trial in trials)
    record = {
        "schema": "flashgen.compile/1", "device": order.target.device.name, "compiled": compiled, "failed": len(trials) - compiled,
        "store": str(held.path), "kernels": held.kernels, "bytes": held.bytes,
    }  # fmt: skip
    if order.as_json:
        shared.print_json(record)
    else:
        click.echo(f"{compiled} kernels for {console.device_text(order.target.device)}; {len(trials) - compiled} did not compile.")
        click.echo(f"{held.path}: {held.kernels} kernels, {console.size(held.bytes)}")
    return DONE if compiled == len(trials) else FAILED


def _record(result: TuneResult, comparison: Sequence[str]) -> dict[str, Any]:
    """One result for machines: the entry as the table has it, and every trial."""
    from flashgen.table_schema import to_raw

    return {
        "problem": str(result.problem),
        "device": result.device.name,
        "executor": str(result.executor),
        "times": "predicted" if result.executor is ExecutorName.EMULATED else "measured",
        "partial": result.partial,
        "seconds": round(result.seconds, 2),
        "table": str(result.change.path) if result.change else None,
        "written": bool(result.change and result.change.written),
        "change": result.change.describe() if result.change else None,
        "entry": to_raw(result.entry) if result.entry else None,
        "outcomes": {str(outcome): count for outcome, count in result.outcomes().items()},
        "trials": [
            {
                "family": trial.variant.family, "params": trial.variant.as_dict(), "outcome": str(trial.outcome), "detail": trial.detail,
                "median_us": trial.measurement.median_us if trial.measurement else None,
                "registers": trial.report.registers if trial.report else None,
                "spill_bytes": trial.report.spill_bytes if trial.report else None,
            }
            for trial in result.trials
        ],
        "against": list(comparison),
        "journal": str(result.journal) if result.journal else None,
    }  # fmt: skip
