"""Runs flash-attention's own forward tests against `flashgen.compat.flash_attn_func`, and says what was left out and why.

    python tests/device/flash_attention_suite.py PATH/TO/test_flash_attn.py [--sample N] [--processes N] [--seconds N] [pytest's]

The test file is obtained beforehand (it needs einops) and is no part of this project. Only `test_flash_attn_output` is in scope: one call
of `flash_attn_func` and its gradients. `--sample N` runs every N-th test of what is in scope; `--processes N` shares head dims and types
among N processes, so that each kernel is compiled and certified by one of them, and adds up what they say. `--seconds N` starts no test
later than that; the order is random, always the same.
"""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

IN_SCOPE = "test_flash_attn_output"
MODULES = (
    "flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary",
    "flash_attn.flash_attn_triton", "flash_attn.flash_attn_triton_amd", "flash_attn.flash_attn_triton_amd.utils",
)  # fmt: skip
NOT_COMPUTED = {"dropout_p": 0.0, "alibi": False, "softcap": 0.0, "bias_type": "no"}


class Stub(types.ModuleType):
    """A module in flash-attn's place: flags are False, everything else refuses when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return False

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} is not in scope")

        return refuse


def install() -> None:
    """Put flashgen's drop-in where the tests import flash-attn from."""
    from flashgen import compat

    stubs = {name: Stub(name) for name in MODULES}
    for name, stub in stubs.items():
        stub.__path__ = []
        sys.modules[name] = stub

    def kvpacked(q: Any, kv: Any, *arguments: Any, **options: Any) -> Any:
        return compat.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *arguments, **options)

    stubs["flash_attn"].flash_attn_func = compat.flash_attn_func  # type: ignore[attr-defined]
    stubs["flash_attn"].flash_attn_kvpacked_func = kvpacked  # type: ignore[attr-defined]
    stubs["flash_attn.flash_attn_triton_amd.utils"].is_rdna = lambda: False  # type: ignore[attr-defined]


class Scope:
    """The pytest plugin that leaves tests out, before they are collected, and counts them by reason."""

    def __init__(self, every: int, shard: int, shards: int, seconds: float) -> None:
        self.every, self.shard, self.shards, self.ends = every, shard, shards, time.monotonic() + seconds
        self.left_out: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.in_scope = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Reduces the parameters of a test to those in scope."""
        marks = [mark for mark in metafunc.definition.own_markers if mark.name == "parametrize"]
        kept = []
        for mark in marks:
            name, values = mark.args
            neutral = [value for value in values if value == NOT_COMPUTED.get(name, value)]
            kept.append(pytest.mark.parametrize(name, neutral).mark)
            if metafunc.function.__name__ == IN_SCOPE and len(neutral) < len(values):
                others = math.prod(len(each.args[1]) for each in marks) // len(values)
                self.leave_out(
                    f"{name} = {[v for v in values if v not in neutral]}: no kernel computes it", (len(values) - len(neutral)) * others
                )
        if metafunc.function.__name__ != IN_SCOPE:
            self.leave_out(
                f"{metafunc.function.__name__}: another function than flash_attn_func", math.prod(len(each.args[1]) for each in marks)
            )
            kept = [pytest.mark.parametrize(each.args[0], each.args[1][:1]).mark for each in marks]
        metafunc.definition.own_markers[:] = kept

    def leave_out(self, reason: str, count: int) -> None:
        self.left_out[reason] += count if self.shard == 0 else 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept, groups = list[pytest.Item](), dict[tuple[str, str], int]()
        for item in items:
            if getattr(item, "originalname", item.name) != IN_SCOPE:
                continue
            parameters = item.callspec.params  # type: ignore[attr-defined]
            group = groups.setdefault((str(parameters["d"]), str(parameters["dtype"])), len(groups))
            if group % self.shards != self.shard:
                continue
            self.in_scope += 1
            if self.in_scope % self.every == 0:
                kept.append(item)
        if self.in_scope > len(kept):
            self.left_out[f"not in the sample of every {self.every}th"] += self.in_scope - len(kept)
        random.Random(0).shuffle(kept)
        items[:] = kept

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.ends:
            self.left_out["no time left"] += 1
            pytest.skip("no time left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:  # what was left out is skipped in its set-up
            self.outcomes[report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        report(self.in_scope, self.outcomes, self.left_out, terminalreporter.write_line)


def side_by_side(processes: int, arguments: list[str]) -> int:
    """Runs the shards at once and adds up their summaries; the worst exit code."""
    command = [sys.executable, __file__, *arguments, "--shard"]
    running = [subprocess.Popen([*command, f"{n}/{processes}"], stdout=subprocess.PIPE, text=True) for n in range(processes)]
    in_scope, outcomes, left_out = 0, Counter[str](), Counter[str]()
    for shard, each in enumerate(running):
        told = each.communicate()[0]
        summary = re.search(r"in scope: (\d+); (.*)", told)
        if each.returncode or summary is None:
            print(f"shard {shard} ended with {each.returncode}:\n{told[-4000:]}", flush=True)
        if summary is not None:
            in_scope += int(summary[1])
            outcomes.update({outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", summary[2])})
        left_out.update({reason: int(count) for count, reason in re.findall(r"left out: (\d+) x (.*)", told)})
    report(in_scope, outcomes, left_out, print)
    return max(each.returncode for each in running)


def report(in_scope: int, outcomes: Counter[str], left_out: Counter[str], say: Callable[[str], object]) -> None:
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "none ran"
    say(f"in scope: {in_scope}; {told}")
    for reason, count in left_out.most_common():
        say(f"left out: {count} x {reason}")


def option(arguments: list[str], name: str) -> str | None:
    """Takes an option and its value out of the arguments."""
    if name not in arguments:
        return None
    at = arguments.index(name)
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


def main(arguments: list[str]) -> int:
    """The exit code of pytest."""
    processes = int(option(arguments, "--processes") or 1)
    if processes > 1:
        return side_by_side(processes, arguments)
    every, (shard, shards) = int(option(arguments, "--sample") or 1), (option(arguments, "--shard") or "0/1").split("/")
    seconds = float(option(arguments, "--seconds") or "inf")
    install()
    plugins = [Scope(every, int(shard), int(shards), seconds)]
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", "/", *arguments], plugins=plugins))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
