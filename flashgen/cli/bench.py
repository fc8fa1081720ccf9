"""`flashgen bench`: every speed line of the project comes from here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.errors import InvalidProblem, InvalidTable
from flashgen.model import DeviceLimits, ExecutorName, Problem, TableEntry

if TYPE_CHECKING:
    from flashgen.side_by_side import SideBySide

DONE, FAILED = 0, 1
DEFAULT_AGAINST = "sdpa-flash,sdpa-cudnn"


@click.command()
@shared.problem_options
@shared.family_option
@click.option("--against", default=DEFAULT_AGAINST, show_default=True, metavar="NAMES", help="Peers: sdpa-flash, sdpa-cudnn, fa3, fa4.")
@click.option("--rounds", type=int, default=20, show_default=True, help="Interleaved rounds in random order.")
@shared.gpu_option
@shared.seed_option
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Table to read.  [default: all of this GPU]")
@shared.json_option
def bench(**options: Any) -> int:
    """Time table entries beside the peers that are installed.

    Without --head-dim: every measured entry for this GPU. Kernels and peers share their operands and run interleaved in random order with
    a cold L2. A ratio above 1 means that the entry is faster; the interval is that of the paired ratios, at 95 %.
    """
    from flashgen import console, side_by_side
    from flashgen.console import reports

    request = shared.request_of(options)
    against = tuple(dict.fromkeys(name.strip() for name in options["against"].split(",") if name.strip()))
    _check(against, options["rounds"])
    problems = () if request.head_dim is None else request.problems()
    target = shared.target_of(options["gpu"], str(ExecutorName.DEVICE))
    wanted, absent = _entries(problems, target.device, options["families"], options["table"])
    for reason in absent:
        click.echo(reason, err=True)
    found = []
    for number, (problem, entry) in enumerate(wanted, 1):
        click.echo(f"[{number}/{len(wanted)}] {problem}: {entry.variant}", err=True)
        found.append(side_by_side.compare(problem, target.device, [entry.variant], against, options["rounds"], options["seed"]))
        if not options["as_json"]:
            console.show(reports.bench_report(found[-1]))
    if options["as_json"]:
        shared.print_json(_record(target.device, found))
    elif found:
        console.show(reports.bench_summary(side_by_side.geomeans(found), len(found)))
    return FAILED if absent else DONE


def _check(against: Sequence[str], rounds: int) -> None:
    from flashgen.peers import PEERS
    from flashgen.timing import LEAST_ROUNDS

    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise InvalidProblem(f"--against names peers among {', '.join(PEERS)}; got {', '.join(unknown)}.")
    if rounds < LEAST_ROUNDS:
        raise InvalidProblem(f"--rounds must be at least {LEAST_ROUNDS}, below that no difference can be told from luck; got {rounds}.")


def _entries(
    problems: Sequence[Problem], device: DeviceLimits, families: Sequence[str], file: Path | None
) -> tuple[list[tuple[Problem, TableEntry]], list[str]]:
    """(problem, entry that serves it) pairs, and words about problems without one. Raises InvalidTable when nothing is left."""
    from flashgen import near, table
    from flashgen.cli import choose
    from flashgen.table_schema import device_record

    known = choose.tables(file)
    if not problems:
        own = [each for each in known if table.same_device(each.device, device_record(device))]
        entries = [entry for each in own for entry in each.entries if not families or entry.variant.family in families]
        measured = [(entry.problem, entry) for entry in entries if entry.measurement.source == "measured"]
        if not measured:
            raise InvalidTable(f"No table holds a measured entry for {device.name}. Run `flashgen tune --head-dim 128` first.")
        return measured, []
    pairs, absent = [], []
    for problem in problems:
        answer = near.look_up(problem, device, known)
        if answer.found is None:
            absent.append(f"{problem}: no table entry serves it. Run `flashgen tune` with the same options first.")
        else:
            pairs.append((problem, answer.found.entry))
    return pairs, absent


def _record(device: DeviceLimits, found: Sequence[SideBySide]) -> dict[str, Any]:
    from flashgen.side_by_side import geomeans

    def one(each: SideBySide, name: str) -> dict[str, Any]:
        taken, speedup = each.measurements[name], each.speedups.get(name)
        return {
            "name": name, "median_us": taken.median_us, "p10_us": taken.p10_us, "p90_us": taken.p90_us, "tflops": taken.tflops,
            "clock_mhz": list(taken.clock_mhz) if taken.clock_mhz else None, "throttle": list(taken.throttle),
            "speedup": [speedup.median, speedup.low, speedup.high] if speedup else None,
        }  # fmt: skip

    return {
        "schema": "flashgen.bench/1",
        "device": device.name,
        "results": [
            {"problem": str(each.problem), "times": [one(each, name) for name in each.measurements], "missing": each.missing}
            for each in found
        ],
        "geomeans": {peer: {"mean": mean, "least": least, "problems": count} for peer, (mean, least, count) in geomeans(found).items()},
    }
