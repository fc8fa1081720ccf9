"""Which limit binds a variant on a problem, and what would move it: the cost model's parts in words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashgen import cost
from flashgen.model import CompileReport, Variant
from flashgen.space import BoundSpace

SHORT_LAUNCHES = 3.0
"""A prediction below so many launches' time is called bound by the launch."""
WAITING_SHARE = 1.25
"""The SMs need so much longer than their busiest pipe: then waiting, not work, binds."""

NAMES = {
    "compute": "tensor cores or multiply-adds",
    "exp": "exp2 throughput",
    "softmax": "float32 arithmetic of the softmax",
    "shared": "shared-memory bandwidth",
    "l2": "L2 bandwidth",
    "hbm": "memory bandwidth",
    "occupancy": "occupancy: too few resident warps to overlap products, softmax and copies",
    "idle": "idle SMs: too few CTAs",
    "launch": "launch overhead",
    "nothing": "nothing to do",
    "capacity": "shared-memory capacity",
}
_PIPES = {"tensor": "compute", "exp2": "exp", "fp32": "softmax", "shared": "shared", "l2": "l2", "dram": "hbm"}


@dataclass(frozen=True, slots=True)
class Limit:
    """What binds, by a key of NAMES; the evidence with its numbers; what would move it."""

    key: str
    evidence: str
    remedy: str

    @property
    def name(self) -> str:
        """The limit in words."""
        return NAMES[self.key]


def binding(bound: BoundSpace, variant: Variant, prediction: cost.Prediction) -> str:
    """The key of what binds a predicted run."""
    if math.isinf(prediction.us):
        return "capacity"
    parts = dict(prediction.parts)
    if not parts or set(parts) == {"launch"}:
        return "nothing"
    if prediction.us < SHORT_LAUNCHES * cost.LAUNCH_US * len(bound.grids(variant)):
        return "launch"
    pipes = {name: value for name, value in parts.items() if name in _PIPES}
    busiest = max(pipes, key=lambda name: pipes[name])
    if parts["sm"] < WAITING_SHARE * pipes[busiest]:
        key = _PIPES[busiest]
        return "compute" if key == "softmax" and "tensor" not in parts else key  # without tensor cores both are multiply-adds
    return "idle" if _starved(bound, prediction) else "occupancy"


def explain(bound: BoundSpace, variant: Variant, report: CompileReport | None = None) -> Limit:
    """What binds, why, and what would move it."""
    prediction = cost.predict(bound, variant, report)
    key = binding(bound, variant, prediction)
    return Limit(key, _evidence(key, bound, variant, prediction), _remedy(key, bound, variant))


def _starved(bound: BoundSpace, prediction: cost.Prediction) -> bool:
    """Whether the grid is smaller than one CTA per SM, or fills only a part of the device."""
    grid = prediction.waves * bound.device.sm_count
    return prediction.waves < 1 and grid < bound.device.sm_count * 4


def _evidence(key: str, bound: BoundSpace, variant: Variant, prediction: cost.Prediction) -> str:
    parts = dict(prediction.parts)
    busy = {name: parts[name] for name in parts if name in _PIPES}
    if key in ("nothing", "capacity") or not busy:
        return "No query row." if key == "nothing" else "Not even one CTA fits an SM."
    most = max(busy, key=lambda name: busy[name])
    grid = sum(bound.grids(variant))
    if key == "launch":
        return f"{prediction.us:.1f} µs predicted, of which {cost.LAUNCH_US * len(bound.grids(variant)):.0f} µs are the launch."
    if key in ("idle", "occupancy"):
        return (
            f"The SMs need {parts['sm']:.1f} µs, their busiest unit ({most}) {busy[most]:.1f} µs; "
            f"{grid:,} CTAs on {bound.device.sm_count} SMs are {prediction.waves:.2f} waves."
        )
    return f"{most} is busy for {busy[most]:.1f} of {prediction.us:.1f} µs; the SMs need {parts['sm']:.1f} µs in all."


def _remedy(key: str, bound: BoundSpace, variant: Variant) -> str:
    problem, at = bound.problem, bound.names(variant)
    if key == "hbm" and problem.seqlen_q < 16:
        return (
            f"With {problem.seqlen_q} query row{'s' * (problem.seqlen_q != 1)} every key and value is read once for almost no arithmetic: "
            "no tile size helps. Fewer bytes do: grouped query heads, a shorter window, more query rows per pass."
        )
    if key == "idle" and problem.seqlen_q <= at.get("block_q", 0):
        return "One query tile holds all rows of a head, so no tile size gives more CTAs: more batch or heads do, or keys split over CTAs."
    if key == "idle":
        return (
            f"Smaller query tiles (now {at.get('block_q', 0)} rows), a larger batch or more heads give more CTAs; "
            "splitting the keys over CTAs would too."
        )
    return {
        "compute": "Tiles do not move this: it is the rate of the arithmetic units. A faster instruction or a mask that skips tiles does.",
        "exp": "One exponential per score whatever the tile: a larger head dim does more products per exponential.",
        "softmax": "Arithmetic per score: a rescale threshold above 0 and larger key tiles save some of it.",
        "shared": "More query rows per warp reuse each loaded K and V fragment more often; queries in registers save their loads.",
        "l2": "Larger query tiles read keys and values less often; that takes shared memory or registers.",
        "hbm": "Larger query tiles, or a tile order that keeps few heads in flight so that L2 holds their keys.",
        "occupancy": "More warps per SM (smaller tiles, fewer registers, more CTAs per SM) or more stages hide the waits.",
        "launch": "The problem is too small for a kernel of its own to matter: batch more, or capture a graph of launches.",
        "nothing": "There is nothing to compute.",
        "capacity": "Smaller tiles, fewer stages, queries in registers, or a device with more shared memory.",
    }[key]
