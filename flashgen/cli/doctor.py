"""`flashgen doctor`."""

from __future__ import annotations

from dataclasses import asdict

import click

from flashgen.cli import options as shared

DONE, FAILED = 0, 1


@click.command()
@shared.json_option
def doctor(as_json: bool) -> int:
    """Print every path and version in use, and what does not fit together with the command that mends it.

    Exit code 1 when something that flashgen needs does not work here; a machine without a GPU is fine.
    """
    from flashgen import doctor as examiner

    found = examiner.examine()
    advice = examiner.diagnose(found)
    if as_json:
        record = {"schema": "flashgen.doctor/1", "findings": asdict(found), "advice": [asdict(each) for each in advice]}
        shared.print_json(record)
    else:
        from flashgen import console
        from flashgen.console import reports

        console.show(reports.doctor_report(found, advice))
    return FAILED if any(each.fatal for each in advice) else DONE
