"""Backward families on the GPU: certificates, the same bits every time, gradients through autograd, memory, and a model that trains."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sampling import sample

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

import train_gpt  # noqa: E402

import flashgen  # noqa: E402
from flashgen import bench, cases, device, gate, gradient_gate, peers, reference  # noqa: E402
from flashgen.cases import Layout  # noqa: E402
from flashgen.gpu import Gpu  # noqa: E402
from flashgen.gradient_suite import Case  # noqa: E402
from flashgen.model import BackwardTensors, DType, Mask, Op, Problem, Source, Verdict  # noqa: E402
from flashgen.render import render  # noqa: E402
from flashgen.runtime import DeviceExecutor  # noqa: E402
from flashgen.space import Space, load_spaces  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::flashgen.errors.UntunedProblemWarning")]
PER_FAMILY = int(os.environ.get("PER_FAMILY", "12"))
REPETITIONS = 30
SPACES = load_spaces(Op.BACKWARD)


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    yield DeviceExecutor(Gpu(0))


def test_a_sample_of_every_backward_family_is_certified(executor: DeviceExecutor) -> None:
    sampled, wrong = list(sample(device.present(), PER_FAMILY, op=Op.BACKWARD)), []
    executor.prepare([source for _, source, _ in sampled])
    for space, source, problem in sampled:
        found = gate.full(executor, space, source, problem, 1)
        print(f"{source.variant} {problem}: {found.verdict}, {found.cases} cases, worst {found.worst_error_ratio:.2f}", flush=True)
        wrong += [f"{source.variant}: {found.failure}"] if found.verdict is not Verdict.EXACT else []
    assert not wrong, "\n".join(wrong)


def bits(tensors: BackwardTensors) -> list[np.ndarray]:
    return [cases.bits_of(tensor.view()) for _, tensor in gradient_gate.gradients_of(tensors)]


def steady(space: Space) -> tuple[Source, Case]:
    """A deterministic variant of a family, on a case that fills the GPU; skips where the family does not run."""
    problem = Problem(DType.BFLOAT16, 64, 64, 4, 16, 4, 700, 900, Mask.causal(), Op.BACKWARD, deterministic=True)
    if reason := space.unsupported(problem, device.present()):
        pytest.skip(reason)
    bound = space.bind(problem, device.present())
    return render(space, problem.klass(), (bound.seeds() or [bound.fallback()])[0]), Case("steady", problem, dlse=True)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.family)
def test_thirty_runs_and_any_batch_give_the_same_bits(executor: DeviceExecutor, space: Space) -> None:
    source, case = steady(space)
    expected = gradient_gate.expect(case)
    first, failure = gradient_gate.launch(executor, source, case, expected)
    assert not failure
    for _ in range(REPETITIONS):
        again, failure = gradient_gate.launch(executor, source, case, expected)
        assert not failure and all(map(np.array_equal, bits(first), bits(again)))
    for batch in range(case.problem.batch):
        alone, part, one, _ = gradient_gate._alone(case, expected, batch)
        single, failure = gradient_gate.launch(executor, source, alone, part, Layout.CONTIGUOUS)
        assert not failure
        whole = [cases.bits_of(tensor.view()[one]) for _, tensor in gradient_gate.gradients_of(first)]
        assert all(map(np.array_equal, whole, bits(single))), batch


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.family)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_backward_family_is_clean_under_compute_sanitizer(tool: str, space: Space) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    entries = "|".join(sorted(launch.entry for launch in space.definition.launches))
    script = str(Path(__file__).with_name("run_gradients.py"))
    command = [
        sanitizer,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--kernel-regex",
        f"kns=^({entries})$",
        sys.executable,
        script,
        space.family,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-2000:]


# Through torch --------------------------------------------------------------------------------------------------------


def inputs(dtype: torch.dtype, heads: int = 6, heads_kv: int = 2, rows: int = 257, keys: int = 391, dim: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, heads, rows, dim), (2, heads_kv, keys, dim), (2, heads_kv, keys, dim))
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_outputs_and_lse_are_those_of_float64(dtype: torch.dtype, causal: bool) -> None:
    q, k, v = inputs(dtype)
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(3, 1).mT * 64**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(257, 391, device="cuda", dtype=torch.bool).triu(391 - 257 + 1), float("-inf"))
    right, right_lse = scores.softmax(-1) @ wide[2].repeat_interleave(3, 1), scores.logsumexp(-1)
    o, lse = flashgen.attention(q, k, v, causal=causal, return_lse=True)
    weight, weight_lse = torch.randn_like(right), torch.randn_like(right_lse)
    for value, value_lse in ((o, lse), (right, right_lse)):
        torch.autograd.backward((value, value_lse), (weight.to(value.dtype), weight_lse.to(value_lse.dtype)))
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for found, exact in zip((q, k, v), wide, strict=True):
        assert found.grad is not None and exact.grad is not None
        assert float((found.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()) < bound


def test_determinism_asked_of_torch_reaches_the_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        found = flashgen.explain(*inputs(torch.bfloat16)).gradients
        assert not isinstance(found, str) and found.problem.deterministic
        grads = []
        for _ in range(REPETITIONS):
            q, k, v = inputs(torch.bfloat16)
            flashgen.attention(q, k, v, causal=True).sum().backward()
            grads.append([q.grad, k.grad, v.grad])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(left, right) for again in grads[1:] for left, right in zip(grads[0], again, strict=True))


def test_an_expanded_gradient_gives_the_bits_of_a_contiguous_one() -> None:
    found, shape = [], (2, 6, 257, 64)
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    for ones in (one.expand(shape), one.expand(shape).contiguous()):
        q, k, v = inputs(torch.bfloat16)
        flashgen.attention(q, k, v, causal=True, deterministic=True).backward(ones)
        found.append([q.grad, k.grad, v.grad])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_a_side_stream_gives_the_bits_of_the_default_stream() -> None:
    found, stream = [], torch.cuda.Stream()
    for current in (torch.cuda.current_stream(), stream):
        for _ in range(10):
            leaves = inputs(torch.bfloat16)
            current.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(current):
                late = [(each * 1.5).detach().requires_grad_() for each in leaves]
                o = flashgen.attention(*late, causal=True, deterministic=True)
                junk = [torch.full_like(o, float("nan")) for _ in range(4)]  # takes freed memory, in stream order
                o.sum().backward()
                del junk
            torch.cuda.synchronize()
            found.append([each.grad for each in late])
    assert all(torch.equal(left, right) for again in found[1:] for left, right in zip(found[0], again, strict=True))


def test_more_heads_than_a_padded_workspace_can_index_in_31_bits() -> None:
    q, k, v = (torch.randn(8300, 16, 1, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(8300, 16, 1, 128, device="cuda", dtype=torch.bfloat16)
    flashgen.attention(q, k, v).backward(dout)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert torch.equal(v.grad, dout)
    assert float(q.grad.abs().max()) < 1e-3 and float(k.grad.abs().max()) < 1e-3


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 60 * 2**30, reason="needs 60 GiB of free GPU memory")
def test_a_batch_beyond_31_bits_of_elements_gives_the_bits_of_its_last_element_alone() -> None:
    def gradients(*operands: torch.Tensor) -> list[torch.Tensor]:
        q, k, v, dout = (each.detach() for each in operands)
        leaves = [each.requires_grad_() for each in (q, k, v)]
        flashgen.attention(*leaves, deterministic=True).backward(dout)
        return [each.grad for each in leaves if each.grad is not None]

    shapes = ((400, 4, 10496, 128), (400, 4, 128, 128), (400, 4, 128, 128), (400, 4, 10496, 128))
    operands = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    whole, alone = gradients(*operands), gradients(*(each[-1:].clone() for each in operands))
    assert all(torch.isfinite(each).all() for each in whole)
    assert all(torch.equal(left[-1:], right) for left, right in zip(whole, alone, strict=True))


def test_fifty_repetitions_of_one_graph_give_the_same_bits() -> None:
    q, k, v = (torch.randn(300, 1, rows, 128, device="cuda", dtype=torch.float16).mul_(3).requires_grad_() for rows in (2048, 128, 128))
    for deterministic, steady in ((False, slice(1, None)), (True, slice(None))):
        o = flashgen.attention(q, k, v, deterministic=deterministic)
        ones = torch.ones_like(o)
        first = torch.autograd.grad(o, (q, k, v), ones, retain_graph=True)
        for _ in range(50 if not deterministic else REPETITIONS):
            again = torch.autograd.grad(o, (q, k, v), ones, retain_graph=True)
            assert all(map(torch.equal, first[steady], again[steady]))


def peak_bytes(attend: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Memory of one forward and backward pass beyond the inputs, results included."""
    for each in (q, k, v):
        each.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = attend(q, k, v)  # type: ignore[operator]
    o.backward(torch.ones((), device="cuda", dtype=o.dtype).expand_as(o).contiguous())
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def test_a_long_sequence_takes_no_more_than_dq_in_float32_and_two_numbers_per_row_beyond_its_results() -> None:
    rows, heads, dim = 2**15, 16, 128
    q, k, v = (torch.randn(1, rows, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3))
    ours = lambda *each: flashgen.attention(*each, causal=True)  # noqa: E731
    ours(*(each.detach()[:, :, :256].requires_grad_() for each in (q, k, v))).sum().backward()  # compiles and loads before it is measured
    found = peak_bytes(ours, q, k, v)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        peer = peak_bytes(lambda *each: torch.nn.functional.scaled_dot_product_attention(*each, is_causal=True), q, k, v)
    elements = heads * rows * dim
    results = 2 * elements * (1 + 1 + 3)  # o, dout, and dq, dk, dv
    beyond = 4 * elements + 4 * heads * rows * (1 + 1 + 2)  # dq in float32; lse, its gradient, and two numbers per row
    matrix = heads * rows * rows * 2
    print(json.dumps({"flashgen_mib": found >> 20, "fa2_mib": peer >> 20, "matrix_mib": matrix >> 20}))
    assert found <= (results + beyond) * 1.02 + 2**20


# Measuring ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", ["sdpa-flash", "sdpa-cudnn"])
def test_kernels_and_peers_compute_the_same_gradients_of_the_operands_that_are_timed(peer: str) -> None:
    problem = Problem(DType.BFLOAT16, 64, 64, 2, 4, 4, 512, 512, Mask.causal(), Op.BACKWARD)
    state, space = bench.open_device(0), SPACES[0]
    source = render(space, problem.klass(), space.bind(problem, device.present()).fallback())
    state.launchable("ours", source, None, problem, 0)()
    made = state.operands(problem, 0)
    theirs = peers.prepare(peer, made.for_peers(state.gpu)).run()
    for name, right in zip(("dq", "dk", "dv"), theirs, strict=True):
        bits = np.empty(made.buffers[name].bytes // 2, np.uint16)
        state.gpu.download(made.buffers[name], bits)
        found = torch.from_numpy(reference.decode(bits, problem.dtype)).view(right.shape)
        assert float((found - right.float().cpu()).norm() / found.norm()) < 1e-2, name
    compared = bench.interleave_task(state, [("ours", source, None)], problem, 6, 0, (peer,))
    assert set(compared.samples) == {"ours", peer} and all(time > 0 for times in compared.samples.values() for time in times)


# Training -------------------------------------------------------------------------------------------------------------


def test_a_small_gpt_learns_as_it_does_with_torchs_own_attention() -> None:
    curves = {name: train_gpt.train(name, steps=200) for name in ("sdpa-math", "sdpa-flash", "flashgen")}
    print(json.dumps({name: {"last_loss": run.losses[-1], "tokens_per_s": round(run.tokens_per_s)} for name, run in curves.items()}))
    reference = train_gpt.smoothed(curves["sdpa-math"].losses)
    noise = np.abs(train_gpt.smoothed(curves["sdpa-flash"].losses) - reference).max()
    distance = np.abs(train_gpt.smoothed(curves["flashgen"].losses) - reference).max()
    assert curves["flashgen"].losses[-1] < 0.7 * curves["flashgen"].losses[0]
    assert distance <= max(2 * noise, 0.01), f"curves {distance:.4f} apart, torch's own two {noise:.4f}"


def test_the_script_that_trains_reads_its_text_from_the_repository() -> None:
    assert len(train_gpt.text()) > 200_000 and Path(train_gpt.__file__).exists()
    assert replace(train_gpt.CONFIG, layers=1).layers == 1
