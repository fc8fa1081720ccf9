"""Runs flash-attention's own forward tests against `flashgen.compat.flash_attn_func`, and says what was left out and why.

    python tests/device/flash_attention_suite.py PATH/TO/flash-attention/tests/test_flash_attn.py [--sample N] [pytest options]

The test file is obtained beforehand (it needs einops) and is no part of this project. Only `test_flash_attn_output` is in scope: one call
of `flash_attn_func` and its gradients. `--sample N` runs every N-th test of what is in scope.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
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


def exclusion(name: str, parameters: dict[str, Any]) -> str | None:
    """Why a test is out of scope, or None."""
    if name != IN_SCOPE:
        return f"{name}: another function than flash_attn_func"
    for parameter, neutral in NOT_COMPUTED.items():
        if parameters.get(parameter, neutral) != neutral:
            return f"{parameter} = {parameters[parameter]}: no kernel computes it"
    return None


class Scope:
    """The pytest plugin that leaves tests out and counts them by reason."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.left_out: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.in_scope = 0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        kept = []
        for item in items:
            parameters = dict(getattr(getattr(item, "callspec", None), "params", {}))
            reason = exclusion(getattr(item, "originalname", item.name), parameters)
            if reason is None:
                self.in_scope += 1
                if self.in_scope % self.every == 0:
                    kept.append(item)
                else:
                    self.left_out[f"not in the sample of every {self.every}th"] += 1
            else:
                self.left_out[reason] += 1
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.outcomes[report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())) or "none ran"
        terminalreporter.write_line(f"in scope: {self.in_scope}; {told}")
        for reason, count in self.left_out.most_common():
            terminalreporter.write_line(f"left out: {count} x {reason}")


def main(arguments: list[str]) -> int:
    """The exit code of pytest."""
    every = 1
    if "--sample" in arguments:
        at = arguments.index("--sample")
        every = int(arguments[at + 1])
        del arguments[at : at + 2]
    install()
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", "/", *arguments], plugins=[Scope(every)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
