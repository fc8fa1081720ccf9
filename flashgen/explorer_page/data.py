"""What the page knows: formulas, shapes, predictions, bytes, limits, comparison. Plain JSON, kept small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from flashgen import __version__, accounting, cost, limits
from flashgen.device import PRESETS
from flashgen.explorer import Exploration, Traffic
from flashgen.model import Variant
from flashgen.shapes import DEFAULTS, Shape, allocated_bytes
from flashgen.space import BoundSpace
from flashgen.tile_grid import KIB, LARGEST_CAPACITY, Family, shared_parts

SCHEMA = "flashgen.explore/1"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
LIMIT_KEYS = tuple(limits.NAMES)
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}


def page_data(found: Exploration) -> dict[str, Any]:
    """Everything that the script reads."""
    problem, device = found.problem, found.device
    return {
        "schema": SCHEMA,
        "flashgen": __version__,
        "problem": {"text": str(problem), "dtype": str(problem.dtype), "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
        | {"batch_heads": problem.batch_heads, "length": problem.seqlen_kv, "square": problem.seqlen_q == problem.seqlen_kv}
        | {"seqlen_q": problem.seqlen_q, "mask": str(problem.mask), "element_bytes": problem.dtype.bytes},
        "device": {name: getattr(device, name) for name in device.__dataclass_fields__} | {"reserved": allocated_bytes(device, 0)},
        "capacities": list(found.capacities),
        "marks": _marks(),
        "largest": LARGEST_CAPACITY,
        "lengths": list(found.lengths),
        "flops": [cost.flops(each.problem) for each in found.traffic],
        "limits": dict(limits.NAMES),
        "families": [_family(family, found) for family in found.families],
        "traffic": [_traffic(each) for each in found.traffic],
        "passes": {name: _passes(account) for name, account in (("standard", found.here().standard), ("tiled", found.here().tiled))},
        "matrix_bytes": accounting.matrix_bytes(problem),
        "crossover": accounting.crossover_block_q(problem),
        "paper": accounting.paper_block_kv(problem, device.shared_bytes_per_cta),
        "scatter": _scatter(found),
        "comparison": _comparison(found),
    }


def _marks() -> list[tuple[int, str]]:
    """Capacities of real GPUs, with the names of the presets that have them."""
    names: dict[int, list[str]] = {}
    for limits_of in PRESETS.values():
        label = f"sm_{limits_of.sm}"
        held = names.setdefault(limits_of.shared_bytes_per_cta, [])
        if label not in held:
            held.append(label)
    return [(49152, "without opt-in"), *((size, ", ".join(sorted(held))) for size, held in sorted(names.items()))]


# Formulas -------------------------------------------------------------------------------------------------------------


def formula(text: str) -> Any:
    """An expression of a space as nested lists: 3, "name", ["+", a, b], ["min", a, b, …]; conditions with "<=", "==" and "and"."""
    return _node(ast.parse(text.strip(), mode="eval").body)


def _node(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.BinOp):
        return [_OPERATORS[type(node.op)], _node(node.left), _node(node.right)]
    if isinstance(node, ast.UnaryOp):
        return ["-", 0, _node(node.operand)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return [node.func.id, *(_node(each) for each in node.args)]
    raise ValueError(f"no formula: {ast.dump(node)}")


def _constraint(name: str, text: str, why: str) -> dict[str, Any]:
    left, right = text.split("<=")
    return {"name": name, "text": text, "why": why, "left": formula(left), "right": formula(right)}


# Families -------------------------------------------------------------------------------------------------------------


def _family(family: Family, found: Exploration) -> dict[str, Any]:
    bound, definition = family.bound, family.bound.space.definition
    free = [each.name for each in bound.space.parameters if each.name not in family.shapes.read]
    times = {(each.variant, each.problem): each.median_us for each in found.measured}
    return {
        "name": family.name,
        "digest": bound.space.digest,
        "names": {name: int(value) for name, value in bound.names(family.shapes.all[0].first).items() if "." in name},
        "parameters": [each.name for each in bound.space.parameters],
        "read": list(family.shapes.read),
        "free": free,
        "derived": [[name, expression.text, formula(expression.text)] for name, expression in definition.derived.items()],
        "constraints": [_constraint(each.name, each.holds.text, each.why) for each in definition.static],
        "parts": [name for name, _ in shared_parts(bound, family.shapes.all[0].first)],
        "choices": [list(choices) for choices in _choices(family)],
        "shapes": _shapes_text(family),
        "defaults": DEFAULTS,
        "runs": _runs(family, found, times, free),
    }


def _choices(family: Family) -> list[list[int]]:
    """Per read parameter the values that occur."""
    return [sorted({int(shape.first.as_dict()[name]) for shape in family.shapes.all}) for name in family.shapes.read]


def _shapes_text(family: Family) -> str:
    """Every shape as one character per read parameter: the place of its value in `choices`, base 36."""
    choices = _choices(family)
    digits = []
    for shape in family.shapes.all:
        values = shape.first.as_dict()
        digits += [DIGITS[held.index(int(values[name]))] for name, held in zip(family.shapes.read, choices, strict=True)]
    return "".join(digits)


def _runs(family: Family, found: Exploration, times: dict[Any, float], free: list[str]) -> dict[str, Any]:
    """By place of a shape: what it needs, and its predictions where it is the fastest of its tile at some capacity and length."""
    places = {shape: place for place, shape in enumerate(family.shapes.all)}
    wanted: dict[Shape, dict[int, set[int]]] = {}
    for step, length in enumerate(found.lengths):
        for shape, resident in _winners(family, length):
            wanted.setdefault(shape, {}).setdefault(resident, set()).add(step)
    return {str(places[shape]): _run(family, shape, residents, found, times, free) for shape, residents in wanted.items()}


def _winners(family: Family, length: int) -> Iterator[tuple[Shape, int]]:
    """Shapes that are the fastest of their tile at some capacity in whole KiB, with the number of resident CTAs there."""
    by_tile: dict[tuple[int, int, int], list[tuple[Shape, int]]] = {}
    for shape in family.shapes.all:
        least = family.least_capacity(shape, length)
        if least is not None:
            by_tile.setdefault(shape.cell, []).append((shape, least))
    for candidates in by_tile.values():
        steps = {least for _, least in candidates} | {size for shape, _ in candidates for size in _steps(family, shape)}
        for capacity in steps:
            here = [(shape, family.taken(shape, capacity).ctas_per_sm) for shape, least in candidates if least <= capacity]
            runs = [
                (family.best(shape, length, resident).prediction.us, place, resident)
                for place, (shape, resident) in enumerate(here)
                if resident
            ]
            if runs:
                _, place, resident = min(runs)
                yield here[place][0], resident


def _steps(family: Family, shape: Shape) -> Iterator[int]:
    """Capacities in whole KiB from which one more CTA is resident."""
    one = allocated_bytes(family.bound.device, family.taken(shape).shared_bytes)
    for resident in range(1, family.resident_by_the_rest(shape) + 1):
        size = -(-max(KIB, resident * one - KIB) // KIB) * KIB
        if size > LARGEST_CAPACITY:
            return
        yield size
    yield family.bound.device.shared_bytes_per_cta


def _run(
    family: Family, shape: Shape, residents: dict[int, set[int]], found: Exploration, times: dict[Any, float], free: list[str]
) -> dict[str, Any]:
    taken, lengths = family.taken(shape), found.lengths
    records = {
        str(resident): [_record(family, shape, lengths[step], resident, free) if step in steps else 0 for step in range(len(lengths))]
        for resident, steps in sorted(residents.items())
    }
    measured = [_measured(shape, family.at(length), times) for length in lengths]
    compiled = int(family.report(shape) is not None)
    needs = [taken.est_registers, compiled, family.resident_by_the_rest(shape), taken.threads]
    return {"needs": needs, "at": records} | ({"measured": measured} if any(measured) else {})


def _record(family: Family, shape: Shape, length: int, resident: int, free: list[str]) -> list[Any]:
    """[µs, limit, DRAM KiB, L2 KiB, shared KiB, values of the parameters that change no resource]."""
    best = family.best(shape, length, resident)
    sizes = [_short(each / 1024) for each in (best.traffic.dram_bytes, best.traffic.l2_bytes, best.shared_traffic_bytes)]
    values = best.variant.as_dict()
    return [_short(best.prediction.us), LIMIT_KEYS.index(best.limit), *sizes, [int(values[name]) for name in free]]


def _measured(shape: Shape, bound: BoundSpace, times: dict[Any, float]) -> float | None:
    return min((times[twin, bound.problem] for twin in shape.twins if (twin, bound.problem) in times), default=None)


def _short(value: float) -> float:
    """Four significant digits."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded.is_integer() else rounded


# Bytes, times, errors -------------------------------------------------------------------------------------------------


def _traffic(each: Traffic) -> dict[str, Any]:
    return {
        "length": each.problem.seqlen_kv, "family": each.family, "variant": each.variant.as_dict(),
        "standard": [each.standard.total_bytes, each.standard.once_bytes, each.standard.matrix_bytes],
        "tiled": [each.tiled.total_bytes, each.tiled.once_bytes, each.dram_bytes],
        "limit": each.limit.key, "evidence": each.limit.evidence, "remedy": each.limit.remedy,
        "us": _short(each.prediction.us), "waves": _short(each.prediction.waves),
        "parts": [[name, _short(value)] for name, value in each.prediction.parts],
    }  # fmt: skip


def _passes(account: accounting.Account) -> list[list[Any]]:
    return [[each.kernel, each.operand, each.action, each.bytes, each.once, each.times] for each in account.passes]


def _scatter(found: Exploration) -> list[list[Any]]:
    """[predicted µs, measured µs, variant, length] of every measured variant that the shown families have."""
    points = []
    families = {family.name: family for family in found.families}
    shapes = {twin: shape for family in found.families for shape in family.shapes.all for twin in shape.twins}
    for each in found.measured:
        if each.variant in shapes and each.variant.family in families:
            bound = families[each.variant.family].bound.space.bind(each.problem, found.device)
            predicted = cost.roofline_us(bound, each.variant, each.report)
            points.append([_short(predicted), _short(each.median_us), _params(each.variant), each.problem.seqlen_kv])
    return points


def _params(variant: Variant) -> str:
    return f"{variant.family} " + " ".join(f"{name}={int(value)}" for name, value in variant.params)


def _comparison(found: Exploration) -> dict[str, Any]:
    if found.comparison is None:
        return {"missing": found.comparison_missing}
    methods = [
        {"name": each.name, "kind": each.kind, "how": each.how, "max": each.max_error, "rms": each.rms_error, "bytes": each.bytes}
        | {"from": each.bytes_from, "operations": each.operations, "ulp": [list(bucket) for bucket in each.histogram]}
        for each in found.comparison.methods
    ]
    return {"problem": str(found.comparison.problem), "plain": found.comparison.plain_error, "methods": methods}
