"""`flashgen table refresh`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from flashgen.cli import options as shared
from flashgen.errors import FlashgenError, InvalidProblem
from flashgen.model import ExecutorName, TableEntry

DONE, FAILED = 0, 1


def refresh_table(name: str, everything: bool, part: str | None, executor: str, seed: int, as_json: bool) -> int:
    """Carry over what can be, prove and time the rest. Exit code 1 when an entry stays stale."""
    from flashgen import device, search, staleness, standard, table, table_tools
    from flashgen.compiler import compile_source
    from flashgen.table_schema import device_record

    (path,) = table_tools.find([name])
    of = table.read(path, strict=True, check=search.space_check)
    limits = table_tools.limits_of(of.device)
    tools = staleness.tools_in_use()
    assessed = staleness.assess_table(of, limits, tools, compile_source if tools.nvrtc else None)
    carried = [each for each in assessed if each.state is staleness.State.CARRIED]
    if carried:
        table.update(path, of.device, lambda entries: staleness.carry(entries, assessed, tools.nvrtc))
    wanted = [each.entry for each in assessed if each.state.fails or each.altered or (everything and each not in carried)]
    wanted = wanted if part is None else _part(wanted, part)
    on_gpu = executor != ExecutorName.EMULATED and device.is_present() and table.same_device(of.device, device_record(device.present()))
    runs = [each for each in wanted if on_gpu or each.measurement.source == "predicted"]
    stale = [each.entry for each in assessed if each.state.fails]
    failed = {str(each.problem): "needs the table's GPU" for each in wanted if each in stale and each not in runs}
    done = 0
    who = ExecutorName.DEVICE if on_gpu else ExecutorName.EMULATED
    for entry, outcome in standard.refresh(of, runs, device.present() if on_gpu else limits, who, seed=seed):
        if isinstance(outcome, FlashgenError):
            failed[str(entry.problem)] = str(outcome).splitlines()[0]
        else:
            done += 1
        click.echo(f"{done + len(failed)} of {len(wanted)}: {entry.problem}", err=True)
    if as_json:
        record = {"schema": "flashgen.refresh/1", "table": str(path), "carried": len(carried), "refreshed": done, "failed": failed}
        shared.print_json(record)
    else:
        click.echo(f"{path}: {len(carried)} certificates carried over, {done} entries refreshed, {len(failed)} not")
        for problem, reason in failed.items():
            click.echo(f"  {problem}: {reason}")
    return FAILED if failed else DONE


def _part(entries: Sequence[TableEntry], part: str) -> list[TableEntry]:
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise InvalidProblem(f"A part is written 2/4, the second of four; got {part!r}.")
    return list(entries[int(number) - 1 :: int(count)])
