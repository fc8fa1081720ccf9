"""First contact of the ampere backward family (tests/candidates) with a GPU: gradients, then times beside FlashAttention 2.

    python tests/device/trial_ampere_backward.py OUT.json [VARIANTS] [HEAD_DIM] [--lengths N,N] [--masks NAME,NAME] [--two-pass] [--designs]

For each head dim and mask: the seeds and a random sample of VARIANTS feasible variants are compiled side by side and judged on cases around
their tile edges; everything exact is timed interleaved with torch's SDPA flash backend through autograd, and its gradients at full size are
compared with that library's. OUT.json grows with every problem. Nothing is written to a table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backward_kernels import Case, backward_source, candidate_space, cases_of, first_failure, of_backward, templates_with_candidates

from flashgen import bench, launch, runtime, timing
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.errors import FlashgenError
from flashgen.gpu import Gpu
from flashgen.launch import Operand
from flashgen.model import DType, Mask, Op, Problem, Source
from flashgen.runtime import DeviceExecutor
from flashgen.space import BoundSpace, Space

FAMILY, PEER = "ampere_backward", "fa2"
HEAD_DIMS, LENGTHS = (128, 64, 256), (512, 1024, 2048, 4096, 8192, 16384)
MASKS = {"full": Mask(), "causal": Mask.causal()}
ROUNDS, TIMED, FEW_CASES = 8, 4, 3
PLAIN = {"num_stages": 2, "tile_order": 0, "staggered": False, "delayed_dq": True, "pass_stages": 2}
"""With --designs, the sample comes from variants with these values: they refine a design rather than make one."""


class OnDevice:
    """Runs a source on GPU 0; fulfils `backward_kernels.Run`."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self.executor = executor

    def __call__(self, source: Source, bound: BoundSpace, case: Case, tensors: Any) -> None:
        self.executor.backward(source, of_backward(case.problem), tensors, case.softmax_scale)


@dataclass(frozen=True, eq=False)
class Call:
    """Something to time."""

    name: str
    run: Callable[[], object] = field(repr=False)

    def __call__(self) -> None:
        """Enqueue it on the default stream."""
        self.run()


class Tensors:
    """Random operands of one problem as torch keeps them, with the peer's forward pass and its backward through autograd."""

    def __init__(self, problem: Problem) -> None:
        import torch

        self.problem, self.torch = problem, torch
        queries, keys = (problem.batch, problem.seqlen_q, problem.heads_q), (problem.batch, problem.seqlen_kv, problem.heads_kv)
        generator = torch.Generator("cuda").manual_seed(1)

        def made(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator).transpose(1, 2)

        self.q, self.k, self.v = made(*queries, problem.head_dim), made(*keys, problem.head_dim), made(*keys, problem.head_dim_v)
        self.dout = made(*queries, problem.head_dim_v)
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()
        causal = problem.mask.kind != Mask().kind
        forward = torch.ops.aten._scaled_dot_product_flash_attention
        self.o, self.lse = forward(self.q, self.k, self.v, 0.0, causal, False, scale=problem.scale)[:2]
        self.dq, self.dk, self.dv = (torch.full_like(x, float("nan")) for x in (self.q, self.k, self.v))

    def peer(self) -> Any:
        """dq, dk, dv of the peer."""
        return self.torch.autograd.grad(self.o, (self.q, self.k, self.v), self.dout, retain_graph=True)

    def operands(self) -> dict[str, Operand]:
        """Addresses and strides for our kernels."""
        names = ("q", "k", "v", "o", "lse", "dout", "dq", "dk", "dv")
        return {name: Operand(getattr(self, name).data_ptr(), tuple(getattr(self, name).stride()[:3])) for name in names}

    def errors(self) -> list[float]:
        """Relative distance from the peer's gradients."""
        ours, theirs = (self.dq, self.dk, self.dv), self.peer()
        return [round(float((a.float() - b.float()).norm() / b.float().norm()), 5) for a, b in zip(ours, theirs, strict=True)]


def problem_of(head_dim: int, seqlen: int, mask: Mask) -> Problem:
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask, Op.BACKWARD)


@dataclass(frozen=True)
class Trial:
    """What the whole run shares."""

    executor: DeviceExecutor
    space: Space
    stopwatch: bench.DeviceStopwatch
    count: int
    two_pass: bool
    designs: bool

    def bound(self, problem: Problem) -> BoundSpace:
        return self.space.bind(problem, runtime.present_limits(self.executor.gpu))

    def built(self, problem: Problem) -> list[tuple[Source, Compiled]]:
        """Seeds first, then a sample; what does not compile or spills too much is reported and left out."""
        bound = self.bound(problem)
        wanted = {"two_pass": self.two_pass, **(PLAIN if self.designs else {})}
        feasible = [each for each in bound.feasible() if wanted.items() <= each.as_dict().items()]
        seeds = [each for each in bound.seeds() if each.as_dict()["two_pass"] == self.two_pass]
        chosen = dict.fromkeys([*seeds, *random.Random(2).sample(feasible, min(self.count, len(feasible)))])
        sources = [backward_source(self.space, problem, variant) for variant in chosen]
        started, kept = time.perf_counter(), []
        for source, found in zip(sources, compile_many(sources, sm=self.executor.gpu.sm), strict=True):
            if isinstance(found, FlashgenError):
                print(f"  {source.variant}: {str(found)[:200]}", flush=True)
            elif any(bound.compiled_violations(source.variant, found.report).values()):
                print(f"  spills {found.report.spill_bytes} B: {source.variant}", flush=True)
            else:
                kept.append((source, found))
        seconds = time.perf_counter() - started
        print(f"  {len(kept)} of {len(sources)} kept, {len(feasible)} feasible, compiled in {seconds:.1f} s", flush=True)
        return kept

    def exact(self, problem: Problem, kernels: list[tuple[Source, Compiled]]) -> list[Source]:
        """Those that pass; the first one on every case, the others on a few."""
        passed = []
        for number, (source, compiled) in enumerate(kernels):
            self.executor.load(source, compiled)
            tiles = source.variant.as_dict()
            chosen = cases_of(problem, int(tiles["block_q"]), int(tiles["block_kv"]))
            chosen = chosen if number == 0 else random.Random(number).sample(chosen, FEW_CASES)
            limits = runtime.present_limits(self.executor.gpu)
            failure = first_failure(self.space, source, limits, chosen, [OnDevice(self.executor)])
            if failure:
                print(f"  inexact {source.variant}: {failure[:300]}", flush=True)
            else:
                passed.append(source)
        print(f"  exact: {len(passed)} of {len(kernels)}", flush=True)
        return passed

    def call(self, source: Source, problem: Problem, tensors: Tensors) -> Call:
        bound = self.bound(problem)
        workspace = self.executor.workspace(bound.workspace_bytes(source.variant))
        params = launch.backward_params(problem, problem.scale, tensors.operands(), workspace.address)
        kernel, grids = self.executor.load(source), bound.grids(source.variant)
        return Call(str(source.variant), lambda held=(workspace, tensors): kernel.launch(grids, params))  # type: ignore[misc]

    def timed(self, problem: Problem, sources: list[Source]) -> dict[str, Any]:
        """Times of the fastest beside the peer's; what was far from the peer's gradients is named."""
        tensors = Tensors(problem)
        calls, errors = [self.call(source, problem, tensors) for source in sources], dict[str, list[float]]()
        for call in calls:
            call()
            errors[call.name] = tensors.errors()
        first = timing.interleaved(calls, 2, self.stopwatch, 1)
        calls.sort(key=lambda each: min(first[each.name]))
        samples = timing.interleaved([*calls[:TIMED], Call(PEER, tensors.peer)], ROUNDS, self.stopwatch, 2)
        best = min((name for name in samples if name != PEER), key=lambda name: sorted(samples[name])[ROUNDS // 2])
        flops = 10.0 * problem.batch_heads * problem.seqlen_q**2 * problem.head_dim * (0.5 if problem.mask != Mask() else 1.0)
        ours, theirs = (timing.measurement(samples[name], flops).tflops for name in (best, PEER))
        ratio = timing.ratio(samples[PEER], samples[best])
        print(f"  s{problem.seqlen_q}: {ours:.0f} TFLOP/s, {PEER} {theirs:.0f}, ratio {ratio}, {best}", flush=True)
        far = {name: found for name, found in errors.items() if not max(found) < 0.01}
        print(f"    from the peer's gradients: {errors[best]}{f', FAR: {far}' if far else ''}", flush=True)
        slower = {name: round(min(values)) for name, values in first.items()}
        return {"problem": str(problem), "samples_us": samples, "first_us": slower, "errors": errors}


def main(options: argparse.Namespace, space: Space) -> None:
    gpu, rows = Gpu(0), list[dict[str, Any]]()
    executor = DeviceExecutor(gpu, bind=lambda _, problem: space.bind(problem, runtime.present_limits(gpu)))
    trial = Trial(executor, space, bench.DeviceStopwatch(gpu), options.variants, options.two_pass, options.designs)
    for head_dim in options.head_dims or HEAD_DIMS:
        for name in options.masks.split(","):
            print(f"d{head_dim} {name}", flush=True)
            one = problem_of(head_dim, 4096, MASKS[name])
            sources = trial.exact(one, trial.built(one))
            for seqlen in map(int, options.lengths.split(",")) if sources else ():
                rows.append(trial.timed(problem_of(head_dim, seqlen, MASKS[name]), sources))
                options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("variants", type=int, nargs="?", default=6)
    parser.add_argument("head_dims", type=int, nargs="*")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--two-pass", action="store_true")
    parser.add_argument("--designs", action="store_true")
    with tempfile.TemporaryDirectory() as folder, templates_with_candidates(Path(folder)):
        main(parser.parse_args(), candidate_space(FAMILY))
