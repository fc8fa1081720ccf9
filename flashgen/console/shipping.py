"""Tables, their checks and differences, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from flashgen.console import microseconds, params_text, plain_table
from flashgen.staleness import Assessment, State
from flashgen.table_tools import Changed, Conflict, Difference

if TYPE_CHECKING:
    from flashgen.model import TableEntry
    from flashgen.table import Table
    from flashgen.traffic import Covered

_STATE = {
    State.VALID: "green", State.CARRIED: "green", State.UNCHECKED: "yellow", State.REPROVE: "red", State.STALE: "red", State.REFUSED: "red",
}  # fmt: skip
MOST_LINES = 20  # of one state in a check
_DIFFERENCE = {Difference.FASTER: "green", Difference.NEW: "green", Difference.SLOWER: "red", Difference.GONE: "red"}


def list_report(rows: Sequence[tuple[Path, str, Table | None, str]], hidden: Sequence[tuple[TableEntry, Path, Path]]) -> RenderableType:
    """Table files: whose, device, entries, or what is wrong."""
    table = plain_table("table", "whose", "device", "measured", "predicted", "", right=("measured", "predicted"))
    for path, whose, found, fault in rows:
        if found is None:
            table.add_row(path.stem, whose, "", "", "", Text(fault, "red"))
            continue
        sources = Counter(entry.measurement.source for entry in found.entries)
        name = f"{found.device.name} (sm_{found.device.sm})"
        table.add_row(path.stem, whose, name, f"{sources['measured']}", f"{sources['predicted']}", Text(str(path), "dim"))
    lines = [Text(f"{entry.problem}: {loser} gives way to {winner}", "dim") for entry, loser, winner in hidden]
    return Group(table, *lines) if rows else Text("There is no table yet. `flashgen tune --head-dim 128` begins one.")


def show_report(found: Table) -> RenderableType:
    """The entries of one table."""
    table = plain_table("problem", "µs", "TFLOP/s", "", "certificate", "variant", right=("µs", "TFLOP/s"))
    for entry in found.entries:
        taken = entry.measurement
        kind = Text("predicted", "yellow") if taken.source == "predicted" else Text(f"±{taken.spread / 2:.1%}", "dim")
        variant = Text(f"{entry.variant.family} {params_text(entry.variant)}")
        proof = f"{entry.certificate.cases} cases, {entry.certificate.executor}"
        table.add_row(str(entry.problem), microseconds(taken.median_us), f"{taken.tflops:.1f}", kind, proof, variant)
    return Group(Text.assemble((found.device.name, "bold"), (f"  {found.path}", "dim")), table)


def check_report(path: Path, assessed: Sequence[Assessment], fault: str) -> RenderableType:
    """One checked table: the whole in one line, then what is not valid, then notes by kind."""
    if fault:
        return Text.assemble(("failed  ", "bold red"), fault if fault.startswith(str(path)) else f"{path}: {fault}")
    states = Counter(each.state for each in assessed)
    failed = any(each.state.fails for each in assessed)
    head = Text.assemble(
        ("failed  ", "bold red") if failed else ("passed  ", "bold green"),
        f"{path}: {len(assessed)} entries, " + ", ".join(f"{count} {state}" for state, count in states.items()),
    )
    lines: list[RenderableType] = []
    for state in (each for each in State if each is not State.VALID):
        of_it = [each for each in assessed if each.state is state]
        style = _STATE.get(state, "")
        lines += [Text.assemble((f"  {state}  ", style), f"{each.entry.problem}: {each.reason}") for each in of_it[:MOST_LINES]]
        if len(of_it) > MOST_LINES:
            lines.append(Text.assemble((f"  {state}  ", style), f"and {len(of_it) - MOST_LINES} more; --json names all"))
    notes = Counter(words for each in assessed for words in each.notes)
    lines += [Text(f"  note  {count} × {note}: {words}", "dim") for (note, words), count in notes.items()]
    return Group(head, *lines)


def diff_report(changes: Sequence[Changed]) -> RenderableType:
    """Two tables: what changed, worst first within its kind; the same entries are only counted."""
    table = plain_table("", "problem", "old µs", "new µs", "new / old", "", right=("old µs", "new µs", "new / old"))
    for each in changes:
        if each.difference is Difference.SAME:
            continue
        old, new = (microseconds(side.measurement.median_us) if side else "" for side in (each.old, each.new))
        ratio = "" if each.ratio is None else f"{each.ratio:.3f}"
        kind = Text(str(each.difference), _DIFFERENCE.get(each.difference, "yellow"))
        table.add_row(kind, str(each.entry.problem), old, new, ratio, Text(each.words, "dim"))
    counts = Counter(each.difference for each in changes)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "both tables are empty"
    return Group(*([table] if table.row_count else []), Text(summary))


def merge_report(path: Path, entries: int, conflicts: Sequence[Conflict]) -> RenderableType:
    """What a merge did."""
    lines = []
    for each in conflicts:
        kept, dropped = (microseconds(entry.measurement.median_us) for entry in (each.kept, each.dropped))
        lines.append(Text(f"  {each.kept.problem}: kept {kept} µs over {dropped} µs: {each.rule}"))
    return Group(Text(f"{path}: {entries} entries, {len(conflicts)} conflicts"), *lines)


def coverage_report(covered: Sequence[Covered], commands: Sequence[str]) -> RenderableType:
    """How a log of problems is served."""
    total = sum(each.count for each in covered)
    table = plain_table("calls", "problem", "served", "by", right=("calls",))
    styles = {"exact": "green", "near": "green", "fallback": "yellow", "nothing": "red"}
    counts: Counter[str] = Counter()
    for each in covered:
        counts[str(each.cover)] += each.count
        by = f"entry for {each.found.entry.problem}" if each.found else each.why
        table.add_row(f"{each.count}", str(each.problem), Text(str(each.cover), styles[str(each.cover)]), Text(by, "dim"))
    shares = ", ".join(f"{count} {cover} ({count / total:.0%})" for cover, count in counts.items()) if total else "the log is empty"
    tune = [Text("to tune the rest:"), *(Text(f"  {command}") for command in commands)] if commands else []
    return Group(table, Text(f"{total} calls: {shares}"), *tune)
