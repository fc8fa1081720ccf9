"""Frozen data types that cross module borders. No logic beyond what the fields imply."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from flashgen.errors import InvalidProblem

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNLIMITED = -1
"""A window bound that does not bind."""

LARGEST_SEED = 2**32 - 1
"""What every random generator in use takes."""


class Op(StrEnum):
    """What is computed."""

    FORWARD = "forward"
    BACKWARD = "backward"


class DType(StrEnum):
    """Element type of q, k, v and o."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def bytes(self) -> int:
        """Size of one element."""
        return 4 if self is DType.FLOAT32 else 2


class MaskKind(StrEnum):
    """The part of a mask that is compiled in."""

    NONE = "none"
    CAUSAL = "causal"
    WINDOW = "window"


class Alignment(StrEnum):
    """Which corner of the score matrix the diagonal meets."""

    BOTTOM_RIGHT = "bottom_right"
    TOP_LEFT = "top_left"


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query row sees. With d = seqlen_kv - seqlen_q (bottom right) or 0 (top left), row i sees key j when

    * none: always,
    * causal: j <= i + d,
    * window: i + d - left <= j <= i + d + right, where -1 means unlimited. A window of W keys including oneself has left = W - 1.
    """

    kind: MaskKind = MaskKind.NONE
    alignment: Alignment = Alignment.BOTTOM_RIGHT
    left: int = UNLIMITED
    right: int = UNLIMITED

    def __post_init__(self) -> None:
        if self.left < UNLIMITED or self.right < UNLIMITED:
            raise InvalidProblem(
                f"Window bounds are counts of keys, or -1 for unlimited; got left={self.left}, right={self.right}. Only -1 means unlimited."
            )
        if self.kind is not MaskKind.WINDOW and (self.left, self.right) != (UNLIMITED, UNLIMITED):
            raise InvalidProblem(f"A {self.kind} mask has no window bounds; got left={self.left}, right={self.right}.")

    @classmethod
    def causal(cls, alignment: Alignment = Alignment.BOTTOM_RIGHT) -> Mask:
        """Keys up to the diagonal."""
        return cls(MaskKind.CAUSAL, alignment)

    @classmethod
    def window(cls, left: int, right: int, alignment: Alignment = Alignment.BOTTOM_RIGHT) -> Mask:
        """Keys around the diagonal, both bounds inclusive, -1 for unlimited."""
        return cls(MaskKind.WINDOW, alignment, left, right)

    def diagonal(self, seqlen_q: int, seqlen_kv: int) -> int:
        """The key column on the diagonal of query row 0."""
        return seqlen_kv - seqlen_q if self.alignment is Alignment.BOTTOM_RIGHT else 0

    def __str__(self) -> str:
        if self.kind is MaskKind.NONE:
            return "full"
        suffix = "" if self.alignment is Alignment.BOTTOM_RIGHT else ", top left"
        return f"causal{suffix}" if self.kind is MaskKind.CAUSAL else f"window({self.left},{self.right}){suffix}"


@dataclass(frozen=True, slots=True)
class ProblemClass:
    """The part of a problem that is compiled in, and the hard key of a table entry."""

    op: Op
    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: MaskKind
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention computation: q (batch, heads_q, seqlen_q, head_dim), k and v with heads_kv and seqlen_kv, v and o with head_dim_v."""

    dtype: DType
    head_dim: int
    head_dim_v: int
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    mask: Mask = field(default_factory=Mask)
    op: Op = Op.FORWARD
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dim", "head_dim_v", "heads_q", "heads_kv"):
            if getattr(self, name) < 1:
                raise InvalidProblem(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("batch", "seqlen_q", "seqlen_kv"):
            if getattr(self, name) < 0:
                raise InvalidProblem(f"{name} must not be negative; got {getattr(self, name)}.")
            if getattr(self, name) >= 2**31:
                raise InvalidProblem(f"{name} must be below 2^31; got {getattr(self, name)}.")
        if self.batch_heads >= 2**31:
            raise InvalidProblem(f"batch x query heads must be below 2^31; got {self.batch} x {self.heads_q}. Split the batch.")
        if self.heads_q % self.heads_kv:
            raise InvalidProblem(
                f"The query heads must be a multiple of the KV heads; got {self.heads_q} query heads and {self.heads_kv} KV heads."
            )

    @property
    def gqa_group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def batch_heads(self) -> int:
        """Batch × query heads."""
        return self.batch * self.heads_q

    @property
    def scale(self) -> float:
        """The default softmax scale, 1/sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    @property
    def diagonal(self) -> int:
        """The key column on the diagonal of query row 0."""
        return self.mask.diagonal(self.seqlen_q, self.seqlen_kv)

    def klass(self) -> ProblemClass:
        """The compiled-in part."""
        return ProblemClass(self.op, self.dtype, self.head_dim, self.head_dim_v, self.mask.kind, self.deterministic)

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        lengths = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}x{self.seqlen_kv}"
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}:{self.heads_kv}"
        suffix = " deterministic" if self.deterministic else ""
        return f"{self.op} {self.dtype} {dims} s{lengths} b{self.batch} {heads} {self.mask}{suffix}"


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What one GPU offers to a kernel. Sizes in bytes, counts per SM unless named otherwise."""

    name: str
    sm: int  # compute capability times ten: 80, 90, …
    sm_count: int
    shared_bytes_per_cta: int  # opt-in maximum, without the 1 KiB the driver reserves
    shared_bytes_per_sm: int
    registers_per_sm: int  # 32-bit registers
    threads_per_sm: int
    ctas_per_sm: int
    l2_bytes: int
    dram_gb_per_s: float
    tensor_tflops: float  # dense 16-bit tensor-core rate, float32 accumulation
    fp32_tflops: float
    clock_mhz: int  # boost clock of the SMs
    source: str = ""

    def with_shared_bytes(self, per_cta: int) -> DeviceLimits:
        """The same device with another shared-memory capacity (used by the explorer)."""
        return replace(self, shared_bytes_per_cta=per_cta, shared_bytes_per_sm=per_cta + 1024)

    def crowded(self, problem: Problem) -> DeviceLimits:
        """The device with at most one SM per 512 query rows: there, persistent kernels compute several tiles per CTA in small problems too.

        Certificates bind grids to it, else only large problems would test what a CTA hands on from one query tile to the next.
        """
        return replace(self, sm_count=min(self.sm_count, max(1, problem.batch_heads * problem.seqlen_q // 512)))


@dataclass(frozen=True, slots=True)
class Variant:
    """A family with a value for every parameter, in the order of its space."""

    family: str
    params: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, family: str, params: Mapping[str, int]) -> Variant:
        """A variant from a mapping whose order is kept."""
        return cls(family, tuple(params.items()))

    def as_dict(self) -> dict[str, int]:
        """Parameter values by name."""
        return dict(self.params)

    def __str__(self) -> str:
        return f"{self.family}[{' '.join(f'{name}={int(value)}' for name, value in self.params)}]"


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """One launch of a source: entry name, threads per CTA, dynamic shared bytes. The grid follows from the problem (`BoundSpace.grids`)."""

    name: str
    threads: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """One self-contained kernel text. The digest covers the text without comments and line marks."""

    family: str
    klass: ProblemClass
    variant: Variant
    text: str
    digest: str
    entry_points: tuple[EntryPoint, ...]
    min_sm: int
    boxes: tuple[tuple[str, int], ...] = ()  # tensors copied through tensor maps, and the rows of one copy
    counters: int = 0  # words of device memory that a launch finds zero and leaves zero


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What the compiler said about one entry point set: the worst over the entry points, bytes per thread for spills and stack."""

    cubin_digest: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    warnings: tuple[str, ...]
    seconds: float
    nvrtc: str
    options: tuple[str, ...]

    @property
    def serialised_products(self) -> int:
        """Notes that the compiler had to run warpgroup products one by one (C75xx), at about half the speed."""
        return sum(re.search(r"\bC75\d\d\b", warning) is not None for warning in self.warnings)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one CTA of a variant takes, and how many fit an SM: the worst over the entry points."""

    shared_parts: tuple[tuple[str, int], ...]  # named parts of the dynamic shared memory, bytes
    shared_bytes: int  # dynamic shared memory of one CTA
    est_registers: int  # per thread: the compiler's figure where there is one, else the space's estimate
    threads: int  # per CTA
    ctas_per_sm: int  # resident at once; 0 when not even one fits
    limit: str  # what bounds it: shared, registers, threads or ctas


@dataclass(frozen=True)
class Tensor:
    """A (batch, heads, rows, columns) view into a one-dimensional buffer that may hold guard elements around it.

    `buffer` is float32, float16, or uint16 holding bfloat16 bits; `offset` and `strides` count elements; the last stride is 1.
    """

    buffer: NDArray[Any]
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    def view(self) -> NDArray[Any]:
        """The four-dimensional NumPy view (writes go to the buffer)."""
        from numpy.lib.stride_tricks import as_strided

        itemsize = self.buffer.itemsize
        return as_strided(self.buffer[self.offset :], self.shape, tuple(stride * itemsize for stride in self.strides))


@dataclass(frozen=True)
class ForwardTensors:
    """Operands of one forward call. `lse` is a contiguous (batch, heads_q, seqlen_q) view, kept as a Tensor with one column."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """Name and tensor, inputs first."""
        return (("q", self.q), ("k", self.k), ("v", self.v), ("o", self.o), ("lse", self.lse))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a kernel writes."""
        return ("o", "lse")


@dataclass(frozen=True)
class BackwardTensors:
    """Operands of one backward call: what the forward pass had and gave, the gradients that flow in, and those that come out.

    `lse` and `dlse` are contiguous (batch, heads_q, seqlen_q) views with one column; `dlse` is None where nothing depends on lse.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def named(self) -> tuple[tuple[str, Tensor], ...]:
        """Name and tensor, inputs first; without `dlse` where there is none."""
        inputs = (("q", self.q), ("k", self.k), ("v", self.v), ("o", self.o), ("lse", self.lse), ("dout", self.dout))
        flowing = (("dlse", self.dlse),) if self.dlse is not None else ()
        return (*inputs, *flowing, ("dq", self.dq), ("dk", self.dk), ("dv", self.dv))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a kernel writes."""
        return ("dq", "dk", "dv")


class ExecutorName(StrEnum):
    """Who ran a kernel."""

    DEVICE = "device"
    EMULATED = "emulated"


class Executor(Protocol):
    """Runs sources on host arrays: the GPU, or the emulation on a CPU."""

    @property
    def name(self) -> ExecutorName:
        """Which executor this is; a certificate records it."""
        ...

    def prepare(self, sources: Sequence[Source]) -> None:
        """Compile ahead, in parallel where possible. Raises CompileError."""
        ...

    def forward(self, source: Source, problem: Problem, tensors: ForwardTensors, scale: float) -> None:
        """Run all entry points of `source` once; results land in the buffers of `tensors.o` and `tensors.lse`.

        Workspaces are allocated by the executor and filled with NaN bytes before the launch.
        Raises CompileError, LaunchError, EmulationFault.
        """
        ...


class BackwardExecutor(Executor, Protocol):
    """An executor that also runs backward sources."""

    def backward(self, source: Source, problem: Problem, tensors: BackwardTensors, scale: float) -> None:
        """As `forward`; results land in the buffers of `tensors.dq`, `tensors.dk` and `tensors.dv`."""
        ...


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one kernel on one problem, in µs, cold L2."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int
    tflops: float
    source: str = "measured"  # measured, predicted
    clock_mhz: tuple[int, int] | None = None  # SM clock before and after
    throttle: tuple[str, ...] = ()
    wide_scores_us: float | None = None  # median on scores of standard deviation 16, where it was measured; the rest is on 1

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90_us - self.p10_us) / self.median_us if self.median_us else 0.0


class Verdict(StrEnum):
    """What the exactness gate found."""

    EXACT = "exact"
    INEXACT = "inexact"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Proof of exactness of one source by one executor. Ratios are error / error of the plain low-precision computation; the bound is 2."""

    verdict: Verdict
    suite: str
    suite_digest: str
    executor: ExecutorName
    cases: int
    bitwise_cases: int
    worst_error_ratio: float
    worst_case: str
    lse_abs_error: float
    failure: str = ""  # the first failing case and its error, when inexact
    deterministic: bool | None = None  # of a backward kernel: whether equal inputs gave equal bits, always and in any batch


class Outcome(StrEnum):
    """How a trial ended."""

    OK = "ok"
    INFEASIBLE = "infeasible"
    COMPILE_FAILED = "compile_failed"
    SPILLED = "spilled"
    LAUNCH_FAILED = "launch_failed"
    INEXACT = "inexact"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class Trial:
    """One variant that was tried, and how it ended."""

    variant: Variant
    outcome: Outcome
    detail: str = ""
    measurement: Measurement | None = None
    report: CompileReport | None = None
    source_digest: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where an entry comes from."""

    created: str
    flashgen: str
    sampler: str
    seed: int
    asks: int
    measured: int
    space_digest: str
    nvrtc: str
    driver: str
    cupy: str
    device: str


@dataclass(frozen=True, slots=True)
class TableEntry:
    """The winner for one problem: what to run, how fast it is, and why it may be trusted."""

    problem: Problem
    variant: Variant
    source_digest: str
    cubin_digest: str
    options: tuple[str, ...]
    measurement: Measurement
    certificate: Certificate
    provenance: Provenance
    runner_up: tuple[Variant, float] | None = None  # variant and its median in µs
