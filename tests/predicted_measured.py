"""What docs/explorer.md shows of the recordings: a picture of every recorded variant, predicted against measured, and two tables.

    python tests/predicted_measured.py

writes docs/images/predicted-measured.svg and prints the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from pathlib import Path
from statistics import median

import recorded_variants
from recorded_variants import Group

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "predicted-measured.svg"
COLOURS = {"ampere_forward": ("#0b6e69", "#5cc9be"), "hopper_forward": ("#b4521e", "#f0a26b")}  # light, dark; as on the explorer's page
SIDE, LEFT, TOP, WIDTH, HEIGHT = 420, 64, 16, 500, 488
LOW, HIGH = 1.7, 4.5  # powers of ten, µs
TICKS = {100: "100 µs", 1000: "1 ms", 10_000: "10 ms"}
STYLE = """\
text{font:13px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#8c959f;fill:none}.grid{stroke:#d8dee4}
.dots{fill:none;stroke-width:4;stroke-linecap:round;stroke-opacity:.45}"""
DARK = "text{fill:#e6edf3}.axis{stroke:#7d8590}.grid{stroke:#30363d}"


def groups() -> list[Group]:
    """Everything that is recorded of families with a colour."""
    found = [*recorded_variants.studies(), *recorded_variants.finalists(), *recorded_variants.drawn()]
    return [each for each in found if each.family in COLOURS]


def place(us: float) -> float:
    """Pixels from the origin of an axis."""
    return SIDE * (log10(us) - LOW) / (HIGH - LOW)


def dots(some: Sequence[Group]) -> list[str]:
    """One dot per variant, as a line without length."""
    pairs = sorted((m, p) for each in some for p, m in zip(each.predicted(), each.times.values(), strict=True))
    assert all(10**LOW <= us <= 10**HIGH for pair in pairs for us in pair), "widen the axes"
    return [f"M{LEFT + place(measured):.1f} {TOP + SIDE - place(predicted):.1f}h0" for measured, predicted in pairs]


def axes() -> list[str]:
    """Grid, labels and the line of equal times."""
    bottom, right = TOP + SIDE, LEFT + SIDE
    lines = [f'<path class="axis" d="M{LEFT} {TOP}v{SIDE}h{SIDE}"/>']
    lines.append(f'<path class="axis" stroke-dasharray="4" d="M{LEFT} {bottom}L{right} {TOP}"/>')
    for us, text in TICKS.items():
        x, y = LEFT + place(us), bottom - place(us)
        lines.append(f'<path class="grid" d="M{x:.1f} {TOP}v{SIDE}M{LEFT} {y:.1f}h{SIDE}"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{text}</text>')
        lines.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    lines.append(f'<text x="{LEFT + SIDE / 2:g}" y="{bottom + 42}" text-anchor="middle">measured</text>')
    middle = TOP + SIDE / 2
    return [*lines, f'<text transform="rotate(-90 14 {middle:g})" x="14" y="{middle:g}" text-anchor="middle">predicted</text>']


def drawing(some: Sequence[Group]) -> str:
    """The whole picture."""
    light, dark, body = [STYLE], [DARK], axes()
    for number, (family, (by_day, by_night)) in enumerate(COLOURS.items()):
        drawn = dots([each for each in some if each.family == family])
        light.append(f".{family}{{stroke:{by_day}}}")
        dark.append(f".{family}{{stroke:{by_night}}}")
        y = TOP + 16 + 22 * number
        body.append(f'<path class="dots {family}" d="{"".join(drawn)}"/>')
        body.append(f'<path class="{family}" stroke-width="9" stroke-linecap="round" d="M{LEFT + 18} {y}h0"/>')
        body.append(f'<text x="{LEFT + 30}" y="{y + 5}">{family}, {len(drawn)} times</text>')
    style = "\n".join(light) + "\n@media (prefers-color-scheme:dark){" + "".join(dark) + "}"
    label = "Predicted against measured times of recorded variants, by family, on logarithmic axes"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{style}</style>", *body, "</svg>", ""])


# Tables -----------------------------------------------------------------------------------------------------------------


def judged() -> dict[str, list[Group]]:
    """Groups with enough variants to say something about order, by recording and family."""
    found: dict[str, list[Group]] = {}
    for each in [*recorded_variants.studies(), *recorded_variants.drawn()]:
        if len(each.times) >= recorded_variants.FEWEST:
            found.setdefault(f"`{each.recording}`, `{each.family}`", []).append(each)
    return found


def order_table() -> list[str]:
    """How well variants are ordered, per recording and family."""
    lines = [
        "| recording | problems | variants | rank correlation (Spearman), estimated registers | with the compiler's "
        "| lowest of a problem | a variant within 3 % of the best among the ten best predicted | among ten at random |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, some in judged().items():
        before, after = (median(each.rank_correlation(compiled) for each in some) for compiled in (False, True))
        hits, variants = sum(each.ten_hold_a_good_one() for each in some), sum(len(each.times) for each in some)
        least, chance = min(each.rank_correlation() for each in some), sum(each.chance_of_a_good_one() for each in some)
        lines.append(
            f"| {name} | {len(some)} | {variants} | {before:.2f} | {after:.2f} | {least:.2f} | in {hits} of {len(some)} | in {chance:.1f} |"
        )
    return lines


def finalists_table() -> list[str]:
    """How well finalists of searches are predicted, per family."""
    lines = [
        "| finalists of | problems | variants | pairs more than 3 % apart in the right order | half of the times within |",
        "|---|---|---|---|---|",
    ]
    for family in COLOURS:
        some = [each for each in recorded_variants.finalists() if each.family == family]
        pairs = [pair for each in some for pair in zip(each.predicted(), each.times.values(), strict=True)]
        right, apart = (sum(counts) for counts in zip(*(each.pairs_in_order() for each in some), strict=True))
        near = median(abs(predicted / measured - 1) for predicted, measured in pairs)
        lines.append(
            f"| `{family}` | {len(some)} | {len(pairs)} | {right} of {apart}, {right / apart:.0%} | {near:.0%} |".replace("%", " %")
        )
    return lines


if __name__ == "__main__":
    PICTURE.write_text(drawing(groups()))
    print("\n".join([*order_table(), "", *finalists_table()]))
