"""Attention on arrays of CuPy, or of any library that speaks DLPack, for people without torch. Same kind out.

NumPy arrays are host memory: they are taken inside `flashgen.testing.emulated()` only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashgen import arguments, dispatch, traffic
from flashgen.dispatch import Answer, Dispatcher
from flashgen.errors import InvalidProblem
from flashgen.gpu import cupy
from flashgen.launch import map_obstacle
from flashgen.model import Alignment, DType, Mask, MaskKind, Problem


@dataclass(frozen=True, slots=True)
class Arrays:
    """q, k, v as (batch, heads, rows, columns) arrays of `package` (CuPy or NumPy), unit last stride; `like` is the caller's q."""

    q: Any
    k: Any
    v: Any
    package: Any
    like: Any
    dispatcher: Dispatcher
    stream: int
    given: tuple[Any, ...]  # q, k and v before any copy

    def mappable(self) -> Arrays:
        """The same with copies of what no tensor map can describe: unaligned rows, repeated heads."""

        def copied(array: Any) -> Any:
            refused = map_obstacle(_address(array), array.shape, _in_elements(array), array.itemsize)
            return array.copy(order="C") if refused else array

        return replace(self, q=copied(self.q), k=copied(self.k), v=copied(self.v))

    def problem(self, kind: str, alignment: str, left: int, right: int) -> Problem:
        """Raises InvalidProblem."""
        arguments.check_shapes(self.q.shape, self.k.shape, self.v.shape)
        batch, heads, rows, columns = self.q.shape
        mask = Mask(MaskKind(kind), Alignment(alignment), left, right)
        dtype = DType(self.q.dtype.name)
        return Problem(dtype, columns, self.v.shape[3], batch, heads, self.k.shape[1], rows, self.k.shape[2], mask)


def attention(
    q: Any, k: Any, v: Any, causal: bool, alignment: str, window: Any, scale: float | None, return_lse: bool, layout: str, strict: bool
) -> Any:
    """`flashgen.attention` for arrays; on CuPy's current stream of the arrays' device. No gradients."""
    kind, left, right = arguments.resolve_mask(causal, window, alignment)
    held = _taken(q, k, v, layout)
    problem = held.problem(kind, alignment, left, right)
    served = held.dispatcher.serve(problem, strict=strict, stream=held.stream)
    with _device_of(held.q):
        if served.mapped:
            held = held.mappable()
        o, lse = _outputs(held, problem)
        workspace = held.package.empty(served.workspace_bytes, dtype="uint8") if served.workspace_bytes else None
        launch = held.dispatcher.prepare(
            served, arguments.resolve_scale(scale, problem.head_dim), *(_strides(each) for each in (held.q, held.k, held.v, o))
        )
        traffic.note(problem)
        launch(*(_address(each) for each in (held.q, held.k, held.v, o, lse, workspace)), held.stream)
    o, lse = (_as_like(each, held) for each in (o.swapaxes(1, 2) if layout == "bshd" else o, lse))
    return (o, lse) if return_lse else o


def explain(q: Any, k: Any, v: Any, kind: str, alignment: str, left: int, right: int, layout: str, strict: bool) -> Answer:
    """The kernel that would run."""
    held = _taken(q, k, v, layout)
    served = held.dispatcher.serve(held.problem(kind, alignment, left, right), strict=strict, stream=held.stream)
    reasons = (_why_copied(name, each, served.mapped) for name, each in zip("qkv", held.given, strict=True))
    return replace(served.answer, copies=tuple(filter(None, reasons)))


def _taken(q: Any, k: Any, v: Any, layout: str) -> Arrays:
    """Check the arguments and view them as arrays of one package."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if type(array) is not type(q):
            raise InvalidProblem(f"q, k and v must be of one kind; q is {_kind(q)}, {name} is {_kind(array)}.")
        if not hasattr(array, "__dlpack__"):
            raise InvalidProblem(f"{name} must be an array of torch, CuPy or another library that speaks DLPack; got {_kind(array)}.")
    package, dispatcher, stream = _home(q)
    found = [array if _kind(array).startswith(package.__name__) else package.from_dlpack(array) for array in (q, k, v)]
    for name, array in zip("qkv", found, strict=True):
        arguments.check_rank(name, array.shape)
    arguments.check_dtypes(*(array.dtype.name for array in found))
    if package.__name__ == "cupy":
        arguments.check_devices(*(f"cuda:{array.device.id}" for array in found))
    views = [array.swapaxes(1, 2) if layout == "bshd" else array for array in found]
    q_, k_, v_ = (array if _has_whole_rows(array) else package.ascontiguousarray(array) for array in views)
    return Arrays(q_, k_, v_, package, q, dispatcher, stream, tuple(views))


def _home(q: Any) -> tuple[Any, Dispatcher, int]:
    """The package to handle an array with, its dispatcher, and the raw stream. Raises UnsupportedProblem for host memory."""
    kind, index = q.__dlpack_device__()
    if int(kind) in (2, 13):  # DLPack: kDLCUDA, kDLCUDAManaged
        package = cupy()
        with package.cuda.Device(index):
            return package, dispatch.for_device(int(index)), int(package.cuda.get_current_stream().ptr)
    emulated = dispatch.emulated()
    if emulated is None or int(kind) != 1:
        arguments.refuse_cpu("q", f"{_kind(q)} in host memory" if int(kind) == 1 else f"DLPack device type {int(kind)}")
    assert emulated is not None
    import numpy

    return numpy, emulated, 0


def _has_whole_rows(array: Any) -> bool:
    """Whether columns lie side by side and all strides are whole numbers of elements, which those of views into records need not be."""
    return bool(array.strides[3] == array.itemsize) and all(step % array.itemsize == 0 for step in array.strides)


def _in_elements(array: Any) -> list[int]:
    """All four strides."""
    return [step // array.itemsize for step in array.strides]


def _why_copied(name: str, array: Any, mapped: bool) -> str:
    """In words, or ''."""
    if any(step % array.itemsize for step in array.strides):
        return f"{name} is copied first: its strides {array.strides} (bytes) are no whole numbers of elements of {array.itemsize} bytes."
    return arguments.why_copied(name, _address(array), array.shape, _in_elements(array), array.itemsize, mapped)


def _device_of(array: Any) -> Any:
    from contextlib import nullcontext

    device = getattr(array, "device", None)
    return device if hasattr(device, "__enter__") else nullcontext()


def _outputs(held: Arrays, problem: Problem) -> tuple[Any, Any]:
    """o in memory order batch, rows, heads, columns; lse contiguous float32."""
    o = held.package.empty((problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v), dtype=held.q.dtype)
    return o.swapaxes(1, 2), held.package.empty((problem.batch, problem.heads_q, problem.seqlen_q), dtype="float32")


def _strides(array: Any) -> tuple[int, int, int]:
    row = array.shape[3]
    batch, head, rows = (
        row if size == 1 else stride // array.itemsize for size, stride in zip(array.shape[:3], array.strides, strict=False)
    )  # fmt: skip
    return batch, head, rows


def _address(array: Any) -> int:
    if array is None:
        return 0
    return int(array.data.ptr) if hasattr(array.data, "ptr") else int(array.ctypes.data)


def _as_like(array: Any, held: Arrays) -> Any:
    """The result as the caller's kind of array."""
    if _kind(held.like).startswith(held.package.__name__):
        return array
    namespace = held.like.__array_namespace__() if hasattr(held.like, "__array_namespace__") else None
    return namespace.from_dlpack(array) if namespace is not None else type(held.like).from_dlpack(array)


def _kind(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"
