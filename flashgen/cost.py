"""What a variant takes and moves, and how long it should run: resources, occupancy, bytes, flops and a predicted time.

Predicted times order variants before anything is measured. They are never shown as measurements.

The clock of one SM is the unit. All CTAs that are resident on an SM advance one K/V tile in a *round*. A round lasts as long as its busiest
pipe (tensor or multiply-add, exp2, float32 arithmetic of the softmax, shared memory), or as long as one warp needs for its tile alone, one
phase after the other, whichever is longer. Rounds times tiles, rounded to whole CTAs per SM, gives the time on the SMs; global memory and
L2 bound it from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from flashgen.model import CompileReport, DeviceLimits, MaskKind, Op, Problem, Resources, Variant
from flashgen.space import BoundSpace

EXP2_PER_CLOCK = 16  # per SM, sm_70 to sm_120
SHARED_BYTES_PER_CLOCK = 128  # per SM
L2_SHARE = 0.85  # of L2 for what is read again; queries and outputs pass through too. By counters of one NVIDIA H200
L2_BYTES_PER_CLOCK = 48  # per SM; reached in practice
ISSUERS = 4  # warp schedulers of an SM
SOFTMAX_OPS = 5  # float32 instructions per score: scale, maximum, sum, conversion
ROW_OPS = 64  # float32 instructions per query row and tile: shuffles and arithmetic of maximum and sum, repeated by the lanes of a row
TILE_CLOCKS = 750  # barriers, waits and filling of pipes per tile
COPY_LATENCY_CLOCKS = 1000  # global memory to shared memory
CTA_CLOCKS = 4000  # first loads of a CTA and its epilogue
LAUNCH_US = 3.0
WARP_OVERLAP = 0.6  # how far more warps of one CTA shorten its tile: barriers keep them in the same phase, so less than in proportion
SMOOTHNESS = 4.0  # of the maximum of pipe time and latency
SPILL_BYTES = 1000  # so many spilled bytes per thread double the time; they travel to local memory and back
TAIL_TILES = (1.2, 0.3)  # masked problems: longest CTAs that the last SM waits for, by tile order (heads in turn, longest first)
# The constants above from TILE_CLOCKS on were fitted to recorded times of ampere_forward on one NVIDIA H200 (tests/test_cost_recorded.py).
# mma.sync reaches only a part of the rate that newer tensor instructions (wgmma, tcgen05) have; measured on Hopper, assumed on sm_100.
MMA_SYNC_SHARE = {90: 0.63, 100: 0.28}
MAX_COUNTED_TILES = 2048
# Warp-specialised kernels (templates/hopper): fitted to recorded times of hopper_forward on one NVIDIA H200 (tests/recorded/h200-hopper).
ALU_SHARE = 0.88  # of the float32 work that exp2 does not hide
CHAIN_CLOCKS = 520  # waits, votes and packing per K/V tile
SUMS_ONLY = (0.97, 0.64)  # float32 work of the softmax that looks for the maximum, and of the one that looks at sums, over SOFTMAX_OPS
EPILOGUE_CLOCKS = (1160, 390)  # registers to global memory; shared tile and bulk store; for 128 columns
QUERY_CLOCKS = 130  # queries that arrive after the last tile
SECTION_TAIL, STATIC_TAIL = 0.39, 1.8  # of a longest query tile


_Pipes = Callable[[BoundSpace, dict[str, int]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes moved by one run. Reads of K and V count in L2 once per query tile, in DRAM only where L2 does not hold them."""

    dram_bytes: int
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time in µs, what each resource alone would need, and the name of the one that binds."""

    us: float
    parts: tuple[tuple[str, float], ...]
    waves: float  # CTAs over the CTAs that the device holds at once

    @property
    def bound_by(self) -> str:
        """The resource that needs longest."""
        return max(self.parts, key=lambda part: part[1])[0] if self.parts else "nothing"


def visible_pairs(problem: Problem) -> int:
    """Exact number of (query, key) pairs that the mask lets through, for one head."""
    low, high = _reach(problem)

    def seen_before(offset: int) -> int:  # sum over the rows of clamp(row + offset, 0, seqlen_kv)
        return _ramp(offset + problem.seqlen_q, problem.seqlen_kv) - _ramp(offset, problem.seqlen_kv)

    upper = problem.seqlen_q * problem.seqlen_kv if high is None else seen_before(high + 1)
    return upper - (0 if low is None else seen_before(low))


def flops(problem: Problem) -> int:
    """The operations that every TFLOP/s figure of this project divides by: visible pairs × (head_dim + head_dim_v) × 2, over all heads.

    Backward: five products, three of them over head_dim and two over head_dim_v, whatever a kernel computes again. Hidden pairs count
    nothing. The common convention for causal masks, half of all pairs, differs by the diagonal: 1/seqlen of the total.
    """
    backward = problem.op is Op.BACKWARD
    columns = 3 * problem.head_dim + 2 * problem.head_dim_v if backward else problem.head_dim + problem.head_dim_v
    return 2 * visible_pairs(problem) * columns * problem.batch_heads


def resources(bound: BoundSpace, variant: Variant, report: CompileReport | None = None) -> Resources:
    """What one CTA takes and how many are resident per SM. Registers are the compiler's with a report, else the space's estimate."""
    at = bound.names(variant)
    entries = bound.entry_points(variant)
    threads = max(entry.threads for entry in entries)
    shared = max(entry.shared_bytes for entry in entries)
    parts = tuple((name, at[name]) for name in bound.space.definition.shared_parts) or (("shared_bytes", shared),)
    if report is None:
        promised = bound.device.registers_per_sm // max(1, threads * at.get("ctas_per_sm", 1)) // 8 * 8  # forced by launch bounds
        registers = min(at.get("est_registers", 64), max(promised, 1), 255)
    else:
        registers = report.registers
    static = report.static_shared_bytes if report else 0
    ctas, limit = occupancy(bound.device, threads, registers, shared + static)
    return Resources(parts, shared, registers, threads, ctas, limit)


def occupancy(device: DeviceLimits, threads: int, registers: int, shared_bytes: int) -> tuple[int, str]:
    """CTAs per SM, and the limit that binds. Registers come in blocks of 256 per warp, shared memory in blocks of 128 bytes plus 1 KiB."""
    if shared_bytes > device.shared_bytes_per_cta:
        return 0, "shared"
    warps = max(1, math.ceil(threads / 32))
    per_warp = max(1, math.ceil(registers / 8)) * 8 * 32
    warps_by_registers = device.registers_per_sm // ISSUERS // per_warp * ISSUERS
    reserved = 1024 if device.sm >= 80 else 0
    per_cta = math.ceil(shared_bytes / 128) * 128 + reserved
    limits = {
        "shared": device.shared_bytes_per_sm // per_cta if per_cta else device.ctas_per_sm,
        "registers": warps_by_registers // warps,
        "threads": device.threads_per_sm // (warps * 32),
        "ctas": device.ctas_per_sm,
    }
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def traffic(bound: BoundSpace, variant: Variant, ctas_per_sm: int, in_step: bool = True) -> Traffic:
    """Bytes that one run moves, with `ctas_per_sm` CTAs resident per SM.

    `in_step=False` gives the bytes where CTAs of one head have drifted apart though no mask parts them (see `_missed_share`).
    """
    problem, at = bound.problem, bound.names(variant)
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    backward = problem.op is Op.BACKWARD  # as many gradients as operands
    once = problem.batch_heads * problem.seqlen_q * (2 * row + 8 if backward else row + 4)  # q, o, lse
    keys = problem.batch * problem.heads_kv * problem.seqlen_kv * row
    block_kv = at.get("block_kv", 64)
    tiles, _, _ = _tiles(problem, at.get("block_q", 64), block_kv)
    read = max(keys, int(tiles * block_kv * row * problem.batch_heads)) if tiles else 0
    missed = int(min(read, keys) + max(0, read - keys) * _missed_share(bound, at, ctas_per_sm, in_step))
    matrices = again = 0
    if bound.space.definition.cost.get("materialised", 0):  # scores and probabilities are written and read in global memory
        matrix = problem.batch_heads * problem.seqlen_q * problem.seqlen_kv * problem.dtype.bytes
        matrices, again = 4 * matrix, int(matrix * _share_read_again(bound, at, ctas_per_sm))
    once += keys if backward else 0
    return Traffic(once + missed + matrices + again, once + read + matrices + again)


def _missed_share(bound: BoundSpace, at: dict[str, int], ctas_per_sm: int, in_step: bool = True) -> float:
    """Share of the reads of K and V after the first ones that L2 does not answer.

    Between two walks over the K and V of one head come walks over those of all heads whose query tiles are taken in turn, as far as their
    mask lets them see. Where all of that fits L2, nothing is missed. Where it does not, a query tile finds only what another one of the
    same head, in flight at the same time, has just left; the first of them finds nothing. With a mask they start at different keys and end
    at different times: they are spread over the walk, and find the share of it that L2 holds. Without one all are equally long and start
    together, and the others miss nothing while they walk in step. Nothing but L2 keeps them there: who is ahead waits for DRAM, who follows
    does not. Once they are further apart than L2 reaches, the next walks start apart as well, and they find no more than with a mask. When
    that happens is chance, and differs from launch to launch; `in_step` chooses the state. Few CTAs per head and many tiles that L2 cannot
    hold make the states differ.
    """
    problem, block_kv = bound.problem, at.get("block_kv", 64)
    visits, query_tiles = _visits(problem, at.get("block_q", 64), block_kv)
    if not sum(visits):
        return 0.0
    in_flight = max(1, ctas_per_sm * bound.device.sm_count)
    mixed = at.get("head_section", problem.batch_heads if at.get("tile_order", 0) else 1)  # heads whose query tiles come in turn
    heads = min(problem.batch_heads, max(mixed, math.ceil(in_flight / query_tiles)))
    key_heads = math.ceil(heads / problem.gqa_group)
    others = max(0.0, 1.0 - key_heads / in_flight)
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    held = L2_SHARE * bound.device.l2_bytes / (key_heads * block_kv * row_bytes)  # tiles of each head
    return _missed_of(problem, at.get("block_q", 64), block_kv, held, others, in_step)


@lru_cache(maxsize=4096)
def _missed_of(problem: Problem, block_q: int, block_kv: int, held: float, others: float, in_step: bool) -> float:
    """The share of all visits that is missed; `held` tiles of each head are in L2, a share of `others` find them there."""
    visits, _ = _visits(problem, block_q, block_kv)
    found = in_step and min(visits) == max(visits)
    return sum(count - others * (count if found else held) for count in visits if count > held) / sum(visits)


def _share_read_again(bound: BoundSpace, at: dict[str, int], ctas_per_sm: int) -> float:
    """Share of the matrix of scores that the textbook softmax reads from DRAM a second time.

    One warp owns a row. Its first two walks, for maximum and sum, are short, since 16 loads are in flight. The third waits for one load
    after the other, since each store might change what the next load reads; so at any time nearly every warp is somewhere in its third.
    Until a warp comes to the part p of its row, the others touch the part p of theirs, and p of them finish one row and read all of the
    next: 2p - p²/2 rows per row in flight. From where that exceeds L2, the rest of the row is read again.
    """
    problem = bound.problem
    warps = ctas_per_sm * bound.device.sm_count * (at.get("threads", 128) // 32)
    in_flight = min(warps, problem.batch_heads * problem.seqlen_q) * problem.seqlen_kv * problem.dtype.bytes
    held = L2_SHARE * bound.device.l2_bytes / max(1, in_flight)  # rows per row in flight
    return math.sqrt(4.0 - 2.0 * min(1.5, held)) - 1.0  # 1 - p


def roofline_us(bound: BoundSpace, variant: Variant, report: CompileReport | None = None) -> float:
    """Predicted time in µs of one run; infinite when not even one CTA fits an SM. Deterministic."""
    return predict(bound, variant, report).us


def predict(bound: BoundSpace, variant: Variant, report: CompileReport | None = None) -> Prediction:
    """The predicted time and its parts."""
    problem, device, at = bound.problem, bound.device, bound.names(variant)
    taken = resources(bound, variant, report)
    launches = LAUNCH_US * len(bound.space.definition.launches)
    tiles, largest, query_tiles = _tiles(problem, at.get("block_q", 64), at.get("block_kv", 64))
    ctas = query_tiles * problem.batch_heads
    if taken.ctas_per_sm == 0:
        return Prediction(math.inf, (), 0.0)
    if ctas == 0:
        return Prediction(launches, (("launch", launches),), 0.0)
    pipes = _pipes(bound, at)
    if "consumer_warpgroups" in at:
        clocks = _warpgroup_clocks(bound, at, ctas, tiles / query_tiles, largest, pipes)
    else:
        alone = _alone(pipes, math.ceil(taken.threads / 32), at)
        tail = TAIL_TILES[min(1, at.get("tile_order", 0))]
        clocks = _sm_clocks(device, ctas, tiles / query_tiles, largest, taken.ctas_per_sm, pipes, alone, tail)
    if report is not None:
        clocks *= 1.0 + report.spill_bytes / SPILL_BYTES
    moved = traffic(bound, variant, taken.ctas_per_sm)
    per_us = device.clock_mhz
    all_tiles = tiles * problem.batch_heads / device.sm_count
    parts = (
        *((name, all_tiles * value / per_us) for name, value in pipes.items()),
        ("sm", clocks / per_us),
        ("l2", moved.l2_bytes / (L2_BYTES_PER_CLOCK * device.sm_count * per_us)),
        ("dram", moved.dram_bytes / (device.dram_gb_per_s * 1e3)),
    )
    busiest = max(value for _, value in parts)
    others = sum(value for _, value in parts[len(pipes) :]) - busiest
    return Prediction(launches + busiest + 0.1 * others, parts, ctas / (device.sm_count * taken.ctas_per_sm))


def _in_passes(pipes: _Pipes) -> _Pipes:
    """Clocks of all products, from those of a forward pass's two. A backward pass has five, or more where a variant computes some again."""

    def all_products(bound: BoundSpace, at: dict[str, int]) -> dict[str, float]:
        backward = bound.problem.op is Op.BACKWARD
        passes = at.get("products", bound.space.definition.cost.get("products", 5)) / 2 if backward else 1.0
        return {name: clocks * passes for name, clocks in pipes(bound, at).items()}

    return all_products


@_in_passes
def _pipes(bound: BoundSpace, at: dict[str, int]) -> dict[str, float]:
    """Clocks that one tile of one CTA keeps each pipe of its SM busy."""
    device, problem, hints = bound.device, bound.problem, bound.space.definition.cost
    block_q, block_kv = at.get("block_q", 64), at.get("block_kv", 64)
    scores = block_q * block_kv
    clocks_per_second = device.sm_count * device.clock_mhz * 1e6
    lanes = device.fp32_tflops * 1e12 / 2 / clocks_per_second  # float32 operations per clock
    rescale = 0 if at.get("rescale_threshold", 0) else block_q * problem.head_dim_v
    softmax = (SOFTMAX_OPS * scores + ROW_OPS * block_q + rescale) / lanes
    if hints.get("mma", "num_warps" in at):
        dims = _padded(problem.head_dim) + _padded(problem.head_dim_v)
        share = 1.0 if "consumer_warpgroups" in at else MMA_SYNC_SHARE.get(device.sm, 1.0)
        rate = device.tensor_tflops * 1e12 / clocks_per_second * share
        warps = at.get("num_warps", at.get("consumer_warpgroups", 4))  # each reads all of K and V
        read = warps * block_kv * dims + (0 if at.get("q_in_registers", 0) else block_q * _padded(problem.head_dim))
        shared = (read + block_kv * dims) * problem.dtype.bytes / SHARED_BYTES_PER_CLOCK
        return {"tensor": 2 * scores * dims / rate, "exp2": scores / EXP2_PER_CLOCK, "fp32": softmax, "shared": shared}
    rows, columns = at.get("rows_per_team", 1), max(1, block_kv // at.get("lanes_per_team", block_kv))
    outputs = max(1, problem.head_dim_v // at.get("lanes_per_team", problem.head_dim_v))
    words = scores * (problem.head_dim * (1 / rows + 1 / columns) + problem.head_dim_v * (1 / rows + 1 / outputs))
    products = scores * (problem.head_dim + problem.head_dim_v) / lanes
    return {"fp32": products + softmax, "exp2": scores / EXP2_PER_CLOCK, "shared": words * 4 / SHARED_BYTES_PER_CLOCK}


def _alone(pipes: dict[str, float], warps: int, at: dict[str, int]) -> float:
    """Clocks that one warp needs for its part of a tile with nothing to overlap it: phases one after the other, waits, late copies."""
    phases: float = sum(pipes.values()) * (ISSUERS / warps) ** WARP_OVERLAP
    stages = at.get("num_stages", 1)
    exposed = max(0.0, COPY_LATENCY_CLOCKS - phases * (stages - 0.5))
    return phases + exposed + TILE_CLOCKS


def _warpgroup_clocks(
    bound: BoundSpace, at: dict[str, int], ctas: int, mean_tiles: float, largest: float, pipes: dict[str, float]
) -> float:
    """Clocks of warp-specialised kernels: one warpgroup's softmax runs beside another's products, and copies beside both.

    A consumer's chain per K/V tile is its scores, then its softmax; the SM's is all products. The first and the last tile of a query tile
    overlap with nothing of their own consumer.
    """
    device, problem, consumers = bound.device, bound.problem, at["consumer_warpgroups"]
    floats = pipes["fp32"] * SUMS_ONLY[min(1, at.get("softmax_mode", 0))]
    softmax = (pipes["exp2"] + floats) / consumers
    chain = pipes["tensor"] / consumers / 2 + softmax + CHAIN_CLOCKS
    busiest = max(pipes["tensor"], pipes["exp2"] + ALU_SHARE * floats, pipes["shared"])
    step = math.hypot(busiest, chain)  # they overlap less well than the pipes of many small CTAs: a softer maximum
    epilogue = EPILOGUE_CLOCKS[min(1, at.get("epilogue", 0))] * problem.head_dim_v / 128
    queries = 0 if at.get("query_slots", 1) > 1 else QUERY_CLOCKS
    persistent = at.get("scheduler", 0) > 0
    once = pipes["tensor"] / 2 + 2 * softmax + epilogue + queries + (0 if persistent else CTA_CLOCKS / 2)
    per_sm = ctas / device.sm_count
    if largest <= mean_tiles * 1.001:
        return math.ceil(per_sm) * (mean_tiles * step + once) + CTA_CLOCKS
    # The last SMs wait for a part of a longest tile: a large one where the last section has few tiles or nothing is drawn.
    section = min(at.get("head_section", 1), problem.batch_heads)
    last = (problem.batch_heads % section or section) * math.ceil(problem.seqlen_q / at.get("block_q", 64))
    tail = SECTION_TAIL * min(1.0, device.sm_count / last) + (STATIC_TAIL if at.get("scheduler", 0) == 1 else 0.0)
    return max(per_sm, 1.0) * (mean_tiles * step + once) + tail * largest * step + CTA_CLOCKS


def _sm_clocks(
    device: DeviceLimits, ctas: int, mean_tiles: float, largest: float, resident: int, pipes: dict[str, float], alone: float, tail: float
) -> float:
    """Clocks until the last SM is done. Equal CTAs come in whole numbers per SM; unequal ones (masks) even out but for a tail."""
    busiest = max(pipes.values())

    def clocks(count: float, tiles: float) -> float:  # `count` CTAs at once on one SM, a smooth maximum of both bounds
        longest: float = math.hypot((count * busiest) ** (SMOOTHNESS / 2), alone ** (SMOOTHNESS / 2)) ** (2 / SMOOTHNESS)
        return tiles * longest if count else 0.0

    per_sm = ctas / device.sm_count
    if largest <= mean_tiles * 1.001:
        per_sm = math.ceil(per_sm)
        work = per_sm // resident * clocks(resident, mean_tiles) + clocks(per_sm % resident, mean_tiles)
    else:
        at_once = min(resident, max(1.0, per_sm))
        work = max(per_sm / at_once * clocks(at_once, mean_tiles) + tail * clocks(1, largest), clocks(1, largest))
    return work + CTA_CLOCKS * max(1.0, per_sm / resident)


def _padded(head_dim: int) -> int:
    return math.ceil(head_dim / 16) * 16


def _ramp(end: int, top: int) -> int:
    """Sum of clamp(t, 0, top) over integers t < end."""
    if end <= 0:
        return 0
    inside = min(end, top + 1)
    return inside * (inside - 1) // 2 + (end - inside) * top


def _reach(problem: Problem) -> tuple[int | None, int | None]:
    """First and last key of query row 0 before clamping to the sequence; None where nothing bounds. Row i's are i further on."""
    mask = problem.mask
    if mask.kind is MaskKind.NONE:
        return None, None
    if mask.kind is MaskKind.CAUSAL:
        return None, problem.diagonal
    low = None if mask.left < 0 else problem.diagonal - mask.left
    high = None if mask.right < 0 else problem.diagonal + mask.right
    return low, high


@lru_cache(maxsize=4096)
def _visits(problem: Problem, block_q: int, block_kv: int) -> tuple[tuple[int, ...], int]:
    """K/V tiles visited by each query tile of one head, and the number of query tiles.

    Long sequences are sampled at evenly spaced query tiles.
    """
    low, high = _reach(problem)
    query_tiles = math.ceil(problem.seqlen_q / block_q)
    step = max(1, query_tiles // MAX_COUNTED_TILES)
    counts = []
    for tile in range(0, query_tiles, step):
        first_row, last_row = tile * block_q, min(problem.seqlen_q, (tile + 1) * block_q) - 1
        first = 0 if low is None else max(0, first_row + low)
        end = problem.seqlen_kv if high is None else min(problem.seqlen_kv, last_row + high + 1)
        counts.append(math.ceil(end / block_kv) - first // block_kv if end > first else 0)
    return tuple(counts), query_tiles


@lru_cache(maxsize=4096)
def _tiles(problem: Problem, block_q: int, block_kv: int) -> tuple[float, int, int]:
    """K/V tiles visited by all query tiles of one head, the most that one visits, and the number of query tiles."""
    counts, query_tiles = _visits(problem, block_q, block_kv)
    if not counts:
        return 0.0, 0, 0
    return sum(counts) * query_tiles / len(counts), max(counts), query_tiles
