"""Which variant a command means: the one written out, the table entry's, or the first seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen import cost, near, paths, search, table
from flashgen.errors import InfeasibleVariant, UnsupportedProblem
from flashgen.model import DeviceLimits, Problem, Source, TableEntry, Variant
from flashgen.render import render
from flashgen.space import BoundSpace, Space, load_space, load_spaces


@dataclass(frozen=True)
class Chosen:
    """A variant on a problem and device, and where it comes from in words."""

    bound: BoundSpace
    variant: Variant
    origin: str

    @property
    def source(self) -> Source:
        """Its text."""
        return render(self.bound.space, self.bound.problem.klass(), self.variant)


def choose(problem: Problem, device: DeviceLimits, families: Sequence[str], params: dict[str, int] | None, file: Path | None) -> Chosen:
    """The variant of `params`, else the entry that serves the problem, else the first seed.

    Raises UnsupportedProblem, InfeasibleVariant, InvalidTable.
    """
    if params is not None:
        if len(families) != 1:
            raise InfeasibleVariant(f"--params belongs to one family; got {len(families)}. Name it, as in --family ampere_forward.")
        bound = load_space(families[0]).bind(problem, device)
        return Chosen(bound, bound.variant(params), "as asked")
    answer = near.look_up(problem, device, tables(file), lambda entry: _unasked(entry, families))
    if answer.found is not None:
        variant = answer.found.entry.variant
        return Chosen(load_space(variant.family).bind(problem, device), variant, f"entry of {answer.found.path}")
    return first_seed(problem, device, families)


def first_seed(problem: Problem, device: DeviceLimits, families: Sequence[str]) -> Chosen:
    """The first seed of the family whose first seed is predicted to be the fastest. Raises UnsupportedProblem."""
    offered = [Chosen(bound, (bound.seeds() or [bound.fallback()])[0], "first seed") for bound in bounds(problem, device, families)]
    return min(offered, key=lambda chosen: (cost.roofline_us(chosen.bound, chosen.variant), chosen.variant.family))


def bounds(problem: Problem, device: DeviceLimits, families: Sequence[str]) -> list[BoundSpace]:
    """Spaces that can compute the problem. Raises UnsupportedProblem with the reason of every family."""
    spaces = spaces_of(problem, families)
    reasons = {space.family: space.unsupported(problem, device) for space in spaces}
    fitting = [space.bind(problem, device) for space in spaces if reasons[space.family] is None]
    if not fitting:
        listed = "\n".join(f"  {family}: {reason}" for family, reason in reasons.items())
        raise UnsupportedProblem(f"No kernel family fits {problem} on {device.name} (sm_{device.sm}):\n{listed}")
    return fitting


def spaces_of(problem: Problem, families: Sequence[str]) -> tuple[Space, ...]:
    """The named spaces, or all that compute the problem's op."""
    return tuple(load_space(family) for family in families) if families else load_spaces(problem.op)


def tables(file: Path | None) -> tuple[table.Table, ...]:
    """The tables to look in: one file read strictly, or the user's and the shipped ones."""
    if file is not None:
        return (table.read(file, strict=True, check=search.space_check),)
    found = []
    for directory in (paths.user_tables(), paths.shipped_tables()):
        found += [table.read(path, strict=True, check=search.space_check) for path in sorted(directory.glob("*.yaml"))]
    return tuple(found)


def _unasked(entry: TableEntry, families: Sequence[str]) -> str | None:
    return f"only {', '.join(families)} was asked for" if families and entry.variant.family not in families else None
