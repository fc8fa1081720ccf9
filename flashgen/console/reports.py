"""Tables and lines of the commands other than `tune`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from flashgen.console import certificate_text, device_text, facts, microseconds, params_text, plain_table, size
from flashgen.model import Certificate, DeviceLimits, Measurement, Problem, Resources, Variant, Verdict

if TYPE_CHECKING:
    from flashgen.certify import CaseResult
    from flashgen.compare import UlpHistogram
    from flashgen.cubins import StoreStatistics
    from flashgen.doctor import Advice, Findings, Library
    from flashgen.side_by_side import SideBySide
    from flashgen.space import BoundSpace, Space
    from flashgen.table import Lookup

BAR_CELLS = 40


# certify --------------------------------------------------------------------------------------------------------------


def certificate_report(problem: Problem, variant: Variant, certificate: Certificate) -> RenderableType:
    """A certificate, or why there is none."""
    exact = certificate.verdict is Verdict.EXACT
    verdict = Text("EXACT", "bold green") if exact else Text("INEXACT", "bold red")
    rows: list[tuple[str, RenderableType]] = [
        ("kernel", Text(f"{variant.family} {params_text(variant)}")),
        ("verdict", verdict if exact else Text(certificate.failure, "red")),
        ("cases", f"{certificate.cases}, {certificate.bitwise_cases} of them bit for bit ({certificate.suite})"),
        ("executor", str(certificate.executor)),
        ("worst error", f"{certificate.worst_error_ratio:.3f} of the allowed 2.000 ({certificate.worst_case})"),
        _beside_the_bound(certificate),
    ]
    return Group(Text.assemble((str(problem), "bold"), "  ", verdict), facts(rows), Text())


def _beside_the_bound(certificate: Certificate) -> tuple[str, str]:
    if certificate.deterministic is None:
        return "lse error", f"{certificate.lse_abs_error:.2e} of the allowed 1e-05"
    return "deterministic", "yes, bit for bit" if certificate.deterministic else "no: sums come in any order"


def case_report(result: CaseResult) -> RenderableType:
    """One case."""
    verdict = Text("failed", "bold red") if result.failure else Text("passed", "bold green")
    line = f"  error {result.ratio:.3f} of the allowed 2.000, largest {result.max_error:.3g}, lse {result.lse_error:.2e}"
    return Group(Text.assemble((result.name, "bold"), "  ", verdict, line), *([Text(result.failure)] if result.failure else []))


def histogram_report(left: Variant, right: Variant, histogram: UlpHistogram) -> RenderableType:
    """How far two kernels lie apart."""
    total = sum(count for _, _, count in histogram.buckets) or 1
    table = plain_table("ulp apart", "elements", "share", "", right=("ulp apart", "elements", "share"))
    for low, high, count in histogram.buckets:
        bar = "█" * round(BAR_CELLS * count / total) or "▏" * (count > 0)
        table.add_row(f"{low}" if low == high else f"{low}-{high}", f"{count:,}", f"{count / total:.4%}", Text(bar, "cyan"))
    repeats = [Text("repeats its bits", "green") if same else Text("DOES NOT REPEAT ITS BITS", "bold red") for same in histogram.repeats]
    kernels = facts(
        (name, Text.assemble(f"{variant.family} {params_text(variant)}  ", repeat))
        for name, variant, repeat in zip(("left", "right"), (left, right), repeats, strict=True)
    )
    return Group(kernels, Text(), table, Text(f"largest: {histogram.largest} ulp, in case {histogram.where}", "dim"), Text())


# show -----------------------------------------------------------------------------------------------------------------


def wide_text(taken: Measurement) -> str:
    """The time on wide scores beside that on ordinary ones."""
    wide = taken.wide_scores_us or 0.0
    return f"{microseconds(wide)} µs on scores of standard deviation 16, {wide / taken.median_us:.2f} of the time on 1"


def entry_report(problem: Problem, device: DeviceLimits, answer: Lookup) -> RenderableType:
    """The entry that serves a problem, and how it was found."""
    heading = Text.assemble((str(problem), "bold"), f" on {device_text(device)}")
    steps = Text(answer.explain(), "dim")
    if answer.found is None:
        return Group(heading, Text("no entry", "yellow"), steps, Text())
    entry = answer.found.entry
    taken, origin = entry.measurement, entry.provenance
    how = f"{taken.source}, {taken.samples} samples, spread {taken.spread:.1%}" if taken.source == "measured" else "predicted, not measured"
    rows: list[tuple[str, RenderableType]] = [
        ("variant", Text(f"{entry.variant.family} {params_text(entry.variant)}")),
        ("tuned for", str(entry.problem)),
        ("time", f"{microseconds(taken.median_us)} µs, {taken.tflops:.1f} TFLOP/s ({how})"),
        *([("wide scores", wide_text(taken))] if taken.wide_scores_us else []),
        ("certificate", certificate_text(entry.certificate)),
        ("search", f"{origin.sampler}, seed {origin.seed}, {origin.asks} trials, {origin.measured} measured"),
        ("made", f"{origin.created}, flashgen {origin.flashgen}"),
        ("tools", f"NVRTC {origin.nvrtc or '-'}, driver {origin.driver or '-'}, CuPy {origin.cupy or '-'}"),
        ("source", entry.source_digest),
        ("table", str(answer.found.path)),
    ]
    return Group(heading, facts(rows), steps, Text())


def space_report(space: Space, problems: Sequence[Problem], device: DeviceLimits) -> RenderableType:
    """A search space: what it takes, its parameters, its constraints, and how many variants fit the problems."""
    head = (
        f"  sm_{space.min_sm} and newer; {', '.join(space.dtypes)}; masks {', '.join(space.masks)}; "
        f"head dims {space.head_dim.min} to {space.head_dim.max} in steps of {space.head_dim.multiple_of}"
    )
    parameters = plain_table("parameter", "choices", "meaning")
    for each in space.parameters:
        parameters.add_row(
            each.name, " ".join(str(int(value)) for value in each.choices), Text("; ".join(filter(None, (each.unit, each.note))), "dim")
        )
    constraints = plain_table("constraint", "holds", "why")
    for rule in (*space.definition.static, *space.definition.compiled):
        constraints.add_row(rule.name, rule.holds.text, Text(rule.why, "dim"))
    parts: list[RenderableType] = [Text.assemble((space.family, "bold"), head), Text(), parameters, Text(), constraints, Text()]
    for problem in problems:
        reason = space.unsupported(problem, device)
        count = "" if reason else f"{len(space.bind(problem, device).feasible()):,} feasible variants"
        parts.append(Text.assemble(f"{problem} on {device_text(device)}: ", (reason or count, "yellow" if reason else "green")))
    return Group(*parts, Text())


def point_report(bound: BoundSpace, variant: Variant, reasons: Sequence[str], taken: Resources) -> RenderableType:
    """One point of a space: feasible, or every constraint that it violates."""
    verdict = Text("infeasible", "bold red") if reasons else Text("feasible", "bold green")
    parts = " + ".join(f"{name} {size(count)}" for name, count in taken.shared_parts)
    rows: list[tuple[str, RenderableType]] = [
        ("variant", Text(f"{variant.family} {params_text(variant)}")),
        ("shared", f"{size(taken.shared_bytes)}{f' of {parts}' if parts else ''}"),
        ("registers", f"{taken.est_registers} per thread (estimate), {taken.threads} threads"),
        ("resident", f"{taken.ctas_per_sm} CTAs per SM, bound by {taken.limit}"),
        *(("violates", Text(reason, "red")) for reason in reasons),
    ]
    return Group(Text.assemble((str(bound.problem), "bold"), f" on {device_text(bound.device)}  ", verdict), facts(rows))


def cache_report(home: Path, held: StoreStatistics, folders: Mapping[str, tuple[int, int]]) -> RenderableType:
    """What lies below FLASHGEN_HOME."""
    table = plain_table("what", "files", "size", "", right=("files", "size"))
    ages = "" if held.newest is None or held.oldest is None else f"written {_day(held.oldest)} to {_day(held.newest)}"
    left = f"{held.leftovers} unfinished; `show cache --prune` deletes old ones" if held.leftovers else ""
    table.add_row("compiled kernels", f"{held.kernels}", size(held.bytes), Text(", ".join(filter(None, (ages, left))), "dim"))
    names = {"tables": "tuned tables", "studies": "trials of searches", "emulated": "host libraries"}
    for name, (files, total) in folders.items():
        table.add_row(names.get(name, name), f"{files}", size(total), Text(str(home / name), "dim"))
    return Group(Text(str(home), "bold"), table)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


# bench ----------------------------------------------------------------------------------------------------------------


def bench_report(found: SideBySide) -> RenderableType:
    """Times side by side."""
    table = plain_table("", "median µs", "p10", "p90", "TFLOP/s", "entry is … as fast", right=("median µs", "p10", "p90", "TFLOP/s"))
    for name, taken in found.measurements.items():
        speedup = found.speedups.get(name)
        ratio = Text("")
        if speedup is not None:
            style = "green" if speedup.low > 1 else "red" if speedup.high < 1 else "yellow"
            ratio = Text(f"{speedup.median:.3f}× [{speedup.low:.3f}, {speedup.high:.3f}]", style)
        times = (microseconds(each) for each in (taken.median_us, taken.p10_us, taken.p90_us))
        table.add_row(Text(name, "bold" if name in found.names else ""), *times, f"{taken.tflops:.1f}", ratio)
    missing = [Text(f"{name}: {reason}", "yellow") for name, reason in found.missing.items()]
    throttled = sorted({reason for taken in found.measurements.values() for reason in taken.throttle})
    slowed = [Text(f"clocks were held down: {', '.join(throttled)}", "yellow")] if throttled else []
    return Group(Text(str(found.problem), "bold"), table, *missing, *slowed, Text())


def bench_summary(means: Mapping[str, tuple[float, float, int]], problems: int) -> RenderableType:
    """Geometric means over the problems."""
    rows = [
        (peer, f"geomean {mean:.3f}×, least {least:.3f}×, {count} of {problems} problems") for peer, (mean, least, count) in means.items()
    ]
    return facts(rows) if rows else Text("No peer could be compared.", "yellow")


# doctor ---------------------------------------------------------------------------------------------------------------


def doctor_report(found: Findings, advice: Sequence[Advice]) -> RenderableType:
    """Everything in use, then what to mend."""
    none = Text("not found", "yellow")
    table = plain_table("", "version", "path")
    for library in (found.flashgen, found.python, *found.cupy):
        _row(table, library.name, library)
    for library in found.nvrtc_found:
        _row(table, f"{library.name} (wheel)", library)
    _row(table, "NVRTC in use", found.nvrtc) if found.nvrtc else table.add_row("NVRTC in use", none, Text(found.nvrtc_error, "dim"))
    driver = f"{found.driver_version or ''} (CUDA {'.'.join(map(str, found.driver))})".strip() if found.driver else none
    table.add_row("NVIDIA driver", driver, Text(found.driver_library or found.driver_error, "dim"))
    for name, each in (("torch", found.torch), ("nvidia-ml-py", found.telemetry), ("g++", found.host_compiler)):
        note = f" (CUDA {'.'.join(map(str, found.torch_cuda))})" if name == "torch" and found.torch_cuda else ""
        _row(table, name, each, note) if each else table.add_row(name, none, "")
    for place in found.places:
        state = Text("writable", "green") if place.writable else Text("NOT WRITABLE", "bold red")
        table.add_row(place.name, state, Text(place.path, "dim"))
    gpus = [_gpu_line(number, gpu) for number, gpu in enumerate(found.gpus)] or [Text("GPU: none", "yellow")]
    if found.architectures:
        gpus.append(Text(f"NVRTC compiles for {', '.join(f'sm_{sm}' for sm in found.architectures)}", "dim"))
    core = [
        Text.assemble(
            ("core  ", "dim"),
            ", ".join(f"{each.name} {each.version}" for each in found.core if each.path == folder),
            (f"  {folder}", "dim"),
        )
        for folder in dict.fromkeys(library.path for library in found.core)
    ]
    return Group(table, Text(), *core, Text(), *gpus, Text(), *_advice_lines(advice))


def _row(table: object, name: str, library: Library, note: str = "") -> None:
    table.add_row(name, f"{library.version}{note}", Text(library.path, "dim"))  # type: ignore[attr-defined]


def _gpu_line(number: int, gpu: DeviceLimits) -> RenderableType:
    return Text.assemble(
        (f"GPU {number}: {gpu.name}", "bold"),
        f"  sm_{gpu.sm}, {gpu.sm_count} SMs, shared {size(gpu.shared_bytes_per_cta)} per CTA and {size(gpu.shared_bytes_per_sm)} per SM, "
        f"{gpu.registers_per_sm} registers, L2 {size(gpu.l2_bytes)}, {gpu.dram_gb_per_s:.0f} GB/s, {gpu.clock_mhz} MHz",
    )


def _advice_lines(advice: Sequence[Advice]) -> list[RenderableType]:
    if not advice:
        return [Text("Everything fits together.", "green")]
    lines: list[RenderableType] = []
    for each in advice:
        lines.append(Text.assemble(("wrong  ", "bold red") if each.fatal else ("note   ", "yellow"), each.what))
        lines.append(Text.assemble(("  fix  ", "dim"), (each.fix, "bold")))
    return lines
