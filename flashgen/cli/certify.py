"""`flashgen certify`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.errors import CompileError, EmulationFault, InfeasibleVariant, LaunchError
from flashgen.model import Executor, Problem, Verdict

if TYPE_CHECKING:
    from flashgen.certify import CaseResult
    from flashgen.cli.choose import Chosen
    from flashgen.model import Certificate

DONE, FAILED = 0, 1


@click.command()
@shared.problem_options
@shared.family_option
@shared.params_option
@shared.gpu_option
@shared.executor_option
@shared.seed_option
@click.option("--case", "case", metavar="NAME", help="Run one case of the suite, as a failure names it.")
@click.option("--policy", metavar="NAME", help="How emulated threads are scheduled, such as greedy-early:1.")
@click.option("--against", metavar="KERNEL", help="Compare with another kernel: FAMILY, or FAMILY:NAME=N,NAME=N.")
@click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Table to read.  [default: all]")
@shared.json_option
def certify(**options: Any) -> int:
    """Prove one kernel exact, or show where it is not. Exit code 1 when it is not.

    The kernel is that of --family and --params, else the table entry's, else the first seed, once per mask. --against prints how far two
    kernels lie apart on the same inputs, in ulp: two exact ones may differ in last bits, but each must repeat its own.
    """
    from flashgen.cli import choose

    problems = shared.request_of(options).problems()
    target = shared.target_of(options["gpu"], options["executor"])
    params = None if options["params"] is None else shared.parse_params(options["params"])
    kernels = [choose.choose(problem, target.device, options["families"], params, options["table"]) for problem in problems]
    against = [_other(each, options["against"]) for each in kernels] if options["against"] else [None] * len(kernels)
    executor = shared.executor_for(target, options["policy"])
    if target.note:
        click.echo(target.note, err=True)
    good, records = True, list[dict[str, Any]]()
    for kernel, other in zip(kernels, against, strict=True):
        click.echo(f"{kernel.bound.problem}: {kernel.variant} ({kernel.origin})", err=True)
        passed, record = _one(executor, kernel, other, options["case"], options["seed"], options["as_json"])
        good, records = good and passed, [*records, record]
    if options["as_json"]:
        shared.print_json({"schema": "flashgen.certify/1", "results": records})
    return DONE if good else FAILED


def _other(kernel: Chosen, text: str) -> Chosen:
    """The kernel that --against names: FAMILY, FAMILY:params or FAMILY[params]."""
    from flashgen.cli import choose

    family, separator, params = text.replace("[", ":", 1).rstrip("]").partition(":")
    problem, device = kernel.bound.problem, kernel.bound.device
    if not separator:
        return choose.first_seed(problem, device, (family,))
    return choose.choose(problem, device, (family,), shared.parse_params(params), None)


def _one(
    executor: Executor, kernel: Chosen, other: Chosen | None, case: str | None, seed: int, as_json: bool
) -> tuple[bool, dict[str, Any]]:
    """Certify, compare or run one case. Returns whether all is well, and the record for machines."""
    from flashgen import console, gate
    from flashgen.console import reports

    head = {"problem": str(kernel.bound.problem), "family": kernel.variant.family, "params": kernel.variant.as_dict(), "seed": seed}
    source, space = kernel.source, kernel.bound.space
    require_feasible(kernel)
    if other is not None:
        return _compared(executor, kernel, other, seed, head, as_json)
    if case is not None:
        found: CaseResult = gate.single(executor, space, source, case, seed)
        if not as_json:
            console.show(reports.case_report(found))
        return not found.failure, head | {"case": asdict(found)}
    certificate = _certificate(executor, kernel, kernel.bound.problem, seed)
    if not as_json:
        console.show(reports.certificate_report(kernel.bound.problem, kernel.variant, certificate))
    return certificate.verdict is Verdict.EXACT, head | {"certificate": asdict(certificate)}


def _certificate(executor: Executor, kernel: Chosen, problem: Problem, seed: int) -> Certificate:
    from flashgen import gate

    try:
        return gate.full(executor, kernel.bound.space, kernel.source, problem, seed)
    except (LaunchError, EmulationFault, CompileError) as problem_found:
        raise type(problem_found)(f"{kernel.variant} cannot be certified: {problem_found}") from problem_found


def _compared(
    executor: Executor, kernel: Chosen, other: Chosen, seed: int, head: dict[str, Any], as_json: bool
) -> tuple[bool, dict[str, Any]]:
    from flashgen import compare, console
    from flashgen.console import reports

    require_feasible(other)
    histogram = compare.against(executor, kernel.bound.space, kernel.source, other.source, seed)
    if not as_json:
        console.show(reports.histogram_report(kernel.variant, other.variant, histogram))
    record = head | {"against": {"family": other.variant.family, "params": other.variant.as_dict()}, "ulp": asdict(histogram)}
    return all(histogram.repeats), record


def require_feasible(kernel: Chosen) -> None:
    """Raise InfeasibleVariant with every violated constraint."""
    reasons = kernel.bound.explain(kernel.variant)
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise InfeasibleVariant(
            f"{kernel.variant} does not fit {kernel.bound.problem} on {kernel.bound.device.name}:\n{listed}\n"
            "Change the parameters, or run `flashgen show space` for the choices."
        )
