"""Every family is exact on the GPU, and the two executors agree."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from sampling import sample

from flashgen import certify, device
from flashgen.gpu import Gpu
from flashgen.model import Certificate, DeviceLimits, Problem, Source, Verdict
from flashgen.runtime import DeviceExecutor
from flashgen.space import load_space

pytestmark = pytest.mark.device
PER_FAMILY = int(os.environ.get("PER_FAMILY", "20"))


def on_the_cpu(limits: DeviceLimits, source: Source, problem: Problem) -> Certificate:
    """In a process of its own: forking a process that holds a CUDA context is slow."""
    from flashgen.emulate import EmulatedExecutor

    return certify.full(EmulatedExecutor(limits, isolated=False), load_space(source.family), source, problem, 1)


def test_a_sample_of_every_family_is_certified_by_both_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    limits = device.present()
    sampled = list(sample(limits, PER_FAMILY))
    executor = DeviceExecutor(Gpu(0))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        pending = [pool.submit(on_the_cpu, limits, source, problem) for _, source, problem in sampled]
        started = time.perf_counter()
        executor.prepare([source for _, source, _ in sampled])
        print(f"compiled {len(sampled)} sources in {time.perf_counter() - started:.1f} s", flush=True)
        wrong = []
        for (space, source, problem), host in zip(sampled, pending, strict=True):
            started = time.perf_counter()
            gpu = certify.full(executor, space, source, problem, 1)
            seconds = time.perf_counter() - started
            print(f"{source.variant} {problem}: device {gpu.verdict}, {gpu.cases} cases in {seconds:.1f} s,", end=" ")
            print(f"worst {gpu.worst_error_ratio:.2f}; emulated {host.result().verdict}", flush=True)
            for name, found in (("device", gpu), ("emulated", host.result())):
                wrong += [f"{source.variant} {name}: {found.failure}"] if found.verdict is not Verdict.EXACT else []
    assert not wrong, "\n".join(wrong)
