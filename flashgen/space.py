"""Search spaces: which variants a family offers for a problem on a device, how far a point is from feasible, and why.

Everything here is arithmetic on integers: checking a variant takes microseconds, enumerating a space well under a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

from flashgen import paths
from flashgen.errors import EmptySpace, InfeasibleVariant, InvalidSpace, UnsupportedProblem
from flashgen.expression import Expression, ExpressionError
from flashgen.model import CompileReport, DeviceLimits, DType, EntryPoint, MaskKind, Op, Problem, ProblemClass, Variant
from flashgen.space_file import DEVICE_NAMES, Constraint, Definition, HeadDimRule, Parameter, parse_definition, refuses_point


class AsksForInts(Protocol):
    """What `BoundSpace.suggest` needs of a search trial."""

    def suggest_int(self, name: str, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        ...


@dataclass(frozen=True)
class Space:
    """One family's search space, as its file defines it."""

    definition: Definition

    @property
    def family(self) -> str:
        """Name of the family, and of its file."""
        return self.definition.family

    @property
    def template(self) -> str:
        """The family's file below templates/."""
        return self.definition.template

    @property
    def ops(self) -> tuple[Op, ...]:
        """What the family computes."""
        return (self.definition.op,)

    @property
    def min_sm(self) -> int:
        """The oldest architecture that runs the family."""
        return self.definition.requires.min_sm

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Element types the family computes with."""
        return tuple(self.definition.requires.dtypes)

    @property
    def masks(self) -> tuple[MaskKind, ...]:
        """Masks the family can apply."""
        return tuple(self.definition.requires.masks)

    @property
    def head_dim(self) -> HeadDimRule:
        """Limits of the head dim of q and k."""
        return self.definition.requires.head_dim

    @property
    def head_dim_v(self) -> HeadDimRule:
        """Limits of the head dim of v and o."""
        return self.definition.requires.head_dim_v

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Parameters in the order of names and tables."""
        return self.definition.parameters

    @property
    def digest(self) -> str:
        """sha256 of the file's content; comments and layout do not count."""
        return self.definition.digest

    def unsupported(self, problem: Problem, device: DeviceLimits) -> str | None:
        """Why the family cannot compute the problem on the device, in words; None when it can."""
        requires = self.definition.requires
        if problem.op.value != self.definition.op.value:
            return f"it computes {self.definition.op}, not {problem.op}"
        if problem.dtype not in requires.dtypes:
            return f"its element types are {', '.join(requires.dtypes)}; got {problem.dtype}"
        if problem.mask.kind not in requires.masks:
            return f"its masks are {', '.join(requires.masks)}; got {problem.mask.kind}"
        if device.sm < requires.min_sm:
            return f"it needs sm_{requires.min_sm} or newer; {device.name} is sm_{device.sm}"
        if device.sm > requires.max_sm:
            return f"it runs up to sm_{requires.max_sm}; {device.name} is sm_{device.sm}"
        return requires.head_dim.refuses("head_dim", problem.head_dim) or requires.head_dim_v.refuses("head_dim_v", problem.head_dim_v)

    def constants(self, klass: ProblemClass, variant: Variant) -> dict[str, int | bool]:
        """What is bound into the C++ Config as numbers, sorted by name: the file's `constants`, head_dim and head_dim_v.

        Depends on problem class and variant only. Mask kind and element type are bound by the renderer. Raises InfeasibleVariant.
        """
        at = self._class_names(klass, variant)
        bound: dict[str, int | bool] = {"head_dim": klass.head_dim, "head_dim_v": klass.head_dim_v}
        bound |= {name: at[name] for name in self.definition.constants}
        return dict(sorted(bound.items()))

    def entry_points(self, klass: ProblemClass, variant: Variant) -> tuple[EntryPoint, ...]:
        """Names, threads and dynamic shared bytes, in launch order. Depends on problem class and variant only. Raises InfeasibleVariant."""
        return self._entry_points(self._class_names(klass, variant))

    def boxes(self, klass: ProblemClass, variant: Variant) -> tuple[tuple[str, int], ...]:
        """Tensors that are copied through tensor maps, with the rows of one box; empty for families without such copies."""
        at = self._class_names(klass, variant)
        return tuple((name, self._value(f"tensor_maps.{name}", rows, at)) for name, rows in self.definition.tensor_maps.items())

    @property
    def counters(self) -> int:
        """Words of device memory that a launch finds zero and leaves zero."""
        return self.definition.counters

    def deterministic(self, klass: ProblemClass, variant: Variant) -> bool:
        """Whether equal inputs give equal bits, every time and in any batch. Raises InfeasibleVariant."""
        rule = self.definition.deterministic
        return rule is None or bool(self._value("deterministic", rule, self._class_names(klass, variant)))

    def bind(self, problem: Problem, device: DeviceLimits) -> BoundSpace:
        """The space for one problem on one device. Raises UnsupportedProblem with the reason."""
        reason = self.unsupported(problem, device)
        if reason:
            raise UnsupportedProblem(f"The family {self.family} cannot compute {problem} on {device.name} (sm_{device.sm}): {reason}.")
        return BoundSpace(self, problem, device)

    def checked(self, params: Mapping[str, int]) -> dict[str, int]:
        """A value for every parameter in canonical order, bool where choices are. Raises InfeasibleVariant naming parameter and value."""
        reason = refuses_point(params, self.parameters, self.definition.conditions)
        if reason:
            raise InfeasibleVariant(f"{self.family}: {reason}")
        return {each.name: bool(params[each.name]) if each.is_bool else params[each.name] for each in self.parameters}

    @cached_property
    def _plan(self) -> _Plan:
        return _Plan(self.definition)

    def _entry_points(self, at: Mapping[str, int]) -> tuple[EntryPoint, ...]:
        found = []
        for index, rule in enumerate(self.definition.launches):
            threads = self._value(f"launches[{index}].threads", rule.threads, at)
            found.append(EntryPoint(rule.entry, threads, self._value(f"launches[{index}].shared_bytes", rule.shared_bytes, at)))
        return tuple(found)

    def _class_names(self, klass: ProblemClass, variant: Variant) -> dict[str, int]:
        if variant.family != self.family:
            raise InfeasibleVariant(f"The variant {variant} belongs to the family {variant.family}, not to {self.family}.")
        at = self.checked(variant.as_dict()) | _class_values(klass)
        for name in self.definition.class_derived:
            at[name] = self._value(f"derived.{name}", self.definition.derived[name], at)
        return at

    def _value(self, field: str, expression: Expression, at: Mapping[str, int]) -> int:
        try:
            return int(expression.value(at))
        except ExpressionError as problem:
            self.definition.refuse(field, f"{problem}.")


class BoundSpace:
    """A space whose problem.* and device.* names have values. All results are deterministic."""

    def __init__(self, space: Space, problem: Problem, device: DeviceLimits) -> None:
        """Use `Space.bind`, which first checks that the family can compute the problem on the device."""
        self.space = space
        self.problem = problem
        self.device = device
        self._definition = space.definition
        self._base = _problem_values(problem) | {name: int(getattr(device, name.partition(".")[2])) for name in sorted(DEVICE_NAMES)}
        self._plan = space._plan
        self._latest: tuple[Variant, dict[str, int]] | None = None
        for name in self._plan.fixed:
            self._base[name] = space._value(f"derived.{name}", self._definition.derived[name], self._base)

    def variant(self, params: Mapping[str, int]) -> Variant:
        """The variant of these values, conditions applied, in canonical order. Raises InfeasibleVariant naming the parameter and value."""
        values = self.space.checked(params)
        for name, condition in self._definition.conditions.items():
            parameter = self._plan.by_name[name]
            if not self.space._value(f"conditions.{name}.when", condition.when, self._base | values):
                values[name] = condition.otherwise
            elif values[name] not in parameter.choices:
                raise InfeasibleVariant(f"{self.space.family}: {name} = {values[name]} stands only where {condition.when.text!r} is false.")
        return Variant.of(self.space.family, values)

    def altered(self, variant: Variant) -> str:
        """What the conditions make of a variant that was not made for a problem of this kind, in words; empty where it stays as it is."""
        settled = self.variant(variant.as_dict()).as_dict()
        return ", ".join(f"{name} {value} → {settled[name]}" for name, value in variant.params if value != settled[name])

    def adapted(self, variant: Variant) -> Variant | None:
        """What a variant of another problem is for this one, conditions applied; None where that is no variant or breaks a constraint."""
        try:
            found = self.variant(variant.as_dict())
        except InfeasibleVariant:
            return None
        return None if self.explain(found) else found

    def names(self, variant: Variant) -> dict[str, int]:
        """Every parameter, derived, problem.* and device.* value."""
        if self._latest is not None and self._latest[0] == variant:  # a prediction asks for the same variant several times
            return dict(self._latest[1])
        at: dict[str, int] = dict(variant.params)
        at.update(self._base)
        self._settle(self._plan.varying, at)
        self._latest = variant, at
        return dict(at)

    def violations(self, variant: Variant) -> dict[str, float]:
        """How far the variant is from each static constraint; 0.0 when satisfied."""
        return self._measure(self._definition.static, "static", self.names(variant))

    def compiled_violations(self, variant: Variant, report: CompileReport) -> dict[str, float]:
        """How far the compiled variant is from each compiled constraint; 0.0 when satisfied."""
        return self._measure(self._definition.compiled, "compiled", self._compiled_names(variant, report))

    def explain(self, variant: Variant, report: CompileReport | None = None) -> list[str]:
        """Violated constraints in words, with both sides' values and the reason; empty when all hold."""
        at = self.names(variant)
        lines = [_words(constraint, at) for constraint in self._definition.static if self._violation(constraint, "static", at)]
        if report is not None:
            at = self._compiled_names(variant, report)
            lines += [_words(constraint, at) for constraint in self._definition.compiled if self._violation(constraint, "compiled", at)]
        return lines

    def feasible(self) -> list[Variant]:
        """All distinct feasible variants; parameters vary as in nested loops, first parameter outermost, choices in the file's order."""
        return list(self._feasible)

    def walked(self) -> Iterator[Variant]:
        """The feasible variants in an order in which `names` of the present one costs nothing: to predict all of them."""
        parameters = [parameter.name for parameter in self.space.parameters]
        for at in self._walk(0, dict(self._base)):
            variant = Variant(self.space.family, tuple([(name, at[name]) for name in parameters]))
            self._latest = variant, dict(at)
            yield variant

    def points(self) -> Iterator[Variant]:
        """All points, feasible or not, conditions applied, in the order of `feasible`; the same one may come several times."""
        conditions = self._definition.conditions
        settled = {name for name, condition in conditions.items() if set(condition.when.names) <= set(self._base)}
        choices = []
        for parameter in self.space.parameters:
            values: tuple[int, ...] = parameter.choices
            if parameter.name in settled:
                condition = conditions[parameter.name]
                applies = self.space._value(f"conditions.{parameter.name}.when", condition.when, self._base)
                values = values if applies else (condition.otherwise,)
            choices.append([(parameter.name, bool(value) if parameter.is_bool else value) for value in values])
        for point in itertools.product(*choices):
            variant = Variant(self.space.family, point)
            yield variant if len(settled) == len(conditions) else self.variant(variant.as_dict())

    def seeds(self) -> list[Variant]:
        """The file's seeds that are feasible here, in order, without repeats."""
        variants = dict.fromkeys(self.variant(seed) for seed in self._definition.seeds)
        return [variant for variant in variants if not any(self.violations(variant).values())]

    def fallback(self) -> Variant:
        """The variant that serves untuned problems. Raises EmptySpace when it is infeasible here."""
        variant = self.variant(self._definition.fallback)
        reasons = self.explain(variant)
        if reasons:
            listed = "\n".join(f"  {reason}" for reason in reasons)
            raise EmptySpace(
                f"The fallback of {self.space.family} does not fit {self.problem} on {self.device.name} (sm_{self.device.sm}):\n{listed}\n"
                "Choose another family, a smaller head_dim, or a device with more shared memory."
            )
        return variant

    def entry_points(self, variant: Variant) -> tuple[EntryPoint, ...]:
        """As `Space.entry_points`, for a variant of this space."""
        return self.space._entry_points(self.names(variant))

    def grids(self, variant: Variant) -> tuple[int, ...]:
        """CTAs of each entry point for the problem, in launch order; 0 where there is nothing to do."""
        at = self.names(variant)
        rules = enumerate(self._definition.launches)
        return tuple(self.space._value(f"launches[{index}].grid", rule.grid, at) for index, rule in rules)

    def workspace_bytes(self, variant: Variant) -> int:
        """Bytes of global scratch memory that one run needs."""
        return self.space._value("workspace_bytes", self._definition.workspace_bytes, self.names(variant))

    def suggest(self, trial: AsksForInts) -> Variant:
        """Ask a trial for a variant: each parameter is an ordinal over its sorted choices; those that mean nothing here are not asked."""
        params = {}
        for parameter in self.space.parameters:
            if parameter.name in self._plan.asked(self._base):
                ordered = sorted(parameter.choices)
                params[parameter.name] = ordered[trial.suggest_int(parameter.name, 0, len(ordered) - 1)]
            else:
                params[parameter.name] = parameter.choices[0]
        return self.variant(params)

    def ordinals(self, variant: Variant) -> dict[str, int]:
        """The answers to `suggest` that give this variant; to enqueue seeds. Raises InfeasibleVariant."""
        values = self.variant(variant.as_dict()).as_dict()
        return {name: places.get(values[name], 0) for name, places in self._places.items()}

    def steps(self, variants: Iterable[Variant]) -> dict[Variant, tuple[int, ...]]:
        """The values of `ordinals` of variants that are known to be of this space."""
        found = {}
        for variant in variants:
            values = dict(variant.params)
            found[variant] = tuple([places.get(values[name], 0) for name, places in self._places.items()])
        return found

    @cached_property
    def _places(self) -> dict[str, dict[int, int]]:
        """Of each parameter that is asked: its choices with their places in order."""
        asked = self._plan.asked(self._base)
        parameters = (parameter for parameter in self.space.parameters if parameter.name in asked)
        return {parameter.name: {value: place for place, value in enumerate(sorted(parameter.choices))} for parameter in parameters}

    @cached_property
    def _feasible(self) -> tuple[Variant, ...]:
        rank = {parameter.name: {value: index for index, value in enumerate(parameter.choices)} for parameter in self.space.parameters}
        points = [{parameter.name: at[parameter.name] for parameter in self.space.parameters} for at in self._walk(0, dict(self._base))]
        points.sort(key=lambda point: [rank[name].get(value, -1) for name, value in point.items()])
        return tuple(Variant.of(self.space.family, point) for point in points)

    def _walk(self, level: int, at: dict[str, int]) -> Iterator[dict[str, int]]:
        """Feasible points below a partial one. Each level settles one parameter, then checks all that has become known."""
        if level == 0 and not self._fits(self._plan.constant, at):
            return
        if level == len(self._plan.levels):
            yield at
            return
        step = self._plan.levels[level]
        condition = self._definition.conditions.get(step.parameter.name)
        applies = condition is None or self.space._value(f"conditions.{step.parameter.name}.when", condition.when, at)
        for value in step.parameter.choices if condition is None or applies else (condition.otherwise,):
            at[step.parameter.name] = value
            self._settle(step.derived, at)
            if self._fits(step.constraints, at):
                yield from self._walk(level + 1, at)

    def _settle(self, derived: Iterable[tuple[str, Expression]], at: dict[str, int]) -> None:
        """Add the values of derived quantities to `at`; this runs for every point of a walk."""
        try:
            for name, expression in derived:
                at[name] = int(expression.evaluate(at))
        except (ZeroDivisionError, KeyError):
            for name, expression in derived:  # again, to say which and why
                at[name] = self.space._value(f"derived.{name}", expression, at)

    def _fits(self, constraints: tuple[Constraint, ...], at: Mapping[str, int]) -> bool:
        """Whether no static constraint of these is violated; this runs for every point of a walk."""
        try:
            for constraint in constraints:
                if constraint.holds.left.evaluate(at) > constraint.holds.right.evaluate(at):
                    return False
        except (ZeroDivisionError, KeyError):
            return not any(self._measure(constraints, "static", at).values())
        return True

    def _measure(self, constraints: tuple[Constraint, ...], stage: str, at: Mapping[str, int]) -> dict[str, float]:
        return {constraint.name: self._violation(constraint, stage, at) for constraint in constraints}

    def _violation(self, constraint: Constraint, stage: str, at: Mapping[str, int]) -> float:
        try:
            return constraint.holds.violation(at)
        except ExpressionError as problem:
            self._definition.refuse(f"constraints.{stage}.{constraint.name}.holds", f"{problem}.")

    def _compiled_names(self, variant: Variant, report: CompileReport) -> dict[str, int]:
        dynamic = max(entry.shared_bytes for entry in self.entry_points(variant))
        kernel = {
            "kernel.registers": report.registers,
            "kernel.spill_bytes": report.spill_bytes,
            "kernel.stack_bytes": report.stack_bytes,
            "kernel.serialised_products": report.serialised_products,
            "kernel.shared_bytes": report.static_shared_bytes + dynamic,
        }
        return self.names(variant) | kernel


@dataclass(frozen=True, slots=True)
class _Step:
    """One parameter, and the derived quantities and constraints that are settled once it is."""

    parameter: Parameter
    derived: tuple[tuple[str, Expression], ...]
    constraints: tuple[Constraint, ...]


class _Plan:
    """In which order the names of a space are settled: unconditional parameters, then conditional ones."""

    def __init__(self, definition: Definition) -> None:
        self.by_name = {parameter.name: parameter for parameter in definition.parameters}
        self._conditions = definition.conditions
        order = [name for name in self.by_name if name not in definition.conditions] + list(definition.conditions)
        level = {name: index for index, name in enumerate(order)}
        for name, expression in definition.derived.items():
            level[name] = max((level.get(read, -1) for read in expression.names), default=-1)
        of_constraint = {
            constraint.name: max((level.get(read, -1) for read in constraint.holds.names), default=-1) for constraint in definition.static
        }
        self.fixed = tuple(name for name in definition.derived if level[name] < 0)
        self.varying = tuple((name, expression) for name, expression in definition.derived.items() if level[name] >= 0)
        self.constant = tuple(constraint for constraint in definition.static if of_constraint[constraint.name] < 0)
        self.levels = tuple(
            _Step(
                self.by_name[name],
                tuple((derived, expression) for derived, expression in self.varying if level[derived] == index),
                tuple(constraint for constraint in definition.static if of_constraint[constraint.name] == index),
            )
            for index, name in enumerate(order)
        )

    def asked(self, base: Mapping[str, int]) -> set[str]:
        """Parameters that can matter: all but those whose condition is false whatever the other parameters are."""
        return {
            name
            for name in self.by_name
            if name not in self._conditions
            or not self._conditions[name].when.names <= base.keys()
            or self._conditions[name].when.value(base)
        }


def parse_space(text: str, file: str = "search space") -> Space:
    """A space from the text of its file. Raises InvalidSpace with file, field and rule."""
    return Space(parse_definition(text, file))


def load_space(family: str) -> Space:
    """The space of a shipped family. Raises InvalidSpace when there is none, or its file breaks the rules."""
    directory = paths.search_spaces()
    known = sorted(path.stem for path in directory.glob("*.yaml"))
    if family not in known:
        listed = ", ".join(known) or "none"
        raise InvalidSpace(f"There is no search space for the family {family!r}; the families in {directory} are {listed}.")
    return _read(directory / f"{family}.yaml")


def load_spaces(op: Op | str) -> tuple[Space, ...]:
    """The shipped spaces that a search for `op` offers, by family name; baselines are left out. Raises InvalidSpace."""
    spaces = (_read(path) for path in sorted(paths.search_spaces().glob("*.yaml")))
    return tuple(space for space in spaces if Op(op) in space.ops and not space.definition.baseline)


def _read(path: Path) -> Space:
    return _read_once(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _read_once(path: Path, mtime_ns: int) -> Space:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidSpace(f"{path}: not readable: {problem}") from None
    space = parse_space(text, str(path))
    if space.family != path.stem:
        raise InvalidSpace(f"{path}: family: {space.family!r} must equal the name of the file, {path.stem!r}.")
    return space


def _words(constraint: Constraint, at: Mapping[str, int]) -> str:
    left, right = constraint.holds.sides(at)
    return f"{constraint.name}: {constraint.holds.text} fails, {int(left)} > {int(right)} ({constraint.why})"


def _class_values(klass: ProblemClass) -> dict[str, int]:
    values = {"problem.head_dim": klass.head_dim, "problem.head_dim_v": klass.head_dim_v, "problem.element_bytes": klass.dtype.bytes}
    values |= {"problem.is_bfloat16": int(klass.dtype is DType.BFLOAT16), "problem.deterministic": int(klass.deterministic)}
    return values | {f"problem.mask_{kind}": int(klass.mask is kind) for kind in MaskKind}


def _problem_values(problem: Problem) -> dict[str, int]:
    fields = ("batch", "heads_q", "heads_kv", "gqa_group", "batch_heads", "seqlen_q", "seqlen_kv")
    return _class_values(problem.klass()) | {f"problem.{name}": int(getattr(problem, name)) for name in fields}
