"""First contact of a backward family on trial with a GPU: gradients judged case by case, then times beside other libraries, in one process.

    python tests/device/trial_backward.py OUT.json [--variants N] [--head-dims D …] [--lengths S …] [--peers NAME …] [--seconds LIMIT]

FlashAttention 4 is compiled for all head dims and masks by processes of their own while the first variants are built, into a store on disk
that this process reads later. For each head dim and mask the seeds and a random sample of N feasible variants are compiled side by side and
run on cases around their tile edges; everything exact is timed, interleaved with the peers that are asked for and installed, through the
same tensors. OUT.json is written again after every problem; nothing is written to a table. After --seconds no further problem is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hopper_backward_kernels as hopper
from backward_kernels import Case, cases_of, failure_of, of_backward, templates_with_candidates
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashgen import runtime
from flashgen.compiler import compile_many
from flashgen.cubins import Compiled
from flashgen.errors import FlashgenError
from flashgen.gpu import Gpu
from flashgen.launch import Operand
from flashgen.model import BackwardTensors, DType, ExecutorName, Mask, MaskKind, Op, Problem, Source
from flashgen.space import BoundSpace

HEAD_DIMS, MASKS, LENGTHS = (256, 128, 64), (Mask(), Mask.causal()), (512, 2048, 8192)
ROUNDS, REPEATS, CASES = 9, 5, 8
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}  # through torch; fa4 is a package of its own
Call = Callable[[], object]


def problem_of(head_dim: int, seqlen: int, mask: Mask) -> Problem:
    heads = 2048 // head_dim
    return Problem(DType.BFLOAT16, head_dim, head_dim, 16384 // seqlen, heads, heads, seqlen, seqlen, mask, Op.BACKWARD)


@dataclass
class OnDevice:
    """Compiles, loads and launches sources on GPU 0; fulfils `backward_kernels.Run`."""

    family: hopper.HopperBackward
    sampled: dict[str, set[int]]  # values of parameters that the sample is drawn from
    executor: runtime.DeviceExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.executor = runtime.DeviceExecutor(Gpu(0), bind=lambda _, problem: self.family.space.bind(problem, self.limits))
        self.counters = self.executor.gpu.upload(np.zeros(2, np.uint32))
        self.limits = runtime.present_limits(self.executor.gpu)

    def __call__(self, source: Source, bound: BoundSpace, case: Case, given: BackwardTensors) -> None:
        self.executor.backward(source, of_backward(case.problem), given, case.softmax_scale)

    def built(self, problem: Problem, count: int) -> list[Source]:
        """Seeds first, then a sample; what does not compile, is serialised or spills too much is reported and left out."""
        bound = self.family.space.bind(problem, self.limits)
        feasible = [each for each in bound.feasible() if all(each.as_dict()[name] in values for name, values in self.sampled.items())]
        chosen = dict.fromkeys([*bound.seeds(), *random.Random(1).sample(feasible, min(count, len(feasible)))])
        sources = [self.family.source(problem, variant) for variant in chosen]
        started, kept = time.perf_counter(), []
        for source, found in zip(sources, compile_many(sources, sm=self.executor.gpu.sm), strict=True):
            if not isinstance(found, Compiled):
                print(f"  {source.variant}: {str(found)[:300]}", flush=True)
                continue
            serialised = [line for line in found.report.warnings if "C75" in line]
            if serialised or any(bound.compiled_violations(source.variant, found.report).values()):
                print(f"  {source.variant}: {found.report.spill_bytes} B spilled {serialised[:1]}", flush=True)
                continue
            self.executor.load(source, found)
            kept.append(source)
        print(f"  {len(kept)} of {len(sources)} kept, compiled in {time.perf_counter() - started:.1f} s", flush=True)
        return kept

    def judged(self, sources: list[Source], problem: Problem) -> list[Source]:
        """Those whose gradients are within the bound: the first two on many cases, the others on a few. One failure leaves doubt only."""
        exact, started = [], time.perf_counter()
        for number, source in enumerate(sources):
            tiles = source.variant.as_dict()
            cases = hopper.cases_for(cases_of(problem, tiles["block_q"], tiles["block_kv"], tiles["clear_ahead"]))
            cases = cases if number < 2 else cases[:CASES]
            try:
                found = (failure_of(self.family.space, source, self.limits, case, self) for case in cases)
                failures = [failure for failure in found if failure]
            except FlashgenError as error:
                print(f"  {source.variant}: {str(error)[:300]}", flush=True)
                raise
            if failures:
                print(f"  INEXACT {source.variant}: {len(failures)} of {len(cases)}: {failures[0][:300]}", flush=True)
            if len(failures) <= 1:
                exact.append(source)
        print(f"  exact: {len(exact)} of {len(sources)}, judged in {time.perf_counter() - started:.1f} s", flush=True)
        return exact


@dataclass
class Operands:
    """Tensors of one timed problem, rows of heads side by side, and what the forward pass saved."""

    problem: Problem

    def __post_init__(self) -> None:
        at, device = self.problem, "cuda"
        shapes = {"q": (at.heads_q, at.seqlen_q, at.head_dim), "k": (at.heads_kv, at.seqlen_kv, at.head_dim)}
        shapes |= {"v": (at.heads_kv, at.seqlen_kv, at.head_dim_v), "dout": (at.heads_q, at.seqlen_q, at.head_dim_v)}
        make = {name: torch.randn(at.batch, s, h, d, device=device, dtype=torch.bfloat16) for name, (h, s, d) in shapes.items()}
        q, k, v = (make[name].transpose(1, 2) for name in "qkv")
        causal = at.mask.kind is MaskKind.CAUSAL
        saved = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        make["o"] = saved[0].transpose(1, 2).contiguous()
        make |= {f"d{name}": torch.empty_like(make[name]) for name in "qkv"}
        self.tensors, self.lse = make, saved[1].reshape(at.batch, at.heads_q, at.seqlen_q).contiguous()

    def operand(self, name: str) -> Operand:
        x = self.tensors[name]
        return Operand(x.data_ptr(), (x.stride(0), x.stride(2), x.stride(1)))

    def bind(self, device: OnDevice, source: Source) -> tuple[Call, list[Call]]:
        """The whole backward pass, and each of its launches alone where none waits for words that another resets."""
        bound, case = device.family.space.bind(self.problem, device.limits), Case("timed", self.problem)
        names = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
        at = {name: self.operand(name) for name in names} | {"lse": Operand(self.lse.data_ptr(), (0, 0, 0)), "dlse": Operand(0, (0, 0, 0))}
        workspace = device.executor.workspace(bound.workspace_bytes(source.variant))
        boxes = device.family.rows(bound, source.variant)
        params = hopper.mapped_params(case, at, boxes, workspace.address, device.counters.address, ExecutorName.DEVICE)
        kernel, grids = device.executor.load(source), bound.grids(source.variant)
        kept = (workspace, params)

        def part(index: int) -> Call:
            alone = [grid if place == index else 0 for place, grid in enumerate(grids)]
            return lambda: kernel.launch(alone, kept[1])

        values = source.variant.as_dict()
        waits = values["ordered"] or values["clear_ahead"]
        return lambda: kernel.launch(grids, kept[1]), [] if waits else [part(index) for index in range(len(grids))]

    def peers(self, wanted: tuple[str, ...] = ("cudnn",)) -> dict[str, Call]:
        """Gradients by other libraries, through autograd."""
        causal, found = self.problem.mask.kind is MaskKind.CAUSAL, dict[str, Call]()
        for name, backend in PEERS.items():
            if name not in wanted:
                continue
            leaves = [self.tensors[each].detach().transpose(1, 2).requires_grad_(True) for each in "qkv"]
            with sdpa_kernel(backend):
                o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            found[name] = _gradients(o, leaves, self.tensors["dout"].transpose(1, 2))
        if "fa4" in wanted:
            started = time.perf_counter()
            try:
                found["fa4"] = _flash_attention_4([self.tensors[each] for each in "qkv"], self.tensors["dout"], causal)
                found["fa4"]()
            except Exception as error:  # a peer may fail in any way; that is its result
                found.pop("fa4", None)
                print(f"  fa4: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if time.perf_counter() - started > 2:
                print(f"  fa4 took {time.perf_counter() - started:.0f} s to begin", flush=True)
        return found


def _flash_attention_4(qkv: list[Any], dout: Any, causal: bool) -> Call:
    attention = import_module("flash_attn.cute").flash_attn_func
    leaves = [each.detach().clone().requires_grad_(True) for each in qkv]
    o = attention(*leaves, causal=causal)
    return _gradients(o[0] if isinstance(o, tuple) else o, leaves, dout)


def _gradients(o: Any, leaves: list[Any], dout: Any) -> Call:
    return lambda: torch.autograd.grad(o, leaves, dout, retain_graph=True)


# What FlashAttention 4 compiles depends on head dim and mask, and on the length only if one block holds it.
WARM = """
import sys, torch
from flash_attn.cute import flash_attn_func
head_dim, causal = int(sys.argv[1]), sys.argv[2] == "causal"
q, k, v, dout = (torch.randn(2, 512, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
leaves = [each.requires_grad_(True) for each in (q, k, v)]
o = flash_attn_func(*leaves, causal=causal)
torch.autograd.grad(o[0] if isinstance(o, tuple) else o, leaves, dout)
torch.cuda.synchronize()
"""


def warmed(head_dims: tuple[int, ...]) -> list[subprocess.Popen[bytes]]:
    """Processes that compile FlashAttention 4 into the store on disk, one per head dim and mask; set up before it is imported here."""
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", tempfile.mkdtemp(prefix="fa4-"))
    command = [sys.executable, "-c", WARM]
    return [subprocess.Popen([*command, str(head_dim), name]) for head_dim in head_dims for name in ("full", "causal")]


FLUSH: list[Any] = []


def times_us(calls: dict[str, Call], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of each call with a cold L2: per round the median of `repeats`, calls in random order."""
    if not FLUSH:
        FLUSH.append(torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    chosen = random.Random(0)
    for _ in range(rounds):
        for name in chosen.sample(list(calls), len(calls)):
            calls[name]()
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
            for start, end in events:
                FLUSH[0].zero_()
                start.record()
                calls[name]()
                end.record()
            torch.cuda.synchronize()
            samples[name].append(float(np.median([start.elapsed_time(end) for start, end in events])) * 1e3)
    return samples


def wrong(operands: Operands, expected: tuple[Any, ...]) -> float:
    """The largest relative Frobenius distance of dq, dk, dv to another library's."""
    pairs = zip((operands.tensors[f"d{name}"] for name in "qkv"), expected, strict=True)
    return max(float((ours.float() - theirs.transpose(1, 2).float()).norm() / theirs.float().norm()) for ours, theirs in pairs)


def timed(device: OnDevice, sources: list[Source], problem: Problem, wanted: tuple[str, ...]) -> dict[str, Any]:
    operands = Operands(problem)
    peers = operands.peers(("cudnn", *wanted))
    expected: Any = peers["cudnn"]()
    peers = {name: call for name, call in peers.items() if name in wanted} or peers
    calls, parts = dict[str, Call](), dict[str, list[Call]]()
    for source in sources:
        name = str(source.variant)
        calls[name], parts[name] = operands.bind(device, source)
        calls[name]()
        torch.cuda.synchronize()
        distance = wrong(operands, expected)
        if not distance < 0.012:
            print(f"  WRONG at size: {name} {distance:.4f}", flush=True)
            del calls[name]
    quick = times_us(calls, 2, 3)
    best = sorted(calls, key=lambda name: min(quick[name]))[:6]
    samples = times_us(peers | {name: calls[name] for name in best}, ROUNDS, REPEATS)
    medians = {name: float(np.median(values)) for name, values in samples.items()}
    flops = 10 * problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_kv * problem.head_dim
    flops //= 2 if problem.mask.kind is MaskKind.CAUSAL else 1
    peer = min(peers, key=lambda name: medians[name])
    print(f" s{problem.seqlen_q}: " + ", ".join(f"{name} {flops / medians[name] / 1e6:.0f}" for name in peers), flush=True)
    for name in sorted(best, key=lambda name: medians[name]):
        calls[name]()
        alone = times_us({str(index): call for index, call in enumerate(parts[name])}, 1, 5)
        shares = " + ".join(f"{values[0]:.0f}" for values in alone.values()) + " us; " if alone else ""
        print(f"  {flops / medians[name] / 1e6:.0f} TFLOP/s = {medians[peer] / medians[name]:.3f} x {peer}; {shares}{name}", flush=True)
    return {"problem": str(problem), "samples_us": samples, "quick_us": quick}


def partitioned(text: str) -> tuple[str, str, str]:
    return text.partition("=")


def main(asked: argparse.Namespace, started: float) -> None:
    rows, head_dims = list[dict[str, Any]](), tuple(asked.head_dims)
    masks = [mask for mask in MASKS if str(mask) in asked.masks]
    warming = warmed(head_dims) if "fa4" in asked.peers else []
    with tempfile.TemporaryDirectory() as root, templates_with_candidates(Path(root)):
        device = OnDevice(
            hopper.hopper_space(), {name: set(map(int, values.split(","))) for name, _, values in map(partitioned, asked.where)}
        )
        for head_dim, mask in ((head_dim, mask) for head_dim in head_dims for mask in masks):
            if time.perf_counter() - started > asked.seconds:
                break
            print(f"d{head_dim} {mask}", flush=True)
            exact = device.judged(device.built(problem_of(head_dim, 4096, mask), asked.variants), problem_of(head_dim, 512, mask))
            while warming:  # nothing is timed beside a compiler
                warming.pop().wait()
            for seqlen in asked.lengths:
                if time.perf_counter() - started > asked.seconds:
                    break
                rows.append(timed(device, exact, problem_of(head_dim, seqlen, mask), tuple(asked.peers)))
                asked.out.write_text(json.dumps(rows))
                torch.cuda.empty_cache()


if __name__ == "__main__":
    started = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--variants", type=int, default=0, help="a random sample beside the seeds")
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="NAME=VALUE[,VALUE]", help="what to sample from, e.g. fused=1 block_q=64,80"
    )
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, "fa4"], default=["cudnn", "fa4"])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no problem is begun later")
    main(parser.parse_args(), started)
    print(f"done in {time.perf_counter() - started:.0f} s", flush=True)
