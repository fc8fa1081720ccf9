"""Every family is exact on the GPU, and the two executors agree."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from sampling import sample

from flashgen import certify, device
from flashgen.emulate import EmulatedExecutor
from flashgen.gpu import Gpu
from flashgen.model import Certificate, Problem, Source, Verdict
from flashgen.runtime import DeviceExecutor
from flashgen.space import Space

pytestmark = pytest.mark.device
PER_FAMILY = int(os.environ.get("PER_FAMILY", "20"))


@pytest.fixture(scope="module")
def executor() -> DeviceExecutor:
    return DeviceExecutor(Gpu(0))


@pytest.fixture(scope="module")
def sampled() -> list[tuple[Space, Source, Problem]]:
    return list(sample(device.present(), PER_FAMILY))


def test_a_sample_of_every_family_is_certified_by_both_executors(
    executor: DeviceExecutor, sampled: list[tuple[Space, Source, Problem]], record_property: pytest.RecordProperty
) -> None:
    emulated = EmulatedExecutor(device.present())

    def on_the_cpu(each: tuple[Space, Source, Problem]) -> Certificate:
        return certify.quick(emulated, *each, 1)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [pool.submit(on_the_cpu, each) for each in sampled]
        executor.prepare([source for _, source, _ in sampled])
        on_the_gpu = [certify.full(executor, *each, 1) for each in sampled]
        on_the_host = [future.result() for future in pending]
    wrong = []
    for (_, source, _), gpu, host in zip(sampled, on_the_gpu, on_the_host, strict=True):
        print(f"{source.variant} {source.klass.dtype} d{source.klass.head_dim}/{source.klass.head_dim_v} {source.klass.mask}:", end=" ")
        print(f"device {gpu.verdict} {gpu.cases} cases, worst {gpu.worst_error_ratio:.2f}; emulated {host.verdict}")
        wrong += [
            f"{source.variant} {name}: {found.failure}"
            for name, found in (("device", gpu), ("emulated", host))
            if found.verdict is not Verdict.EXACT
        ]
    record_property("certified", len(sampled))
    assert not wrong, "\n".join(wrong)
