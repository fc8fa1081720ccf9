"""`flashgen bundle`."""

from __future__ import annotations

from pathlib import Path

import click

from flashgen.cli import options as shared
from flashgen.model import Op

DONE = 0


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--table", "name", required=True, metavar="TABLE", help="A table's file, or its name such as nvidia-h200.")
@click.option("--problems", type=click.Path(dir_okay=False, path_type=Path), help="Only entries that serve this log of problems.")
@click.option("--arch", "architectures", multiple=True, metavar="SM", help="Also for sm_80, sm_89, …, without a certificate; repeatable.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there already.")
@shared.json_option
def bundle(out: Path, name: str, problems: Path | None, architectures: tuple[str, ...], force: bool, as_json: bool) -> int:
    """Write the kernels of a table into OUT, a folder or a .zip, to be launched where there is no compiler.

    OUT holds machine code, table, licence, a C header with an example, and a manifest with the sha256 of everything; the same inputs give
    the same bytes. Machine code comes from the cubin store, or is compiled; no GPU is needed. Entries of the backward pass are left out,
    and those that name another variant than runs (`flashgen table check` notes them as altered).
    """
    from flashgen import bundle as bundles
    from flashgen import console, table, table_tools, traffic

    (path,) = table_tools.find([name])
    of = table.read(path, strict=True)
    entries = of.entries if problems is None else table_tools.serving(traffic.read(problems), of)
    forward = [entry for entry in entries if entry.problem.op is Op.FORWARD]
    if len(forward) < len(entries):
        click.echo(f"A bundle holds forward kernels: {len(entries) - len(forward)} entries of the backward pass are left out.", err=True)
    chosen = [entry for entry in forward if not bundles.altered(entry, of)]
    if len(chosen) < len(forward):
        count = len(forward) - len(chosen)
        click.echo(f"{count} entries that name another variant than runs are left out; `flashgen table refresh` makes them anew.", err=True)
    left_out = len(entries) - len(chosen)
    made = bundles.write(out, of, chosen, architectures, replace=force)
    if as_json:
        record = {
            "schema": "flashgen.bundled/1", "path": str(made.path), "kernels": made.kernels, "entries": made.entries, "bytes": made.bytes,
            "manifest_sha256": made.digest, "left_out": left_out,
        }  # fmt: skip
        shared.print_json(record)
    else:
        click.echo(f"{made.path}: {made.entries} entries, {made.kernels} kernels, {console.size(made.bytes)}")
        click.echo(f"sha256 of manifest.json: {made.digest}")
    return DONE
