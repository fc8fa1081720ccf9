"""`flashgen show`: what is compiled, what is stored, and why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashgen.cli import options as shared
from flashgen.errors import InvalidProblem
from flashgen.model import DeviceLimits, Problem

if TYPE_CHECKING:
    from flashgen.space import BoundSpace, Space

DONE, FAILED = 0, 1
_AGE_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SIZE_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30}

table_option = click.option("--table", type=click.Path(dir_okay=False, path_type=Path), help="Table to read.  [default: all]")


@click.group()
def show() -> None:
    """Print a source, a table entry, a search space or the cubin store."""


@show.command()
@shared.problem_options
@shared.family_option
@shared.params_option
@shared.gpu_option
@table_option
@shared.json_option
def source(**options: Any) -> int:
    """Print exactly the text that is compiled.

    The variant is that of --params, else the table entry's, else the first seed. Plain nvcc compiles it too. Full attention, unless
    --causal or --window is given.
    """
    from flashgen.cli import choose

    problem = one_problem(shared.request_of(options))
    device = shared.target_of(options["gpu"], "emulated").device
    params = None if options["params"] is None else shared.parse_params(options["params"])
    chosen = choose.choose(problem, device, options["families"], params, options["table"])
    text = chosen.source
    if options["as_json"]:
        record = {
            "schema": "flashgen.source/1", "problem": str(problem), "device": device.name, "family": text.family,
            "params": chosen.variant.as_dict(), "origin": chosen.origin, "digest": text.digest, "min_sm": text.min_sm,
            "entry_points": [{"name": e.name, "threads": e.threads, "shared_bytes": e.shared_bytes} for e in text.entry_points],
            "text": text.text,
        }  # fmt: skip
        shared.print_json(record)
        return DONE
    click.echo(f"{chosen.variant} for {problem}: {chosen.origin}; digest {text.digest[:12]}", err=True)
    click.echo(text.text, nl=False)
    return DONE


@show.command()
@shared.problem_options
@shared.gpu_option
@table_option
@shared.json_option
def entry(**options: Any) -> int:
    """Print the table entries that serve problems, and how they were found. Exit code 1 where there is none."""
    from flashgen import console, near
    from flashgen.cli import choose
    from flashgen.console import reports
    from flashgen.table_schema import to_raw

    problems = shared.request_of(options).problems()
    device = shared.target_of(options["gpu"], "emulated").device
    known = choose.tables(options["table"])
    answers = [near.look_up(problem, device, known) for problem in problems]
    if options["as_json"]:
        records = [
            {
                "problem": str(problem), "steps": list(answer.steps), "path": str(answer.found.path) if answer.found else None,
                "entry": to_raw(answer.found.entry) if answer.found else None,
            }
            for problem, answer in zip(problems, answers, strict=True)
        ]  # fmt: skip
        shared.print_json({"schema": "flashgen.lookup/1", "device": device.name, "answers": records})
    else:
        for problem, answer in zip(problems, answers, strict=True):
            console.show(reports.entry_report(problem, device, answer))
    return DONE if all(answer.found for answer in answers) else FAILED


@show.command()
@click.argument("family", required=False)
@shared.problem_options
@shared.params_option
@shared.gpu_option
@shared.json_option
def space(family: str | None, **options: Any) -> int:
    """Print the search spaces, or one FAMILY: its parameters, and with --head-dim how many variants are feasible.

    With --params it says which constraints that point violates, by how much and why; exit code 1 when it does.
    """
    from flashgen import console
    from flashgen.console import reports
    from flashgen.space import load_space, load_spaces

    request = shared.request_of(options)
    spaces = (load_space(family),) if family else load_spaces(request.op)
    device = shared.target_of(options["gpu"], "emulated").device
    problems = request.problems() if request.head_dim is not None else ()
    if options["params"] is not None:
        if family is None or not problems:
            raise InvalidProblem("--params explains one point: name the family and --head-dim, as in `show space ampere_forward`.")
        return _explain(spaces[0], one_problem(request), device, options["params"], options["as_json"])
    if options["as_json"]:
        click.echo(
            json.dumps({"schema": "flashgen.spaces/1", "spaces": [_space_record(each, problems, device) for each in spaces]}, indent=1)
        )
        return DONE
    for each in spaces:
        console.show(reports.space_report(each, problems, device))
    return DONE


def _explain(of: Space, problem: Problem, device: DeviceLimits, text: str, as_json: bool) -> int:
    from flashgen import console, cost
    from flashgen.console import reports

    bound: BoundSpace = of.bind(problem, device)
    variant = bound.variant(shared.parse_params(text))
    reasons, taken = bound.explain(variant), cost.resources(bound, variant)
    if as_json:
        record = {
            "schema": "flashgen.point/1", "family": of.family, "params": variant.as_dict(), "violations": bound.violations(variant),
            "reasons": reasons, "shared_bytes": taken.shared_bytes, "est_registers": taken.est_registers, "ctas_per_sm": taken.ctas_per_sm,
            "limit": taken.limit, "predicted_us": None if reasons else cost.roofline_us(bound, variant),
        }  # fmt: skip
        shared.print_json(record)
    else:
        console.show(reports.point_report(bound, variant, reasons, taken))
    return FAILED if reasons else DONE


def _space_record(of: Space, problems: tuple[Problem, ...], device: DeviceLimits) -> dict[str, Any]:
    return {
        "family": of.family, "digest": of.digest, "template": of.template, "min_sm": of.min_sm, "dtypes": list(of.dtypes),
        "masks": list(of.masks), "parameters": {each.name: list(each.choices) for each in of.parameters},
        "constraints": {each.name: each.why for each in of.definition.static + of.definition.compiled},
        "problems": [
            {"problem": str(each), "unsupported": reason, "feasible": 0 if reason else len(of.bind(each, device).feasible())}
            for each in problems
            for reason in (of.unsupported(each, device),)
        ],
    }  # fmt: skip


@show.command()
@click.option("--prune", is_flag=True, help="Delete what crashed writers left behind, and what the limits below say.")
@click.option("--older-than", metavar="AGE", help="With --prune: kernels not written for so long, such as 12h, 30d, 2w.")
@click.option("--max-size", metavar="SIZE", help="With --prune: the oldest kernels beyond this size, such as 500M, 2G.")
@shared.json_option
def cache(prune: bool, older_than: str | None, max_size: str | None, as_json: bool) -> int:
    """Print what lies below FLASHGEN_HOME with sizes, and prune the cubin store."""
    from flashgen import console, paths
    from flashgen.compiler import default_store
    from flashgen.console import reports

    age = _amount(older_than, "--older-than", _AGE_SECONDS, "12h, 30d, 2w")
    most = _amount(max_size, "--max-size", _SIZE_BYTES, "500M, 2G")
    if not prune and (age is not None or most is not None):
        raise InvalidProblem("--older-than and --max-size say what --prune deletes; add --prune.")
    store = default_store()
    deleted, freed = store.prune(age, None if most is None else int(most)) if prune else (0, 0)
    held = store.statistics()
    folders = {each.name: _held(each) for each in (paths.user_tables(), paths.study_store(), paths.proof_store(), paths.emulation_store())}
    if as_json:
        record = {
            "schema": "flashgen.cache/1", "home": str(paths.home()), "cubins": held.kernels, "bytes": held.bytes,
            "leftovers": held.leftovers, "deleted": deleted, "freed_bytes": freed,
            "folders": {name: {"files": files, "bytes": size} for name, (files, size) in folders.items()},
        }  # fmt: skip
        shared.print_json(record)
        return DONE
    if prune:
        click.echo(f"deleted {deleted} kernels, freed {console.size(freed)}")
    console.show(reports.cache_report(paths.home(), held, folders))
    return DONE


def one_problem(request: shared.Request) -> Problem:
    """The one problem of a command that shows one kernel: the first length, full attention where no mask was named."""
    if len(request.seqlen) != 1:
        raise InvalidProblem(f"This command takes one --seqlen; got {','.join(map(str, request.seqlen))}.")
    return request.problems()[0]


def _held(directory: Path) -> tuple[int, int]:
    """Files below a directory and their bytes."""
    sizes = [path.stat().st_size for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    return len(sizes), sum(sizes)


def _amount(text: str | None, option: str, units: dict[str, Any], examples: str) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z])(?:i?B)?", text.strip())
    unit = next((units[name] for name in units if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise InvalidProblem(f"{option} is a number with a unit, such as {examples}; got {text!r}.")
    return float(match[1]) * float(unit)
