"""Points of a search space that take the same resources, as one: what a picture of tile sizes has to tell apart.

Parameters that no constraint, launch or resource estimate reads (a rescale threshold, an order of tiles) do not change what fits; of such
twins the one with the shortest predicted time stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from flashgen.model import DeviceLimits, Variant
from flashgen.space import BoundSpace

TILE_NAMES = ("block_q", "block_kv", "num_stages")
"""The axes of the grid; a family that lacks one has the value in DEFAULTS."""
DEFAULTS = {"block_q": 0, "block_kv": 0, "num_stages": 1}
RESERVED_BYTES = 1024  # shared memory per CTA that the driver keeps, sm_80 and later
_RESOURCES = ("threads", "shared_bytes", "est_registers", "ctas_per_sm", *TILE_NAMES)


@dataclass(frozen=True, slots=True, eq=False)  # compared and hashed by identity: twins are many
class Shape:
    """Twins of equal resources: one of them, all of them, and their place in the grid."""

    first: Variant
    twins: tuple[Variant, ...]
    cell: tuple[int, int, int]  # block_q, block_kv, num_stages


class Shapes:
    """All shapes of a family for one problem class, feasible or not, in the order of enumeration."""

    def __init__(self, bound: BoundSpace) -> None:
        """`bound` gives the space; lengths and capacity may vary afterwards."""
        self.bound = bound
        self.read = _read_parameters(bound)

    @cached_property
    def all(self) -> tuple[Shape, ...]:
        """Every shape."""
        places = [place for place, each in enumerate(self.bound.space.parameters) if each.name in self.read]
        grouped: dict[tuple[int, ...], dict[Variant, None]] = {}
        for variant in self.bound.points():
            grouped.setdefault(tuple(int(variant.params[place][1]) for place in places), {})[variant] = None
        found = (tuple(twins) for twins in grouped.values())
        return tuple(Shape(twins[0], twins, cell_of(self.bound, twins[0])) for twins in found)


def cell_of(bound: BoundSpace, variant: Variant) -> tuple[int, int, int]:
    """(block_q, block_kv, num_stages) of a variant."""
    at = bound.names(variant)
    q, kv, stages = (int(at.get(name, DEFAULTS[name])) for name in TILE_NAMES)
    return q, kv, stages


def _read_parameters(bound: BoundSpace) -> tuple[str, ...]:
    """Parameters that reach a constraint or a resource, directly or through derived lines."""
    definition = bound.space.definition
    wanted = {name for rule in definition.static for name in rule.holds.names}
    wanted |= {name for launch in definition.launches for each in (launch.threads, launch.shared_bytes) for name in each.names}
    wanted |= set(_RESOURCES)
    for name in reversed(list(definition.derived)):
        if name in wanted:
            wanted |= definition.derived[name].names
    return tuple(each.name for each in bound.space.parameters if each.name in wanted)


# Capacities -----------------------------------------------------------------------------------------------------------


def with_capacity(device: DeviceLimits, shared_bytes: int) -> DeviceLimits:
    """The device with another capacity per CTA; its own capacity leaves it as it is."""
    return device if shared_bytes == device.shared_bytes_per_cta else device.with_shared_bytes(shared_bytes)


def allocated_bytes(device: DeviceLimits, shared_bytes: int) -> int:
    """Shared memory that one CTA occupies on an SM: blocks of 128 bytes, and what the driver reserves."""
    return -(-shared_bytes // 128) * 128 + (RESERVED_BYTES if device.sm >= 80 else 0)


def with_resident(device: DeviceLimits, shared_bytes: int, ctas: int) -> DeviceLimits:
    """The device with shared memory for exactly `ctas` CTAs of `shared_bytes` each."""
    return replace(device, shared_bytes_per_cta=max(shared_bytes, 1), shared_bytes_per_sm=allocated_bytes(device, shared_bytes) * ctas)
