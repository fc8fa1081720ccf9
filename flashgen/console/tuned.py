"""The result of a search, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from flashgen.console import PREDICTED, certificate_text, device_text, duration, facts, microseconds, params_text, plain_table, tally
from flashgen.console.reports import wide_text
from flashgen.model import ExecutorName, Measurement, Outcome, Variant, Verdict

if TYPE_CHECKING:
    from flashgen.search import TuneResult
    from flashgen.table import Change

TOP = 8


def tune_report(result: TuneResult, comparison: Sequence[str] = ()) -> RenderableType:
    """One search: heading, best variants, entry, change of the table."""
    predicted = result.executor is ExecutorName.EMULATED
    kind = Text(PREDICTED, "yellow") if predicted else Text("measured", "green")
    heading = Text.assemble((f"{result.problem}", "bold"), f"\n{device_text(result.device)}: ", kind)
    shown: list[tuple[str, RenderableType]] = [("trials", Text.assemble(tally(result.outcomes()), f" in {duration(result.seconds)}"))]
    if result.partial:
        shown.append(("state", Text("interrupted: nothing was written; run the same command to go on", "yellow")))
    if result.entry is not None:
        shown.append(("exact", certificate_text(result.entry.certificate)))
        if result.entry.measurement.wide_scores_us:
            shown.append(("wide", Text(wide_text(result.entry.measurement))))
    shown += [("against", Text(line)) for line in comparison]
    if result.change is not None:
        shown.append(("entry", change_text(result.change)))
        shown.append(("table", str(result.change.path)))
    return Group(heading, Text(), top_table(result, predicted), Text(), facts(shown), Text())


def change_text(change: Change) -> Text:
    """What happened to the table: the difference to the old entry, or the new one."""
    if change.written and change.old is None:
        return Text(f"added: {change.new.variant.family} {params_text(change.new.variant)}")
    head, *lines = change.describe().splitlines()
    if change.written and change.old is not None and "nothing but its date" in lines[-1]:
        return Text("the same as before, certified anew")
    return Text("\n".join([head.partition(":")[0], *(line.strip() for line in lines)]))


def top_table(result: TuneResult, predicted: bool) -> RenderableType:
    """The best variants; what they have in common is said once."""
    reports = {trial.variant: trial.report for trial in result.trials}
    rows = _ranked(result)[:TOP]
    if not rows:
        return Text("No variant ran.", "red")
    variants = [variant for variant, _, _ in rows]
    common, families = _common(variants), {variant.family for variant in variants}
    numbers = ("", "predicted µs" if predicted else "median µs", "TFLOP/s", "regs", "spill B")
    table = plain_table(*numbers, "certified", f"variant of {variants[0].family}" if len(families) == 1 else "variant", right=numbers)
    for number, (variant, measurement, verdict) in enumerate(rows, 1):
        report = reports.get(variant)
        spread = "" if predicted or not measurement.spread else f" ±{measurement.spread / 2:.1%}"
        varying = params_text(variant, (name for name in variant.as_dict() if name not in common[variant.family]))
        table.add_row(
            f"{number}", f"{microseconds(measurement.median_us)}{spread}", f"{measurement.tflops:.1f}",
            f"{report.registers}" if report else "", f"{report.spill_bytes}" if report else "", verdict,
            Text(varying if len(families) == 1 else f"{variant.family} {varying}".strip()), style="bold" if number == 1 else "",
        )  # fmt: skip
    first = {variant.family: variant for variant in reversed(variants)}
    agreed = {f"all of {family}" if len(families) > 1 else "all": params_text(first[family], same) for family, same in common.items()}
    shared = [f"{name}: {text}" for name, text in agreed.items() if text]
    return Group(table, *(Text(line, "dim") for line in shared))


def _ranked(result: TuneResult) -> list[tuple[Variant, Measurement, Text]]:
    """(variant, measurement, verdict): finalists in their order, then the other good trials by time."""
    rows = []
    for finalist in result.finalists:
        if finalist.measurement is not None:
            exact = finalist.certificate.verdict is Verdict.EXACT
            role = "" if finalist.role == "challenger" else f", {finalist.role}"
            rows.append(
                (finalist.variant, finalist.measurement, Text(f"{finalist.certificate.verdict}{role}", "green" if exact else "red"))
            )
    named = {variant for variant, _, _ in rows}
    refused = {finalist.variant for finalist in result.finalists if finalist.certificate.verdict is not Verdict.EXACT}
    quick = Text("-" if result.executor is ExecutorName.EMULATED else "quickly", "dim")
    good = [(trial.variant, trial.measurement) for trial in result.trials if trial.outcome is Outcome.OK and trial.measurement]
    others = [(variant, measurement, quick) for variant, measurement in good if variant not in named | refused]
    return rows + sorted(others, key=lambda row: (row[1].median_us, str(row[0])))


def _common(variants: Sequence[Variant]) -> dict[str, tuple[str, ...]]:
    """Per family the parameters on which all its variants agree; none for a variant that is alone."""
    found: dict[str, tuple[str, ...]] = {}
    for family in dict.fromkeys(variant.family for variant in variants):
        members = [variant.as_dict() for variant in variants if variant.family == family]
        agreed = (name for name in members[0] if all(member[name] == members[0][name] for member in members))
        found[family] = tuple(agreed) if len(members) > 1 else ()
    return found
