"""The backward operation outside its kernels: determinism in spaces and tables, memory, measuring, the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from table_entries import entry
from test_bench import SimulatedGpu
from test_dispatch import FakeBackend

from flashgen import bench, bundle, cost, peers, reference, table, table_schema, traffic
from flashgen.device import preset
from flashgen.dispatch import Dispatcher, Origin
from flashgen.errors import InvalidSpace, InvalidTable, UnsupportedProblem
from flashgen.launch import MappedBackwardStruct, Operand, backward_params, map_of
from flashgen.model import DType, Mask, Op, Problem, TableEntry, Variant
from flashgen.peers import DeviceArray, PeerOperands
from flashgen.render import render
from flashgen.space import Space, load_space, load_spaces, parse_space
from flashgen.untuned import fallbacks, tune_command

DEVICE = preset("h200")
LONG = Problem(DType.BFLOAT16, 128, 128, 1, 16, 16, 2**15, 2**15, Mask.causal(), Op.BACKWARD)


def problem(**changes: Any) -> Problem:
    return replace(Problem(DType.BFLOAT16, 64, 64, 2, 4, 2, 256, 256, Mask.causal(), Op.BACKWARD), **changes)


def space_with_choice(rule: str = 'deterministic: "threads == 64"\n') -> Space:
    """simt_backward's space, as if only variants with 64 threads kept their bits."""
    from flashgen import paths

    text = (paths.search_spaces() / "simt_backward.yaml").read_text()
    return parse_space(text.replace("op: backward\n", f"op: backward\n{rule}"), "simt_backward.yaml")


# Determinism ----------------------------------------------------------------------------------------------------------


def test_a_problem_that_asks_for_determinism_gets_such_variants_only() -> None:
    space = space_with_choice()
    fast, steady = (space.bind(problem(deterministic=asked), DEVICE) for asked in (False, True))
    assert {variant.as_dict()["threads"] for variant in steady.feasible()} == {64}
    assert set(steady.feasible()) < set(fast.feasible())
    refused = fast.feasible()[0] if fast.feasible()[0].as_dict()["threads"] != 64 else fast.feasible()[-1]
    assert steady.violations(refused)["deterministic"] > 0 and "same bits" in steady.explain(refused)[0]


def test_a_family_without_the_rule_is_deterministic_throughout() -> None:
    space = load_space("simt_backward")
    bound = space.bind(problem(deterministic=True), DEVICE)
    assert all(space.deterministic(bound.problem.klass(), variant) for variant in bound.feasible())
    assert len(bound.feasible()) == len(space.bind(problem(), DEVICE).feasible())


@pytest.mark.parametrize("rule", ['deterministic: "threads"\n', 'deterministic: "problem.seqlen_q <= 5"\n', "deterministic: 1\n"])
def test_a_rule_that_is_no_relation_over_the_class_is_refused(rule: str) -> None:
    with pytest.raises(InvalidSpace, match="deterministic"):
        space_with_choice(rule)


@pytest.mark.parametrize("space", load_spaces(Op.BACKWARD), ids=lambda space: space.family)
def test_the_fallback_of_every_backward_family_serves_deterministic_problems(space: Space) -> None:
    bound = space.bind(problem(deterministic=True), DEVICE)
    assert space.deterministic(bound.problem.klass(), bound.fallback())


# Which family ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", ["a100", "rtx4090", "l40s", "h100", "h200"])
def test_tensor_cores_serve_untuned_gradients_in_16_bits(device: str, deterministic: bool) -> None:
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        for head_dim in (8, 64, 128, 256):
            asked = problem(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, deterministic=deterministic)
            first = ["hopper_backward"] if preset(device).sm == 90 else []
            assert [variant.family for _, variant in fallbacks(asked, preset(device))] == [*first, "ampere_backward", "simt_backward"]


@pytest.mark.parametrize(("device", "dtype"), [("t4", DType.FLOAT16), ("h200", DType.FLOAT32), ("a100", DType.FLOAT32)])
def test_multiply_adds_serve_what_tensor_cores_do_not(device: str, dtype: DType) -> None:
    assert [variant.family for _, variant in fallbacks(problem(dtype=dtype), preset(device))] == ["simt_backward"]


@pytest.mark.parametrize("device", ["a100", "h200"])
def test_a_search_offers_tensor_cores_and_predicts_them_to_be_faster(device: str) -> None:
    from flashgen.search import bind_families

    asked = problem(head_dim=128, head_dim_v=128, seqlen_q=4096, seqlen_kv=4096)
    bounds = {bound.space.family: bound for bound in bind_families(asked, preset(device))}
    fastest = {family: min(cost.roofline_us(bound, each) for each in bound.seeds()) for family, bound in bounds.items()}
    expected = ["hopper_backward", "ampere_backward", "simt_backward"]
    assert sorted(fastest, key=lambda family: fastest[family]) == expected[device != "h200" :]
    assert fastest["ampere_backward"] < fastest["simt_backward"] / 5


# Tables ---------------------------------------------------------------------------------------------------------------


def backward_entry(family: str = "simt_backward", **changes: Any) -> TableEntry:
    of = problem(**changes)
    bound = load_space(family).bind(of, DEVICE)
    variant = bound.seeds()[0]
    made = entry(of)
    return replace(
        made, variant=variant, source_digest=render(bound.space, of.klass(), variant).digest, runner_up=None,
        certificate=replace(made.certificate, suite="attention-backward/1", deterministic=True),
    )  # fmt: skip


def test_an_entry_states_the_determinism_of_its_certificate_and_comes_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    for asked in (False, True):
        table.merge(path, DEVICE, backward_entry(deterministic=asked))
    found = table.read(path, strict=True)
    assert {each.problem.deterministic for each in found.entries} == {False, True}
    assert all(each.certificate.deterministic is True and each.problem.op is Op.BACKWARD for each in found.entries)


def test_a_forward_entry_is_written_as_before_the_field_existed() -> None:
    assert "deterministic" not in table_schema.to_raw(entry())["certificate"]


def test_forward_backward_and_deterministic_entries_serve_their_own_problems_only(tmp_path: Path, home: Path) -> None:
    table.merge(tmp_path / "table.yaml", DEVICE, backward_entry())
    dispatcher = Dispatcher(FakeBackend(DEVICE, cubin="sha256:" + "9b" * 32), [tmp_path])
    assert dispatcher.serve(problem()).answer.origin is Origin.TABLE
    with pytest.warns(UserWarning, match="certified fallback"):
        assert dispatcher.serve(problem(deterministic=True)).answer.origin is Origin.FALLBACK
    with pytest.warns(UserWarning, match="certified fallback"):
        assert dispatcher.serve(problem(op=Op.FORWARD)).answer.origin is Origin.FALLBACK


def test_an_inexact_backward_entry_cannot_enter_a_table() -> None:
    from flashgen.model import Verdict

    made = backward_entry()
    with pytest.raises(InvalidTable, match="Only exact variants"):
        table_schema.to_raw(replace(made, certificate=replace(made.certificate, verdict=Verdict.INEXACT)))


def test_the_command_that_tunes_a_problem_names_operation_and_determinism() -> None:
    assert "--op backward" in tune_command(problem()) and "--deterministic" not in tune_command(problem())
    assert tune_command(problem(deterministic=True)).endswith("--op backward --deterministic")
    assert "--op" not in tune_command(problem(op=Op.FORWARD))


# Shipping -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["ampere_backward", "simt_backward"])
def test_a_log_of_gradients_is_covered_by_backward_entries_and_the_rest_told_how_to_tune(tmp_path: Path, family: str) -> None:
    table.merge(tmp_path / "table.yaml", DEVICE, backward_entry(family))
    tuned, steady, forward = problem(), problem(deterministic=True), problem(op=Op.FORWARD)
    (tmp_path / "log.jsonl").write_text("".join(f"{traffic.line_of(each)}\n" for each in (tuned, steady, forward)))
    found = traffic.coverage(dict(traffic.read(tmp_path / "log.jsonl")), DEVICE, [table.read(tmp_path / "table.yaml", strict=True)])
    assert {each.problem: each.cover for each in found} == {
        tuned: traffic.Cover.EXACT, steady: traffic.Cover.FALLBACK, forward: traffic.Cover.FALLBACK,
    }  # fmt: skip
    commands = traffic.tune_commands(found, "h200")
    assert sorted(("--op backward" in each, "--deterministic" in each) for each in commands) == [(False, False), (True, True)]


@pytest.mark.parametrize("family", ["ampere_backward", "simt_backward"])
def test_a_bundle_refuses_backward_kernels_by_name(family: str) -> None:
    space = load_space(family)
    source = render(space, problem().klass(), space.bind(problem(), DEVICE).fallback())
    with pytest.raises(UnsupportedProblem, match=f"{family}.* is launched with BackwardParams; a bundle holds"):
        bundle._kernel(space, source, None, "")  # type: ignore[arg-type]


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", load_spaces(Op.BACKWARD), ids=lambda space: space.family)
@pytest.mark.parametrize("at", [LONG, replace(LONG, head_dim=64, head_dim_v=64, heads_q=32, heads_kv=4)], ids=str)
def test_a_call_takes_no_more_than_dq_in_float32_and_two_numbers_per_row(space: Space, at: Problem) -> None:
    bound = space.bind(at, DEVICE)
    rows = at.batch_heads * at.seqlen_q
    allowed = rows * 4 * at.head_dim + rows * 2 * 4
    padding = at.batch_heads * 256 * (4 * at.head_dim + 8)  # rows to the end of a tile, and a tile that is read ahead
    assert all(bound.workspace_bytes(variant) <= allowed + padding for variant in bound.feasible())


# What is launched -----------------------------------------------------------------------------------------------------


def operands_at(address: int = 4096) -> dict[str, Operand]:
    strides = (4 * 256 * 64, 256 * 64, 64)
    names = ("q", "k", "v", "o", "lse", "dout", "dlse", "dq", "dk", "dv")
    return {name: Operand(address * (number + 1), strides) for number, name in enumerate(names)}


def test_parameters_carry_every_operand_and_a_missing_gradient_of_lse_is_null() -> None:
    at = operands_at()
    params = backward_params(problem(), 0.5, at, 7)
    assert params.forward.q == at["q"].address and params.forward.workspace == 7 and params.scale == 0.5
    assert (params.dout, params.dlse, params.dq, params.dk, params.dv) == tuple(
        at[name].address for name in ("dout", "dlse", "dq", "dk", "dv")
    )
    del at["dlse"]
    assert backward_params(problem(), 0.5, at, 7).dlse is None


@pytest.mark.parametrize("name", ["q", "dout", "dq", "dk", "dv"])
def test_one_operand_with_unaligned_rows_turns_off_wide_accesses(name: str) -> None:
    at = operands_at()
    assert backward_params(problem(), 0.5, at, 0).forward.vector_access == 1
    at[name] = replace(at[name], address=at[name].address + 2)
    assert backward_params(problem(), 0.5, at, 0).forward.vector_access == 0


def test_a_second_map_describes_the_same_tensor_in_another_box() -> None:
    plain = backward_params(problem(), 0.5, operands_at(), 0)
    first, second = map_of("dout", 48, plain, problem()), map_of("query_dout", 64, plain, problem())
    assert first.address == second.address == plain.dout and (first.box[1], second.box[1]) == (48, 64)
    assert {name for name, _ in MappedBackwardStruct._fields_} >= {"q", "query_q", "problem", "counters"}  # type: ignore[misc]


def test_gradients_count_five_products_however_a_kernel_computes_them() -> None:
    full = problem(mask=Mask())
    assert cost.flops(full) == 10 * 2 * 4 * 256 * 256 * 64
    assert cost.flops(replace(full, head_dim_v=32)) == 2 * (3 * 64 + 2 * 32) * 2 * 4 * 256 * 256


def test_a_kernel_that_computes_scores_twice_is_predicted_to_take_longer() -> None:
    bound = load_space("simt_backward").bind(problem(), DEVICE)
    forward = load_space("simt_forward").bind(problem(op=Op.FORWARD), DEVICE)
    assert cost.roofline_us(bound, bound.fallback()) > cost.roofline_us(forward, forward.fallback())


# Measuring ------------------------------------------------------------------------------------------------------------


def test_operands_of_a_backward_measurement_are_random_inputs_and_empty_gradients() -> None:
    gpu, asked = SimulatedGpu(), problem()
    made = bench.make_operands(gpu, asked, 1)  # type: ignore[arg-type]
    dout = reference.decode(gpu.elements(made.buffers["dout"], asked.dtype), asked.dtype)
    assert abs(dout.std() - 1.0) < 0.02
    for name in ("o", "dq", "dk", "dv"):
        assert np.isnan(reference.decode(gpu.elements(made.buffers[name], asked.dtype), asked.dtype)).all()
    workspace = gpu.allocate(16)
    params = made.params(workspace)
    assert params.dq == made.buffers["dq"].address and params.dlse is None  # type: ignore[union-attr]
    assert made.params(workspace, replace(asked, op=Op.FORWARD)).lse == made.buffers["lse"].address  # type: ignore[union-attr]
    assert made.for_peers(gpu).dout is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sdpa-flash", "flash_attn"])
def test_a_peer_computes_the_gradients_of_the_operands_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    asked = Problem(DType.FLOAT32, 16, 16, 2, 3, 3, 5, 5, Mask.causal(), Op.BACKWARD)
    generator = torch.Generator().manual_seed(0)
    given = {each: torch.randn(2, 5, 3, 16, generator=generator) for each in ("q", "k", "v", "dout")}
    arrays = {each: DeviceArray(number, (2, 5, 3, 16), DType.FLOAT32) for number, each in enumerate(given)}
    monkeypatch.setattr(peers, "as_torch", lambda torch, array, device: given[list(given)[array.address]])

    def rows_first(q: Any, k: Any, v: Any, **options: Any) -> Any:
        o = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=options["causal"])
        return o.transpose(1, 2), "lse"

    def maker(torch: Any, operands: PeerOperands) -> Any:
        if name == "sdpa-flash":
            return peers.PEERS[name](torch, operands)
        return peers._flash_call(torch, rows_first, operands, None)

    run = peers._backward(torch, maker, PeerOperands(asked, 0, arrays["q"], arrays["k"], arrays["v"], arrays["dout"]))
    leaves = [given[each].clone().requires_grad_() for each in ("q", "k", "v")]
    o, _ = rows_first(*leaves, causal=True)
    for _ in range(2):  # as often as asked
        for left, right in zip(run(), torch.autograd.grad(o, leaves, given["dout"], retain_graph=True), strict=True):
            assert torch.allclose(left, right, atol=1e-6)


# Command line ---------------------------------------------------------------------------------------------------------


def test_exploring_refuses_backward_problems_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    from flashgen.cli import run

    assert run(["explore", "--op", "backward", "--head-dim", "64", "--gpu", "h200"]) == 2
    assert "--op backward" in capsys.readouterr().err


def test_the_variant_that_a_failure_names_can_be_run_again() -> None:
    from flashgen import gradient_gate, gradient_suite
    from flashgen.emulate import EmulatedExecutor
    from flashgen.suite import Tiles

    of = problem(deterministic=True)
    source = render(load_space("simt_backward"), of.klass(), Variant.of("simt_backward", {"block_q": 8, "block_kv": 8, "threads": 64}))
    case = gradient_suite.full_suite(of.klass(), Tiles(8, 8))[0]
    told = gradient_gate.repeat_command(EmulatedExecutor(DEVICE), source, case, 3)
    assert told.endswith("--case group --seed 3 --op backward --deterministic")


@pytest.mark.compiled
@pytest.mark.emulated
@pytest.mark.slow
def test_a_search_without_a_gpu_writes_a_certified_backward_entry(tmp_path: Path, home: Path) -> None:
    from flashgen import search
    from flashgen.model import ExecutorName

    of, path = problem(head_dim=8, head_dim_v=8, seqlen_q=64, seqlen_kv=64, deterministic=True), tmp_path / "table.yaml"
    found = search.tune(of, DEVICE, budget=1, executor=ExecutorName.EMULATED, table=path)
    (written,) = table.read(path, strict=True).entries
    assert found.entry is not None and (written.problem, written.variant) == (of, found.entry.variant)
    assert found.entry.certificate.suite == "attention-backward/1" and found.entry.certificate.deterministic is True
