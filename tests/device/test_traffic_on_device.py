"""DRAM bytes by the GPU's own counters against the model. Needs Nsight Compute (ncu).

Every operand is several times as large as L2, so that what a kernel leaves there unwritten is a small part of its bytes.
"""

from __future__ import annotations

from functools import lru_cache

import counters
import pytest
from run_traffic import problem_of, variant_of

from flashgen import accounting, cost
from flashgen.device import present
from flashgen.space import load_space

pytestmark = [pytest.mark.device, pytest.mark.slow]
FAMILIES = ("standard_forward", "ampere_forward", "hopper_forward")
PROBLEMS = (
    "8 32 4096 128 full",
    "8 64 4096 64 full",
    "2 64 8192 128 full",
    "4 32 8192 128 causal",
    "8 64 4096 64 causal",
    "16 32 2048 128 causal",
)
WITHIN = 0.10


@lru_cache
def counted(family: str) -> tuple[float, ...]:
    """DRAM bytes of each problem; one run of ncu for all."""
    try:
        return tuple(counters.total(each) for each in counters.dram_bytes(family, PROBLEMS))
    except counters.NoCounters as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", PROBLEMS)
def test_dram_bytes_are_within_a_tenth_of_the_model(family: str, words: str) -> None:
    space, limits, asked = load_space(family), present(), problem_of(words)
    if (reason := space.unsupported(asked, limits)) is not None:
        pytest.skip(reason)
    bound = space.bind(asked, limits)
    variant = variant_of(bound)
    if family == "standard_forward":
        modelled = accounting.account(bound, variant).once_bytes
    else:
        modelled = cost.traffic(bound, variant, cost.resources(bound, variant).ctas_per_sm).dram_bytes
    assert counted(family)[PROBLEMS.index(words)] == pytest.approx(modelled, rel=WITHIN), f"model {modelled:,} bytes"
