"""`flashgen table`: what is shipped, made readable, checkable and mergeable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.errors import FlashgenError, InvalidTable

if TYPE_CHECKING:
    from flashgen.model import DeviceLimits, TableEntry
    from flashgen.staleness import Assessment

DONE, FAILED = 0, 1
MOST_FAULTS = 10

gpu_option = click.option("--gpu", metavar="NAME", help="The device to look at, which need not be present.  [default: the table's own]")


@click.group()
def table() -> None:
    """List, check, compare, merge, refresh and export tuned tables.

    A TABLE is a file, or the name of one of the user's or the shipped tables, such as nvidia-h200.
    """


@table.command("list")
@shared.json_option
def list_(as_json: bool) -> int:
    """Print all tables, the user's and the shipped ones, and which entries give way to others."""
    from flashgen import console, table_tools
    from flashgen import table as tables
    from flashgen.console import shipping

    rows: list[tuple[Path, str, tables.Table | None, str]] = []
    for path in table_tools.find(()):
        try:
            rows.append((path, table_tools.origin(path), tables.read(path, strict=True), ""))
        except InvalidTable as problem:
            rows.append((path, table_tools.origin(path), None, str(problem)))
    hidden = table_tools.shadowed([found for _, _, found, _ in rows if found])
    if as_json:
        listed = [
            {
                "table": str(path), "whose": whose, "device": found.device.name if found else None,
                "entries": len(found.entries) if found else 0, "fault": fault,
                "measured": sum(entry.measurement.source == "measured" for entry in found.entries) if found else 0,
            }
            for path, whose, found, fault in rows
        ]  # fmt: skip
        gives_way = [{"problem": str(entry.problem), "table": str(loser), "to": str(winner)} for entry, loser, winner in hidden]
        shared.print_json({"schema": "flashgen.tables/1", "tables": listed, "shadowed": gives_way})
    else:
        console.show(shipping.list_report(rows, hidden))
    return FAILED if any(fault for *_, fault in rows) else DONE


@table.command()
@click.argument("name", metavar="TABLE")
@shared.json_option
def show(name: str, as_json: bool) -> int:
    """Print the entries of a table."""
    from flashgen import console, table_tools
    from flashgen import table as tables
    from flashgen.console import shipping
    from flashgen.table_schema import to_raw

    found = tables.read(table_tools.find([name])[0], strict=True)
    if as_json:
        entries = [{"problem": str(entry.problem), **to_raw(entry)} for entry in found.entries]
        shared.print_json({"schema": "flashgen.entries/1", "device": found.device.name, "entries": entries})
    else:
        console.show(shipping.show_report(found))
    return DONE


@table.command()
@click.argument("names", metavar="[TABLE]…", nargs=-1)
@gpu_option
@click.option("--compile", "recompile", is_flag=True, help="Compile every entry, and compare its machine code with the certified one.")
@click.option("--reseal", is_flag=True, help="After an edit by hand: write the integrity digest anew, then check.")
@shared.json_option
def check(names: tuple[str, ...], gpu: str | None, recompile: bool, reseal: bool, as_json: bool) -> int:
    """Check tables: format, digests, certificates, and constraints on their own device or on --gpu. Exit code 1 when one fails.

    Without names all tables are checked. What is only older or foreign is noted and passes. Where a text or the compiler has changed, the
    entry is compiled, and its certificate carries over when the machine code is the same; that needs NVRTC, but no GPU.
    """
    from flashgen import console, search, table_tools
    from flashgen import table as tables
    from flashgen.console import shipping

    records, failed = [], False
    for path in table_tools.find(names):
        fault = ""
        assessed: tuple[Assessment, ...] = ()
        try:
            if reseal:
                tables.reseal(path, check=search.space_check)
            assessed = _assessed(path, gpu, recompile)
        except InvalidTable as problem:
            fault = str(problem)
        failed |= bool(fault) or any(each.state.fails for each in assessed)
        if as_json:
            records.append({"table": str(path), "fault": fault, "entries": [_check_record(each) for each in assessed]})
        else:
            console.show(shipping.check_report(path, assessed, fault))
    if as_json:
        shared.print_json({"schema": "flashgen.check/1", "passed": not failed, "tables": records})
    return FAILED if failed else DONE


def _assessed(path: Path, gpu: str | None, recompile: bool) -> tuple[Assessment, ...]:
    from flashgen import search, staleness, table_tools
    from flashgen import table as tables
    from flashgen.compiler import compile_source

    found = tables.read(path, strict=False, check=search.space_check)
    if found.skipped:
        raise InvalidTable("\n  ".join(found.skipped[:MOST_FAULTS]))
    device = _device(gpu) or table_tools.limits_of(found.device)
    tools = staleness.tools_in_use()
    return staleness.assess_table(found, device, tools, compile_source if tools.nvrtc else None, recompile=recompile)


def _device(gpu: str | None) -> DeviceLimits | None:
    from flashgen import device

    return None if gpu is None else device.resolve(gpu)


def _check_record(each: Assessment) -> dict[str, Any]:
    return {
        "problem": str(each.entry.problem), "state": str(each.state), "reason": each.reason,
        "notes": [{"note": str(note), "words": words} for note, words in each.notes],
    }  # fmt: skip


@table.command()
@click.argument("old", metavar="OLD")
@click.argument("new", metavar="NEW")
@shared.json_option
def diff(old: str, new: str, as_json: bool) -> int:
    """Print what became faster, slower, new or gone from table OLD to table NEW. Exit code 1 when something is slower or gone."""
    from flashgen import console, table_tools
    from flashgen import table as tables
    from flashgen.console import shipping

    before, after = (tables.read(path, strict=True) for path in table_tools.find([old, new]))
    changes = table_tools.diff(before, after)
    if as_json:
        shared.print_json({"schema": "flashgen.diff/1", "changes": table_tools.diff_record(changes)})
    else:
        console.show(shipping.diff_report(changes))
    worse = (table_tools.Difference.SLOWER, table_tools.Difference.GONE)
    return FAILED if any(each.difference in worse for each in changes) else DONE


@table.command()
@click.argument("into", metavar="INTO", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("names", metavar="TABLE…", nargs=-1, required=True)
@shared.json_option
def merge(into: Path, names: tuple[str, ...], as_json: bool) -> int:
    """Put the entries of tables of one device into the table INTO. No problem is lost.

    Of two entries for one problem the one with more evidence stays: measured over predicted, certified on a device, proved with the newer
    NVRTC, then the lower median where it is lower by more than the spread; else the one of INTO.
    """
    from flashgen import console, search, table_tools
    from flashgen import table as tables
    from flashgen.console import shipping

    sources = [tables.read(path, strict=True, check=search.space_check) for path in table_tools.find(names)]
    merged, conflicts = table_tools.merge(into, sources)
    if as_json:
        told = [
            {"problem": str(each.kept.problem), "kept_us": _us(each.kept), "dropped_us": _us(each.dropped), "rule": each.rule}
            for each in conflicts
        ]
        shared.print_json({"schema": "flashgen.merge/1", "table": str(into), "entries": len(merged.entries), "conflicts": told})
    else:
        console.show(shipping.merge_report(into, len(merged.entries), conflicts))
    return DONE


def _us(entry: TableEntry) -> float:
    return entry.measurement.median_us


@table.command()
@click.argument("name", metavar="TABLE")
@click.option("--all", "everything", is_flag=True, help="Also entries that are valid as they are.")
@click.option("--part", metavar="I/N", help="This part of the table only, such as 2/4.")
@shared.executor_option
@shared.seed_option
@shared.json_option
def refresh(name: str, everything: bool, part: str | None, executor: str, seed: int, as_json: bool) -> int:
    """Prove and time entries of a table anew, without searching; stop and resume as you like. Exit code 1 when one cannot be kept.

    Certificates of unchanged machine code carry over first, which needs no GPU. The rest needs the table's GPU; predicted entries are
    predicted anew anywhere.
    """
    from flashgen.cli.refresh import refresh_table

    return refresh_table(name, everything, part, executor, seed, as_json)


@table.command()
@click.argument("names", metavar="TABLE|STUDY…", nargs=-1, required=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: stdout]")
def export(names: tuple[str, ...], out: Path | None) -> int:
    """Write tables, or a study's every trial (a .jsonl file), as T4 results: the JSON that Kernel Tuner's tools read."""
    from flashgen import t4, table_tools
    from flashgen import table as tables
    from flashgen.study import read_study

    results: list[dict[str, Any]] = []
    for each in names:
        if each.endswith(".jsonl"):
            results += t4.of_study(read_study(Path(each)))["results"]
        else:
            results += t4.of_tables([tables.read(table_tools.find([each])[0], strict=True)])["results"]
    text = json.dumps({"schema_version": t4.VERSION, "results": results}, indent=1)
    if out is None:
        click.echo(text)
        return DONE
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as problem:
        raise _not_writable(out, problem) from problem
    return DONE


def _not_writable(path: Path, problem: OSError) -> FlashgenError:
    from flashgen.errors import NotWritable

    return NotWritable(f"{path} cannot be written: {problem.strerror}. Choose another place.")


@table.command()
@click.argument("log", type=click.Path(path_type=Path))
@shared.gpu_option
@click.option("--table", "names", multiple=True, metavar="TABLE", help="Look in this table only; repeatable.  [default: all]")
@shared.json_option
def coverage(log: Path, gpu: str, names: tuple[str, ...], as_json: bool) -> int:
    """Print how a log of problems is served: exactly, by a near entry, or by the fallback; and the commands that tune the rest.

    LOG is what `flashgen.record_problems(path)` wrote: one JSON object per line with dtype, head_dim, head_dim_v, batch, heads_q, heads_kv,
    seqlen_q, seqlen_kv, and where they differ from the default mask, alignment, left, right, op, deterministic, count.
    """
    from flashgen import console, table_tools, traffic
    from flashgen import table as tables
    from flashgen.console import shipping

    device = shared.target_of(gpu, "emulated").device
    known = [tables.read(path, strict=True) for path in table_tools.find(names)]
    covered = traffic.coverage(traffic.read(log), device, known)
    if as_json:
        shared.print_json(traffic.coverage_record(covered, device))
    else:
        console.show(shipping.coverage_report(covered, traffic.tune_commands(covered, "" if gpu == "auto" else gpu)))
    return DONE
