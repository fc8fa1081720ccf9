"""An exploration for the terminal: the tiles of one capacity, the frontier over capacities, bytes, limits, exact against approximate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from flashgen.console import PREDICTED, device_text, facts, microseconds, params_text, plain_table, size
from flashgen.limits import NAMES

if TYPE_CHECKING:
    from flashgen.exactness import Comparison
    from flashgen.explorer import Exploration
    from flashgen.tile_grid import Cell

_SHADES = ("bold green", "green", "cyan", "yellow", "dim")


def exploration_report(found: Exploration) -> RenderableType:
    """Everything, most important first."""
    here = found.here()
    heading = Text.assemble((str(found.problem), "bold"), f" on {device_text(found.device)}; times {PREDICTED}")
    return Group(
        heading, Text(), *_tiles(found), Text("by shared memory per CTA", "bold"), _frontier(found), Text(),
        Text("by length", "bold"), _lengths(found), Text(), Text("what binds", "bold"),
        facts((("limit", here.limit.name), ("because", here.limit.evidence), ("moved by", here.limit.remedy))), Text(),
        Text("bytes of the problem", "bold"), _bytes(found), *_comparison(found),
    )  # fmt: skip


def _tiles(found: Exploration) -> list[RenderableType]:
    """Per family and number of stages: predicted µs by block_q and block_kv on the device."""
    parts: list[RenderableType] = []
    for family in dict.fromkeys(cell.family for cell in found.cells):
        cells = [each for each in found.cells if each.family == family and each.capacity_bytes == found.device.shared_bytes_per_cta]
        times = sorted(each.predicted_us for each in cells if each.predicted_us is not None)
        for stages in sorted({each.num_stages for each in cells}):
            layer = {(each.block_q, each.block_kv): each for each in cells if each.num_stages == stages}
            columns = sorted({block_kv for _, block_kv in layer})
            names = [f"kv {each}" for each in columns]
            table = plain_table("", *names, right=names)
            for block_q in sorted({block_q for block_q, _ in layer}):
                table.add_row(f"q {block_q}", *(_face(layer.get((block_q, each)), times) for each in columns))
            parts += [Text.assemble((family, "bold"), f"  {stages} stage{'s' * (stages > 1)}, µs"), table, Text()]
    return parts


def _face(cell: Cell | None, times: list[float]) -> Text:
    if cell is None or cell.predicted_us is None:
        return Text("" if cell is None else cell.reasons[0].partition(":")[0].replace("fits_", "").replace("not_", ""), "dim red")
    rank = times.index(cell.predicted_us) * len(_SHADES) // max(1, len(times))
    return Text(microseconds(cell.predicted_us), _SHADES[min(rank, len(_SHADES) - 1)])


def _frontier(found: Exploration) -> RenderableType:
    table = plain_table("shared", "fits", "best µs", "tile", "variant, or what misses least", right=("shared", "fits", "best µs"))
    for capacity in found.capacities:
        cells = [each for each in found.cells if each.capacity_bytes == capacity]
        best = found.best(capacity)
        fits = f"{sum(each.feasible for each in cells)} of {len(cells)}"
        if best is None or best.predicted_us is None:
            nearest = min(cells, key=lambda each: each.violation)
            table.add_row(size(capacity), fits, "-", _tile(nearest), Text(nearest.reasons[0], "red"))
        else:
            words = f"{best.family} {params_text(best.variant)}"
            table.add_row(size(capacity), fits, microseconds(best.predicted_us), _tile(best), Text(words, "dim"))
    return table


def _tile(cell: Cell) -> str:
    return f"{cell.block_q}×{cell.block_kv}×{cell.num_stages}"


def _lengths(found: Exploration) -> RenderableType:
    numbers = ("length", "predicted µs", "waves", "DRAM", "textbook")
    table = plain_table(*numbers, "bound by", right=numbers)
    for each in found.traffic:
        bound_by = NAMES[each.limit.key].partition(":")[0]
        us, waves = microseconds(each.prediction.us), f"{each.prediction.waves:.2f}"
        table.add_row(f"{each.problem.seqlen_kv}", us, waves, size(each.dram_bytes), size(each.standard.once_bytes), bound_by)
    return table


def _bytes(found: Exploration) -> RenderableType:
    table = plain_table("", "kernel", "pass", "requested", "each address once", "why more", right=("requested", "each address once"))
    here = found.here()
    for name, account in (("textbook", here.standard), ("tiled", here.tiled)):
        for each in account.passes:
            words = f"{each.action} {each.operand}"
            table.add_row(name, each.kernel, words, size(each.bytes), size(each.once), Text(each.times, "dim"))
        table.add_row(Text(name, "bold"), "", "all", size(account.total_bytes), size(account.once_bytes), "")
    return table


def _comparison(found: Exploration) -> list[RenderableType]:
    heading: list[RenderableType] = [Text(), Text("exact or approximate", "bold")]
    if found.comparison is None:
        return [*heading, Text(f"not compared: {found.comparison_missing}", "yellow"), Text()]
    return [*heading, _methods(found.comparison), Text()]


def _methods(compared: Comparison) -> RenderableType:
    numbers = ("largest error", "× plain", "within 1 ulp", "bytes", "operations")
    table = plain_table("method", "", *numbers, right=numbers)
    for each in compared.methods:
        total = sum(count for _, _, count in each.histogram)
        near = sum(count for _, high, count in each.histogram if high <= 1) / total
        kind = Text(each.kind, "green" if each.kind == "exact" else "yellow")
        ratio = f"{each.max_error / compared.plain_error:,.2f}" if compared.plain_error else "-"
        table.add_row(
            each.name, kind, f"{each.max_error:.2e}", ratio, f"{near:.1%}", f"{size(each.bytes)} {each.bytes_from}", f"{each.operations:,}"
        )
    return table
