"""Figures of the backward pass, recomputed from the recorded times of every round, and the parts of the docs that show them.

    python tests/recorded_backward.py

draws those parts of docs/backward.md and README.md again, each between `<!-- recorded: NAME -->` and `<!-- end -->`. Recordings lie in
tests/recorded/h200-backward: `ampere*.json` and `hopper*.json` by tests/device/study_backward.py, as many files as it took; `gpt.json` by
tests/device/train_gpt.py; `memory.json` by a test of tests/device/test_backward_on_device.py that prints it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from test_recorded import ROOT, parsed, recording, speed_table
from test_recorded_hopper import geomean

from flashgen import cost
from flashgen.model import DType, Mask, MaskKind, Op, Problem
from flashgen.space import load_space

FOLDER = ROOT / "tests" / "recorded" / "h200-backward"
PEERS = {"fa4": "FlashAttention 4", "sdpa-cudnn": "cuDNN 9", "sdpa-flash": "FlashAttention 2"}
HEAD_DIMS = (64, 128, 256)
WIDTH = 150
Row = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Recordings of a backward family beside its peers."""

    name: str
    files: str
    peers: tuple[str, ...]

    @property
    def paths(self) -> list[Path]:
        return sorted(FOLDER.glob(self.files))

    @property
    def about(self) -> list[dict[str, Any]]:
        """Where and how each of the files was made."""
        return [recording(path)["about"] for path in self.paths]

    def rows(self, head_dim: int = 0) -> list[Row]:
        """Compared problems, all of them or those of one head dim."""
        found = [row for path in self.paths for row in recording(path)["rows"]]
        return [row for row in found if head_dim in (0, row["head_dim"])]


HOPPER = Family("hopper_backward", "hopper*.json", tuple(PEERS))
AMPERE = Family("ampere_backward", "ampere*.json", ("sdpa-flash",))
FAMILIES = (HOPPER, AMPERE)


# Figures of a comparison ------------------------------------------------------------------------------------------------


def own(row: Row) -> list[str]:
    return [name for name in row["samples_us"] if name not in PEERS]


def fastest(row: Row, names: Iterable[str]) -> str:
    """The fastest by the even rounds; the odd ones report, so that choosing does not flatter the figure."""
    return min(names, key=lambda name: median(row["samples_us"][name][::2]))


def reported_us(row: Row, name: str) -> float:
    return median(row["samples_us"][name][1::2])


def chosen(row: Row) -> str:
    return fastest(row, own(row))


def ratio(row: Row) -> float:
    """Time of the fastest peer over time of flashgen."""
    return min(reported_us(row, name) for name in row["samples_us"] if name in PEERS) / reported_us(row, chosen(row))


def steadies(row: Row) -> list[str]:
    """The variants whose space promises the same bits every time."""
    klass = problem_of(row).klass()
    variants = {name: parsed(name) for name in own(row)}
    return [name for name, variant in variants.items() if load_space(variant.family).deterministic(klass, variant)]


def chosen_steady(row: Row) -> str:
    return fastest(row, steadies(row))


def determinism(row: Row) -> float:
    """Time of the best deterministic variant over that of the best of all."""
    return reported_us(row, chosen_steady(row)) / reported_us(row, chosen(row))


def problem_of(row: Row) -> Problem:
    mask, dim, heads, rows = Mask(MaskKind(row["mask"])), row["head_dim"], row["heads"], row["seqlen"]
    return Problem(DType.BFLOAT16, dim, dim, row["batch"], heads, heads, rows, rows, mask, Op.BACKWARD)


def tflops(row: Row) -> float:
    return cost.flops(problem_of(row)) / reported_us(row, chosen(row)) / 1e6


# In words -------------------------------------------------------------------------------------------------------------


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), WIDTH, break_long_words=False, break_on_hyphens=False)


def span(values: Iterable[float], form: str = "") -> str:
    """`3 to 7`, or one value where all are the same."""
    ordered = sorted(values)
    ends = dict.fromkeys(f"{each:{form}}" for each in (ordered[0], ordered[-1]))
    return " to ".join(ends)


def listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def peers_of(family: Family) -> str:
    names = listed([PEERS[name] for name in family.peers])
    return f"the fastest of {names} at each shape" if len(family.peers) > 1 else names


def summary(family: Family) -> str:
    ratios = [ratio(row) for row in family.rows()]
    return f"Geometric mean {geomean(ratios):.2f}, least {min(ratios):.2f}"


def means(family: Family) -> str:
    return ", ".join(f"{dim}: {geomean([ratio(row) for row in family.rows(dim)]):.2f}" for dim in HEAD_DIMS)


def place(about: dict[str, Any]) -> str:
    return f"driver {about['driver']}, torch {about['torch'].partition('+')[0]}"


def compared(family: Family) -> str:
    """Table and conditions of a comparison."""
    rows = family.rows()
    assert all(set(row["throttle"]) <= {"power_cap"} for row in rows), "name every reason for throttling in the docs"
    capped = sum("power_cap" in row["throttle"] for row in rows)
    head = paragraph(f"`{family.name}` against {peers_of(family)}. {summary(family)}; geometric means by head dim: {means(family)}.")
    speeds = ", ".join(f"{span((tflops(row) for row in family.rows(dim)), '.0f')} at head dim {dim}" for dim in HEAD_DIMS)
    foot = paragraph(
        f"{span_of_dates(family)}, {place(family.about[0])}; SM clock {span(clock for row in rows for clock in row['clock_mhz'])} MHz,",
        f"the power cap active in {capped} of {len(rows)} comparisons; {span(about['rounds'] for about in family.about)} rounds,",
        f"the choice among {span(len(own(row)) for row in rows)} exact variants. TFLOP/s: {speeds}.",
    )
    return f"{head}\n\n{speed_table(rows, ratio)}\n\n{foot}"


def span_of_dates(family: Family) -> str:
    dates = sorted({about["date"] for about in family.about})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def cost_of_determinism() -> str:
    lines = ["| head dim | geometric mean | least | most |", "|---|---|---|---|"]
    for dim in HEAD_DIMS:
        costs = {(row["seqlen"], row["mask"]): determinism(row) for row in HOPPER.rows(dim)}
        seqlen, mask = max(costs, key=lambda key: costs[key])
        worst = f"{max(costs.values()):.2f}, {'full' if mask == 'none' else mask} s{seqlen}"
        lines.append(f"| {dim} | {geomean(list(costs.values())):.2f} | {min(costs.values()):.2f} | {worst} |")
    return "\n".join(lines)


def mib_of_results() -> int:
    """o, its gradient, dq, dk and dv of the recorded problem, in 16 bits."""
    found = recording(FOLDER / "memory.json")
    return 5 * 2 * found["heads"] * found["rows"] * found["head_dim"] >> 20


def memory() -> str:
    found = recording(FOLDER / "memory.json")
    heads, rows = found["heads"], found["rows"]
    return paragraph(
        f"Peak memory of one forward and backward pass beyond q, k and v, at batch 1, {heads} heads, {rows:,} rows, head dim",
        f"{found['head_dim']}, bf16, causal: {found['flashgen_mib']:,} MiB with the fallback, of which {mib_of_results():,} MiB are o,",
        f"its gradient, dq, dk and dv; FlashAttention 2 {found['fa2_mib']:,} MiB; one n×n matrix of all heads alone would be",
        f"{2 * heads * rows * rows >> 20:,} MiB. {found['about']['date']}, {place(found['about'])}.",
    )


def runs() -> dict[str, Any]:
    """Losses and tokens per second of each way to train."""
    found: dict[str, Any] = recording(FOLDER / "gpt.json")["runs"]
    return found


def apart(name: str) -> float:
    """The largest distance of a smoothed loss curve to that of SDPA's math backend."""
    sys.path.insert(0, str(Path(__file__).parent / "device"))
    from train_gpt import smoothed

    losses = runs()
    return float(abs(smoothed(losses[name]["losses"]) - smoothed(losses["sdpa-math"]["losses"])).max())


def training() -> str:
    found = recording(FOLDER / "gpt.json")
    config = found["config"]
    lines = ["| attention | tokens/s | last loss | distance to `sdpa-math` |", "|---|---|---|---|"]
    for name, run in runs().items():
        distance = "" if name == "sdpa-math" else f"{apart(name):.4f}"
        lines.append(f"| `{name}` | {run['tokens_per_s']:,} | {run['losses'][-1]:.4f} | {distance} |")
    head = paragraph(
        f"A small GPT ({config['layers']} layers, d_model {config['width']}, {config['heads']} heads, {config['rows']} rows, batch",
        f"{config['batch']}, bf16 autocast) trained {found['steps']} steps on the bytes of this repository from one seed. Distances are",
        "the largest between loss curves, each the mean over 20 steps: flashgen's",
        f"is {apart('flashgen'):.4f} from SDPA's math backend, where torch's own flash backend is {apart('sdpa-flash'):.4f} from it.",
    )
    return f"{head}\n\n" + "\n".join(lines)


def in_short() -> str:
    about = HOPPER.about[0]
    return paragraph(
        "Gradients, on the same problems and GPU, against backward passes through torch's autograd: `hopper_backward`",
        f"against {peers_of(HOPPER)}: {summary(HOPPER).lower()}; by head dim {means(HOPPER)}.",
        f"`ampere_backward` against {peers_of(AMPERE)}: {summary(AMPERE).lower()}.",
        f"{span_of_dates(HOPPER)}, {place(about)}; variants chosen among those of a study, not from a shipped table.",
        "Tables, the cost of determinism, memory and a model that trains: [docs/backward.md](docs/backward.md).",
    )


PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "backward.md": {
        "hopper": lambda: compared(HOPPER),
        "ampere": lambda: compared(AMPERE),
        "determinism": cost_of_determinism,
        "memory": memory,
        "training": training,
    },
    ROOT / "README.md": {"backward": in_short},
}


def redrawn(text: str, name: str, part: str) -> str:
    """The text with one of its parts drawn again. Raises ValueError where the text has no such part, or several."""
    new, count = re.subn(rf"(<!-- recorded: {name} -->\n).*?(\n<!-- end -->)", lambda at: f"{at[1]}{part}{at[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the text must have one part <!-- recorded: {name} --> … <!-- end -->; it has {count}: add the two comments")
    return new


def main() -> None:
    for path, parts in PARTS.items():
        text = path.read_text()
        for name, draw in parts.items():
            text = redrawn(text, name, draw())
        path.write_text(text)
        print(f"{path.relative_to(ROOT)}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
