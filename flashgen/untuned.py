"""What serves a problem that no table entry covers, and the command that changes that."""

from __future__ import annotations

from flashgen import cost
from flashgen.errors import EmptySpace, UnsupportedProblem
from flashgen.model import DeviceLimits, MaskKind, Op, Problem, Variant
from flashgen.space import BoundSpace, load_spaces


def fallbacks(problem: Problem, device: DeviceLimits) -> list[tuple[BoundSpace, Variant]]:
    """Fallback variants that fit, by predicted time. Raises UnsupportedProblem with the reason of every family."""
    found, reasons = [], []
    for space in load_spaces(problem.op):
        reason = space.unsupported(problem, device)
        if reason is None:
            try:
                bound = space.bind(problem, device)
                found.append((bound, bound.fallback()))
                continue
            except EmptySpace as problem_of_space:
                reason = str(problem_of_space)
        reasons.append(f"  {space.family}: {reason}")
    if not found:
        raise UnsupportedProblem(f"No kernel family fits {problem} on {device.name} (sm_{device.sm}):\n" + "\n".join(reasons))
    return sorted(found, key=lambda pair: (cost.roofline_us(*pair), pair[1].family))


def tune_command(problem: Problem) -> str:
    """The command that tunes a problem."""
    words = [f"flashgen tune --head-dim {problem.head_dim}"]
    if problem.head_dim_v != problem.head_dim:
        words.append(f"--head-dim-v {problem.head_dim_v}")
    words.append(f"--dtype {problem.dtype}")
    if problem.seqlen_q == problem.seqlen_kv:
        words.append(f"--seqlen {max(1, problem.seqlen_q)}")
    else:
        words.append(f"--seqlen-q {max(1, problem.seqlen_q)} --seqlen-kv {max(1, problem.seqlen_kv)}")
    words.append(f"--batch {max(1, problem.batch)} --heads {problem.heads_q}")
    if problem.heads_kv != problem.heads_q:
        words.append(f"--kv-heads {problem.heads_kv}")
    mask = problem.mask
    words.append(
        {MaskKind.NONE: "--no-causal", MaskKind.CAUSAL: "--causal", MaskKind.WINDOW: f"--window {mask.left},{mask.right}"}[mask.kind]
    )
    if problem.op is not Op.FORWARD:
        words.append(f"--op {problem.op}")
    if problem.deterministic:
        words.append("--deterministic")
    return " ".join(words)
