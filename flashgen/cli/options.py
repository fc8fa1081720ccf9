"""Options that several commands share, and the problems they ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from flashgen.errors import InfeasibleVariant, InvalidProblem, MissingDependency
from flashgen.model import LARGEST_SEED, DeviceLimits, DType, ExecutorName, Mask, Op, Problem

_SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32"}
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _integers(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Integers separated by commas."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of integers such as 1024,4096.") from None


def _dtype(_: click.Context, __: click.Parameter, text: str) -> DType:
    """An element type by its long or short name."""
    try:
        return DType(_SHORT_DTYPES.get(text.lower(), text.lower()))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not one of float32, float16, bfloat16 (or fp32, fp16, bf16).") from None


@dataclass(frozen=True, slots=True)
class Request:
    """What the problem options say. `causal` is None where neither flag was given: full and causal."""

    head_dim: int | None
    head_dim_v: int | None
    dtype: DType
    seqlen: tuple[int, ...]
    seqlen_q: int | None
    seqlen_kv: int | None
    batch: int
    heads: int
    kv_heads: int | None
    causal: bool | None
    window: tuple[int, ...] | None
    op: str
    deterministic: bool

    def problems(self) -> tuple[Problem, ...]:
        """One problem per length and mask. Raises InvalidProblem."""
        if self.head_dim is None:
            raise InvalidProblem("--head-dim is needed: the columns of q and k, such as --head-dim 128.")
        lengths = dict.fromkeys((_given(self.seqlen_q, each), _given(self.seqlen_kv, each)) for each in self.seqlen)
        return tuple(self._problem(seqlen_q, seqlen_kv, mask) for seqlen_q, seqlen_kv in lengths for mask in self.masks())

    def masks(self) -> tuple[Mask, ...]:
        """The masks asked for. Raises InvalidProblem."""
        if self.window is None:
            both = (Mask(), Mask.causal())
            return both if self.causal is None else (both[int(self.causal)],)
        if len(self.window) != 2:
            listed = ",".join(map(str, self.window))
            raise InvalidProblem(f"--window takes two bounds, left and right, such as --window 127,0; got {listed}.")
        if self.causal:
            raise InvalidProblem(
                f"--causal and --window exclude each other; got --window {self.window[0]},{self.window[1]}. "
                f"A causal window is --window {self.window[0]},0."
            )
        return (Mask.window(self.window[0], self.window[1]),)

    def _problem(self, seqlen_q: int, seqlen_kv: int, mask: Mask) -> Problem:
        assert self.head_dim is not None
        return Problem(
            dtype=self.dtype, head_dim=self.head_dim, head_dim_v=_given(self.head_dim_v, self.head_dim), batch=self.batch,
            heads_q=self.heads, heads_kv=_given(self.kv_heads, self.heads), seqlen_q=seqlen_q, seqlen_kv=seqlen_kv,
            mask=mask, op=Op(self.op), deterministic=self.deterministic,
        )  # fmt: skip


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def problem_options(command: _Command) -> _Command:
    """Add the options that describe problems; the command receives them as one `request`."""
    for option in reversed(_PROBLEM_OPTIONS):
        command = option(command)
    return command


_PROBLEM_OPTIONS = (
    click.option("--head-dim", type=int, help="Columns of q and k."),
    click.option("--head-dim-v", type=int, help="Columns of v and o.  [default: head dim]"),
    click.option(
        "--dtype", metavar="TYPE", callback=_dtype, default="bfloat16", show_default=True, help="Element type, also fp32, fp16, bf16."
    ),
    click.option("--seqlen", metavar="N,N,…", callback=_integers, default="4096", show_default=True, help="Lengths of q and of k, v."),
    click.option("--seqlen-q", type=int, help="Rows of q, where they differ."),
    click.option("--seqlen-kv", type=int, help="Rows of k and v, where they differ."),
    click.option("--batch", type=int, default=4, show_default=True, help="Sequences."),
    click.option("--heads", type=int, default=16, show_default=True, help="Query heads."),
    click.option("--kv-heads", type=int, help="K/V heads; they divide the query heads.  [default: heads]"),
    click.option("--causal/--no-causal", default=None, help="Causal or full attention.  [default: both]"),
    click.option("--window", callback=_integers, metavar="L,R", help="Sliding window: keys to the left and right, -1 for no bound."),
    click.option("--op", type=click.Choice([str(op) for op in Op]), default=str(Op.FORWARD), show_default=True, help="What is computed."),
    click.option("--deterministic/--fast", default=False, show_default=True, help="Same bits every time, also backward."),
)


def request_of(options: dict[str, Any]) -> Request:
    """Take the problem options out of a command's options."""
    return Request(**{name: options.pop(name) for name in Request.__dataclass_fields__})


family_option = click.option("--family", "families", multiple=True, metavar="NAME", help="Kernel family; may be repeated.  [default: all]")
gpu_option = click.option("--gpu", default="auto", show_default=True, metavar="NAME", help="auto, or h200, h100, a100, l40s, rtx4090, …")
executor_option = click.option(
    "--executor", type=click.Choice(["auto", *map(str, ExecutorName)]), default="auto", show_default=True, help="Who runs kernels."
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, LARGEST_SEED), default=0, show_default=True, help="Of random inputs and of the search."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable results on stdout.")
params_option = click.option("--params", metavar="NAME=N,…", help="A variant by its parameter values; needs one --family.")


def print_json(record: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(record, indent=1))


def parse_params(text: str) -> dict[str, int]:
    """`block_q=128,block_kv=64` as numbers; blanks separate too, true and false count as 1 and 0. Raises InfeasibleVariant."""
    values: dict[str, int] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition("=")
        word = {"true": "1", "false": "0"}.get(value.lower(), value)
        if not name or not word.isdigit() or name in values:
            raise InfeasibleVariant(f"A variant is written as NAME=NUMBER,NAME=NUMBER, each name once; found {part!r} in {text!r}.")
        values[name] = int(word)
    return values


@dataclass(frozen=True, slots=True)
class Target:
    """The device to work for, and whether kernels run on it."""

    device: DeviceLimits
    executor: ExecutorName
    note: str = ""  # one line for people when there is no GPU to measure on

    @property
    def predicted(self) -> bool:
        """Whether times come from the cost model."""
        return self.executor is ExecutorName.EMULATED


def target_of(gpu: str, executor: str) -> Target:
    """Who runs kernels, for which device. Raises UnknownDevice, and MissingDependency when the device is asked for and absent."""
    from flashgen import device

    named = None if gpu == "auto" else device.preset(gpu)
    if executor == ExecutorName.EMULATED:
        return Target(named or device.resolve(gpu), ExecutorName.EMULATED)
    if executor == ExecutorName.DEVICE and not device.is_present():
        raise MissingDependency("Only a GPU can do this, and none can be used here. `flashgen doctor` says why.")
    if device.is_present():
        present = device.present()
        if named is None or device.same_resources(named, present):
            return Target(present, ExecutorName.DEVICE)
        if executor == ExecutorName.DEVICE:
            raise click.UsageError(
                f"--executor device runs on the GPU that is present, {present.name}; --gpu {gpu} is {named.name}. Leave out one of them."
            )
        note = f"The GPU here is {present.name}, not {named.name}: times are predicted by the cost model, kernels are run emulated."
        return Target(named, ExecutorName.EMULATED, note)
    limits = named or device.preset(device.DEFAULT_PRESET)
    note = f"No GPU here: working for {limits.name} (--gpu); times are predicted by the cost model, kernels are run emulated on the CPU."
    return Target(limits, ExecutorName.EMULATED, note)


def executor_for(target: Target, policy: str | None = None) -> Any:
    """The executor of a target. Raises MissingDependency, and a usage error for a policy that means nothing."""
    if target.executor is ExecutorName.DEVICE:
        if policy is not None:
            raise click.UsageError("--policy schedules emulated threads; it needs --executor emulated.")
        from flashgen.runtime import DeviceExecutor

        return DeviceExecutor()
    from flashgen.emulate import EmulatedExecutor

    return EmulatedExecutor(target.device) if policy is None else EmulatedExecutor(target.device, parse_policy(policy))


def parse_policy(text: str) -> Any:
    """The policy whose name `str(policy)` is `text`, such as greedy-early:1."""
    from flashgen.emulate import Policy, Schedule

    words, _, seed = text.partition(":")
    schedule, _, rest = words.partition("-")
    copies, unchecked = rest.removesuffix("-unchecked"), rest.endswith("-unchecked")
    names = [each.name.lower() for each in Schedule]
    products = next((late for word, late in (("late", True), ("early", False)) if copies.endswith(f"-{word}-products")), None)
    copies = copies.removesuffix("-products").rpartition("-")[0] if products is not None else copies
    if schedule not in names or copies not in ("early", "late", "late-poison") or not (seed or "1").isdigit():
        raise click.UsageError(
            f"A policy is SCHEDULE-COPIES[-late-products][-unchecked][:SEED], such as greedy-early:1; schedules: {', '.join(names)}; "
            f"copies: early, late, late-poison; products of warpgroups follow the copies, or early-products, late-products. Got {text!r}."
        )
    return Policy(Schedule[schedule.upper()], copies != "early", copies != "late", not unchecked, int(seed or 1), products)
