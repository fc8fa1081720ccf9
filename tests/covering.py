"""Few variants in which every two values that a space offers together meet: what a random sample may miss."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Sequence

from flashgen.model import Variant

Pair = tuple[tuple[str, int], tuple[str, int]]
LOOKED_AT = 40


def pairs_of(variant: Variant) -> set[Pair]:
    """Every two parameters with their values."""
    return set(itertools.combinations(variant.as_dict().items(), 2))


def covering(feasible: Sequence[Variant], seed: int) -> list[Variant]:
    """Variants, the same for the same seed, among which each pair of values occurs that occurs in `feasible` at all."""
    chosen, having = random.Random(seed), defaultdict[Pair, list[Variant]](list)
    for variant in feasible:
        for pair in pairs_of(variant):
            having[pair].append(variant)
    missing, found = set(having), list[Variant]()
    while missing:
        rarest = min(missing, key=lambda pair: (len(having[pair]), pair))
        some = chosen.sample(having[rarest], min(LOOKED_AT, len(having[rarest])))
        found.append(max(some, key=lambda variant: len(pairs_of(variant) & missing)))
        missing -= pairs_of(found[-1])
    return found
