"""The file form of a search space: strict schema, name rules, and expressions compiled once.

`search_spaces/README.md` describes the form for authors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec

from flashgen.errors import InvalidSpace
from flashgen.expression import FUNCTIONS, Expression, ExpressionError, Relation, parse_condition, parse_expression, parse_relation
from flashgen.model import DType, MaskKind, Op
from flashgen.yaml_io import load_strict

SCHEMA = "flashgen.space/1"
MAX_POINTS = 2_000_000  # a space that large cannot be enumerated in seconds

CLASS_NAMES = frozenset(
    f"problem.{name}"
    for name in ("head_dim", "head_dim_v", "element_bytes", "is_bfloat16", "mask_none", "mask_causal", "mask_window", "deterministic")
)
PROBLEM_NAMES = CLASS_NAMES | {
    f"problem.{name}" for name in ("batch", "heads_q", "heads_kv", "gqa_group", "batch_heads", "seqlen_q", "seqlen_kv")
}
DEVICE_NAMES = frozenset(
    f"device.{name}"
    for name in (
        "sm", "sm_count", "shared_bytes_per_cta", "shared_bytes_per_sm", "registers_per_sm", "threads_per_sm", "ctas_per_sm",
        "l2_bytes", "clock_mhz",
    )
)  # fmt: skip
KERNEL_NAMES = frozenset(f"kernel.{name}" for name in ("registers", "spill_bytes", "stack_bytes", "serialised_products", "shared_bytes"))

TENSOR_MAPS = {
    Op.FORWARD: ("q", "k", "v", "o"),
    Op.BACKWARD: ("q", "k", "v", "dout", "query_q", "query_k", "query_v", "query_dout"),
}
"""Tensors that bulk copies may move; a name with query_ is a second map of the same tensor, for a loop with other tiles."""

_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,59}")
_TEMPLATE = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*(\.[a-z0-9]+)+")
_RESERVED = frozenset(FUNCTIONS) | {"problem", "device", "kernel", "head_dim", "head_dim_v"}
_INT32 = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
_Formula = str | int
_T = TypeVar("_T")


class HeadDimRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Which head dims a family computes: multiples of `multiple_of` from `min` to `max`."""

    multiple_of: Annotated[int, msgspec.Meta(ge=1)]
    min: Annotated[int, msgspec.Meta(ge=1)]
    max: Annotated[int, msgspec.Meta(ge=1)]

    def refuses(self, name: str, value: int) -> str | None:
        """The reason in words, or None when `value` is allowed."""
        if self.min <= value <= self.max and value % self.multiple_of == 0:
            return None
        return f"{name} must be a multiple of {self.multiple_of} from {self.min} to {self.max}; got {value}"


class Requires(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Hard facts; the family is not offered otherwise."""

    min_sm: Annotated[int, msgspec.Meta(ge=50, lt=1000)]
    dtypes: Annotated[list[DType], msgspec.Meta(min_length=1)]
    head_dim: HeadDimRule
    head_dim_v: HeadDimRule
    masks: Annotated[list[MaskKind], msgspec.Meta(min_length=1)]
    max_sm: Annotated[int, msgspec.Meta(ge=50, lt=1000)] = 999


class _RawParameter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    choices: Annotated[list[bool | _INT32], msgspec.Meta(min_length=1, max_length=256)]
    unit: str = ""
    note: str = ""


class _RawCondition(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    when: str
    otherwise: bool | _INT32 = msgspec.field(name="else")


class _RawConstraint(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    holds: str
    why: str


class _RawLaunch(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    entry: str
    grid: _Formula
    threads: _Formula
    shared_bytes: _Formula


class _RawConstraints(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    static: dict[str, Any] = {}
    compiled: dict[str, Any] = {}


class _RawSpace(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    schema: str
    family: str
    op: Op
    template: str
    requires: Any
    parameters: dict[str, Any]
    constants: list[str]
    launches: Annotated[list[Any], msgspec.Meta(min_length=1, max_length=16)]
    constraints: Any
    seeds: list[Any]
    fallback: dict[str, Any]
    workspace_bytes: _Formula = 0
    conditions: dict[str, Any] = {}
    derived: dict[str, Any] = {}
    shared_parts: list[str] | None = None
    cost: dict[str, Any] = {}
    baseline: bool = False
    tensor_maps: dict[str, _Formula] = {}
    counters: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    deterministic: str | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named choice. The order of choices is the order of enumeration; the first is the default."""

    name: str
    choices: tuple[int, ...]
    unit: str = ""
    note: str = ""

    @property
    def is_bool(self) -> bool:
        """Whether the choices are true and false."""
        return isinstance(self.choices[0], bool)


@dataclass(frozen=True, slots=True)
class Condition:
    """When `when` is 0 the parameter means nothing and takes the value `otherwise`, so that equal kernels have equal names."""

    when: Expression
    otherwise: int


@dataclass(frozen=True, slots=True)
class Constraint:
    """A relation that a variant must satisfy, and the reason."""

    name: str
    holds: Relation
    why: str


@dataclass(frozen=True, slots=True)
class LaunchRule:
    """One launch: the grid follows from the problem, threads and dynamic shared bytes from the problem class."""

    entry: str
    grid: Expression
    threads: Expression
    shared_bytes: Expression


@dataclass(frozen=True, slots=True)
class Definition:
    """One checked file. Every name in every expression is known, and class-only expressions are class-only."""

    file: str
    family: str
    op: Op
    template: str
    requires: Requires
    parameters: tuple[Parameter, ...]
    conditions: Mapping[str, Condition]  # in an order in which each reads only settled parameters
    derived: Mapping[str, Expression]
    class_derived: tuple[str, ...]  # those that follow from problem class and variant alone
    constants: tuple[str, ...]
    launches: tuple[LaunchRule, ...]
    workspace_bytes: Expression
    static: tuple[Constraint, ...]
    compiled: tuple[Constraint, ...]
    seeds: tuple[Mapping[str, int], ...]
    fallback: Mapping[str, int]
    shared_parts: tuple[str, ...]
    cost: Mapping[str, int]
    digest: str
    baseline: bool = False  # for comparison only; a search does not offer it
    tensor_maps: Mapping[str, Expression] = field(default_factory=dict)  # rows of the boxes that bulk copies move, by tensor
    counters: int = 0  # words of device memory that are zero between launches
    deterministic: Expression | None = None  # 1 for variants whose bits never change, in a family that has others too

    def refuse(self, field: str, reason: object) -> NoReturn:
        """Raise InvalidSpace with file and field."""
        raise InvalidSpace(f"{self.file}: {field}: {reason}")


def parse_definition(text: str, file: str) -> Definition:
    """Check one file. Raises InvalidSpace with file, field and rule."""
    return _Reader(file, load_strict(text, file, error=InvalidSpace)).definition()


class _Reader:
    """Checks one file from top to bottom."""

    def __init__(self, file: str, value: object) -> None:
        self.file = file
        self.value = value
        if isinstance(value, dict) and value.get("schema") != SCHEMA:
            self.refuse("schema", f"this flashgen reads {SCHEMA}; the file says {value.get('schema')!r}.")
        self.raw = self.convert(value, _RawSpace, "")

    def refuse(self, field: str, reason: object) -> NoReturn:
        raise InvalidSpace(f"{self.file}: {field}: {reason}")

    def convert(self, value: object, kind: type[_T], field: str) -> _T:
        try:
            return msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as problem:
            reason, _, inner = str(problem).partition(" - at `$")
            where = f"{field}{inner.rstrip('`')}".lstrip(".") or "the file"
            self.refuse(where, reason)

    def definition(self) -> Definition:
        raw = self.raw
        if not _IDENTIFIER.fullmatch(raw.family):
            self.refuse("family", f"{raw.family!r} is not a name (small letters, digits, underscores).")
        if not _TEMPLATE.fullmatch(raw.template):
            self.refuse("template", f"{raw.template!r} is not a file below templates/.")
        parameters = self.parameters()
        conditions = self.conditions(parameters)
        derived = self.derived(parameters)
        known = set(parameters) | set(derived) | PROBLEM_NAMES | DEVICE_NAMES
        reaches = _transitive(parameters, derived)
        class_known = CLASS_NAMES | set(parameters)
        class_derived = tuple(name for name in derived if reaches[name] <= class_known)
        constraints = self.convert(raw.constraints, _RawConstraints, "constraints")
        deterministic = self.deterministic(class_known.union(class_derived))
        return Definition(
            file=self.file, family=raw.family, op=raw.op, template=raw.template,
            requires=self.convert(raw.requires, Requires, "requires"),
            parameters=tuple(parameters.values()), conditions=conditions, derived=derived, class_derived=class_derived,
            constants=self.constants(parameters, derived, set(class_derived)),
            launches=self.launches(known, class_known.union(class_derived)),
            workspace_bytes=self.formula(raw.workspace_bytes, "workspace_bytes", known),
            static=(*self.constraints(constraints.static, "constraints.static", known), *_asked_for(deterministic)),
            compiled=self.constraints(constraints.compiled, "constraints.compiled", known | KERNEL_NAMES),
            seeds=tuple(self.point(seed, f"seeds[{index}]", parameters, conditions) for index, seed in enumerate(raw.seeds)),
            fallback=self.point(raw.fallback, "fallback", parameters, conditions),
            shared_parts=self.shared_parts(derived), cost=self.cost(), digest=_digest(self.value),
            baseline=raw.baseline, tensor_maps=self.tensor_maps(class_known.union(class_derived)), counters=raw.counters,
            deterministic=deterministic,
        )  # fmt: skip

    def identifier(self, name: str, field: str, taken: Iterable[str] = ()) -> None:
        if not _IDENTIFIER.fullmatch(name) or name in _RESERVED:
            self.refuse(field, f"{name!r} cannot be a name here (small letters, digits, underscores; not {', '.join(sorted(_RESERVED))}).")
        if name in taken:
            self.refuse(field, f"{name!r} already names something above.")

    def parameters(self) -> dict[str, Parameter]:
        result: dict[str, Parameter] = {}
        points = 1
        for name, value in self.raw.parameters.items():
            field = f"parameters.{name}"
            self.identifier(name, field)
            raw = self.convert(value, _RawParameter, field)
            if len({type(choice) for choice in raw.choices}) > 1:
                self.refuse(f"{field}.choices", "choices are all integers or all true/false.")
            if len(set(raw.choices)) < len(raw.choices):
                self.refuse(f"{field}.choices", f"a choice stands twice: {raw.choices}.")
            points *= len(raw.choices)
            result[name] = Parameter(name, tuple(raw.choices), raw.unit, raw.note)
        if not result or points > MAX_POINTS:
            self.refuse("parameters", f"a space has 1 to {MAX_POINTS} points; this one has {points if result else 0}.")
        return result

    def conditions(self, parameters: Mapping[str, Parameter]) -> dict[str, Condition]:
        result: dict[str, Condition] = {}
        settled = (set(parameters) - set(self.raw.conditions)) | PROBLEM_NAMES | DEVICE_NAMES
        for name, value in self.raw.conditions.items():
            field = f"conditions.{name}"
            if name not in parameters:
                self.refuse(field, f"there is no parameter {name!r}.")
            raw = self.convert(value, _RawCondition, field)
            if isinstance(raw.otherwise, bool) != parameters[name].is_bool:
                self.refuse(f"{field}.else", f"{raw.otherwise!r} is not of the kind of the choices {list(parameters[name].choices)}.")
            when = self.parsed(parse_condition, raw.when, f"{field}.when")
            self.known(when.names, settled, f"{field}.when", raw.when)
            result[name] = Condition(when, raw.otherwise)
            settled.add(name)
        return result

    def derived(self, parameters: Mapping[str, Parameter]) -> dict[str, Expression]:
        result: dict[str, Expression] = {}
        known = set(parameters) | PROBLEM_NAMES | DEVICE_NAMES
        for name, value in self.raw.derived.items():
            field = f"derived.{name}"
            self.identifier(name, field, parameters)
            result[name] = self.formula(value, field, known)
            known.add(name)
        return result

    def formula(self, value: object, field: str, known: Iterable[str]) -> Expression:
        text = str(self.convert(value, _Formula, field))  # type: ignore[arg-type]
        expression = self.parsed(parse_expression, text, field)
        self.known(expression.names, known, field, text)
        return expression

    def parsed(self, parse: Callable[[str], _T], text: str, field: str) -> _T:
        try:
            return parse(text)
        except ExpressionError as problem:
            self.refuse(field, f"{problem}.")

    def known(self, names: Iterable[str], known: Iterable[str], field: str, text: str) -> None:
        unknown = sorted(set(names) - set(known))
        if unknown:
            self.refuse(
                field,
                f"undefined or circular name {', '.join(unknown)} in {text!r}; an expression reads parameters, derived lines above it, "
                "problem.* and device.* (compiled constraints also kernel.*).",
            )

    def constants(self, parameters: Mapping[str, Parameter], derived: Mapping[str, Expression], class_only: set[str]) -> tuple[str, ...]:
        for name in self.raw.constants:
            if name not in parameters and name not in derived:
                self.refuse("constants", f"{name!r} is neither a parameter nor a derived quantity.")
            if name not in parameters and name not in class_only:
                self.refuse("constants", f"{name!r} depends on more than problem class and variant; one source serves all lengths.")
        if len(set(self.raw.constants)) < len(self.raw.constants):
            self.refuse("constants", "a name stands twice.")
        return tuple(sorted(self.raw.constants))

    def launches(self, known: set[str], class_known: frozenset[str]) -> tuple[LaunchRule, ...]:
        result: list[LaunchRule] = []
        for index, value in enumerate(self.raw.launches):
            field = f"launches[{index}]"
            raw = self.convert(value, _RawLaunch, field)
            self.identifier(raw.entry, f"{field}.entry", [launch.entry for launch in result])
            rule = LaunchRule(
                raw.entry,
                self.formula(raw.grid, f"{field}.grid", known),
                self.formula(raw.threads, f"{field}.threads", known),
                self.formula(raw.shared_bytes, f"{field}.shared_bytes", known),
            )
            for part, expression in (("threads", rule.threads), ("shared_bytes", rule.shared_bytes)):
                if expression.names - class_known:
                    reads = ", ".join(sorted(expression.names - class_known))
                    self.refuse(f"{field}.{part}", f"{expression.text!r} depends on more than problem class and variant, through {reads}.")
            result.append(rule)
        return tuple(result)

    def constraints(self, raw: Mapping[str, Any], field: str, known: set[str]) -> tuple[Constraint, ...]:
        result = []
        for name, value in raw.items():
            self.identifier(name, f"{field}.{name}")
            constraint = self.convert(value, _RawConstraint, f"{field}.{name}")
            relation: Relation = self.parsed(parse_relation, constraint.holds, f"{field}.{name}.holds")
            self.known(relation.names, known, f"{field}.{name}.holds", constraint.holds)
            result.append(Constraint(name, relation, constraint.why))
        return tuple(result)

    def point(self, value: object, field: str, parameters: Mapping[str, Parameter], conditions: Mapping[str, Condition]) -> dict[str, int]:
        raw = self.convert(value, dict[str, bool | int], field)
        reason = refuses_point(raw, parameters.values(), conditions)
        if reason:
            self.refuse(field, reason)
        return {name: raw[name] for name in parameters}

    def shared_parts(self, derived: Mapping[str, Expression]) -> tuple[str, ...]:
        if self.raw.shared_parts is None:
            return ()
        for name in self.raw.shared_parts:
            if name not in derived or not name.endswith("_bytes"):
                self.refuse("shared_parts", f"{name!r} is not a derived quantity whose name ends in _bytes.")
        return tuple(self.raw.shared_parts)

    def tensor_maps(self, known: Iterable[str]) -> dict[str, Expression]:
        tensors = TENSOR_MAPS[self.raw.op]
        if unknown := sorted(set(self.raw.tensor_maps) - set(tensors)):
            self.refuse("tensor_maps", f"{unknown[0]!r} is not a tensor map of {self.raw.op}; there are {', '.join(tensors)}.")
        return {name: self.formula(value, f"tensor_maps.{name}", known) for name, value in self.raw.tensor_maps.items()}

    def deterministic(self, known: Iterable[str]) -> Expression | None:
        if self.raw.deterministic is None:
            return None
        when = self.parsed(parse_condition, self.raw.deterministic, "deterministic")
        self.known(when.names, known, "deterministic", self.raw.deterministic)
        return when

    def cost(self) -> dict[str, int]:
        return {name: self.convert(value, bool | _INT32, f"cost.{name}") for name, value in self.raw.cost.items()}  # type: ignore[arg-type]


def _asked_for(deterministic: Expression | None) -> tuple[Constraint, ...]:
    """The constraint that keeps variants whose bits change away from problems that ask for determinism."""
    if deterministic is None:
        return ()
    asked = parse_expression("problem.deterministic")
    holds = Relation(f"{asked.text} <= ({deterministic.text})", asked, deterministic)
    return (Constraint("deterministic", holds, "the caller asked for the same bits every time"),)


def refuses_point(point: Mapping[str, int], parameters: Iterable[Parameter], conditions: Mapping[str, Condition]) -> str | None:
    """Why `point` is not a value for every parameter, in words, or None. A conditional parameter may also have its `else` value."""
    by_name = {parameter.name: parameter for parameter in parameters}
    for name in point:
        if name not in by_name:
            return f"there is no parameter {name!r}; the parameters are {', '.join(by_name)}."
    for name, parameter in by_name.items():
        if name not in point:
            return f"the parameter {name!r} has no value; its choices are {shown(parameter.choices)}."
        value = point[name]
        right_kind = type(value) is bool or (type(value) is int and (not parameter.is_bool or value in (0, 1)))
        if not right_kind or (type(value) is bool and not parameter.is_bool):
            return f"{name} = {value!r} is not {'true or false' if parameter.is_bool else 'an integer'}."
        if value not in parameter.choices and not (name in conditions and value == conditions[name].otherwise):
            return f"{name} = {shown([value])} is not among its choices {shown(parameter.choices)}."
    return None


def shown(values: Iterable[int]) -> str:
    """Values as the file writes them."""
    return ", ".join(str(value).lower() for value in values)


def _transitive(parameters: Iterable[str], derived: Mapping[str, Expression]) -> dict[str, frozenset[str]]:
    """Parameters and dotted names that each derived quantity reads in the end."""
    result: dict[str, frozenset[str]] = {name: frozenset([name]) for name in parameters}
    for name, expression in derived.items():
        result[name] = frozenset().union(*(result.get(read, frozenset([read])) for read in expression.names))
    return result


def _digest(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
