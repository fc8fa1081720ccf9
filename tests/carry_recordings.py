"""Recordings of kernels whose text has changed and whose machine code has not: what was measured still speaks of them.

    git worktree add /tmp/before COMMIT                                   # where the recordings' texts are those of today
    PYTHONPATH=/tmp/before python tests/carry_recordings.py made /tmp/before.json
    PYTHONPATH=. python tests/carry_recordings.py made /tmp/after.json
    PYTHONPATH=. python tests/carry_recordings.py join /tmp/before.json /tmp/after.json

The last command adds to tests/recorded/carried.json what each changed text was before, if both gave the same machine code under one NVRTC,
and fails if one did not. Needs NVRTC, no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flashgen.compiler import compile_many, nvrtc_version
from flashgen.cubins import Compiled
from flashgen.model import DType, MaskKind, Op, ProblemClass, Source, Variant
from flashgen.render import render
from flashgen.space import load_space

TESTS = Path(__file__).resolve().parent
CARRIED = TESTS / "recorded" / "carried.json"


def recorded() -> dict[str, Source]:
    """Today's texts of the variants that the README's figures of hopper_forward come from."""
    sys.path.insert(0, str(TESTS))
    from test_recorded import parsed
    from test_recorded_hopper import chosen, rows

    found = {}
    for name in ("main", "head_dims", "fp16", "gqa"):
        for row in rows(name):
            variant = parsed(chosen(row))
            klass = ProblemClass(Op.FORWARD, DType(row.get("dtype", "bfloat16")), row["head_dim"], row["head_dim"], MaskKind(row["mask"]))
            space = load_space(variant.family)
            found[f"{klass} {variant}"] = render(space, klass, Variant.of(space.family, space.checked(variant.as_dict())))
    return found


def made(out: Path) -> None:
    """Text and machine code of each."""
    texts = recorded()
    built = compile_many(list(texts.values()), sm=90)
    assert all(isinstance(each, Compiled) for each in built), built
    codes = [each.report.cubin_digest for each in built if isinstance(each, Compiled)]
    kernels = {name: [source.digest, code] for (name, source), code in zip(texts.items(), codes, strict=True)}
    out.write_text(json.dumps({"nvrtc": nvrtc_version(), "kernels": kernels}))


def join(before: Path, after: Path) -> int:
    """Remember texts that became others with the same machine code."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    assert old["nvrtc"] == new["nvrtc"] and old["kernels"].keys() == new["kernels"].keys()
    apart = [name for name in old["kernels"] if old["kernels"][name][1] != new["kernels"][name][1]]
    known = json.loads(CARRIED.read_text()) if CARRIED.exists() else {}
    latest = {now: was for was, now in known.items()}
    for name, (text, _) in old["kernels"].items():
        if name not in apart and text != new["kernels"][name][0]:
            known[latest.get(text, text)] = new["kernels"][name][0]
    CARRIED.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(f"{len(old['kernels']) - len(apart)} have the same machine code, {len(apart)} not: {apart}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(made(Path(sys.argv[2])) if sys.argv[1] == "made" else join(Path(sys.argv[2]), Path(sys.argv[3])))
