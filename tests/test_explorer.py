"""The explorer: the same answers as the search space and the cost model, honest limits, refusals in words."""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

import flashgen
from flashgen import accounting, cli, compiler, cost, device, explorer, limits, measured, shapes, tile_grid
from flashgen.errors import EmptySpace, InvalidProblem, MissingDependency, StudyMismatch, UnknownDevice, UnsupportedProblem
from flashgen.explorer import Exploration
from flashgen.model import DType, Mask, MaskKind, Problem, Variant
from flashgen.space import load_space

H200 = device.preset("h200")
STUDY = Path(__file__).parent / "recorded" / "h200-bfloat16-d128-causal-s2048"


def problem(head_dim: int = 128, seqlen: int = 4096, mask: Mask | None = None, **changes: int) -> Problem:
    return replace(Problem(DType.BFLOAT16, head_dim, head_dim, 4, 16, 16, seqlen, seqlen, mask or Mask()), **changes)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Exploration:
    return explorer.explore(
        problem(), H200, families=["ampere_forward"], capacities=[48 * 1024, 99 * 1024], lengths=[512, 4096], compare=False
    )


# ---- the picture and the search cannot disagree


def test_a_tile_fits_exactly_when_the_space_has_a_feasible_variant_of_it(found: Exploration) -> None:
    for capacity in found.capacities:
        at = load_space("ampere_forward").bind(found.problem, shapes.with_capacity(H200, capacity))
        tiles = {shapes.cell_of(at, variant) for variant in at.feasible()}
        cells = [cell for cell in found.cells if cell.capacity_bytes == capacity]
        assert {(cell.block_q, cell.block_kv, cell.num_stages) for cell in cells if cell.feasible} == tiles


def test_a_cell_shows_the_fastest_feasible_variant_of_its_tile_by_the_cost_model(found: Exploration) -> None:
    at = load_space("ampere_forward").bind(found.problem, H200)
    fastest: dict[tuple[int, int, int], float] = {}
    for variant in at.feasible():
        tile = shapes.cell_of(at, variant)
        fastest[tile] = min(fastest.get(tile, float("inf")), cost.roofline_us(at, variant))
    cells = {
        (cell.block_q, cell.block_kv, cell.num_stages): cell.predicted_us
        for cell in found.cells
        if cell.capacity_bytes == H200.shared_bytes_per_cta and cell.feasible
    }
    assert cells == pytest.approx(fastest)


def test_an_infeasible_cell_names_its_constraint_with_both_sides(found: Exploration) -> None:
    missing = [cell for cell in found.cells if not cell.feasible]
    assert missing
    for cell in missing:
        assert cell.predicted_us is None and cell.limit == "capacity" and cell.violation > 0
        assert all(" fails, " in reason and " > " in reason for reason in cell.reasons)


def test_parts_of_shared_memory_are_those_of_the_launcher(found: Exploration) -> None:
    at = load_space("ampere_forward").bind(found.problem, H200)
    for cell in found.cells:
        names = at.names(cell.variant)
        assert cell.shared_bytes == max(entry.shared_bytes for entry in at.space.entry_points(found.problem.klass(), cell.variant))
        assert dict(cell.shared_parts) == {name: names[name] for name in ("q_tile_bytes", "k_ring_bytes", "v_ring_bytes")}
        if not names["q_in_registers"]:
            assert sum(size for _, size in cell.shared_parts) == cell.shared_bytes


def test_more_shared_memory_never_loses_a_tile(found: Exploration) -> None:
    fits = [
        {(c.block_q, c.block_kv, c.num_stages) for c in found.cells if c.feasible and c.capacity_bytes == each} for each in found.capacities
    ]
    assert fits[0] < fits[1] <= fits[2]


def test_the_least_capacity_of_a_shape_is_where_it_begins_to_fit(found: Exploration) -> None:
    family = found.families[0]
    for shape in family.shapes.all[::40]:
        least = family.least_capacity(shape, 4096)
        if least is not None:
            assert not any(family.at(4096, least).violations(shape.first).values())
            assert any(family.at(4096, least - 1024).violations(shape.first).values())


def test_twins_differ_in_parameters_that_change_no_resource() -> None:
    family = tile_grid.Family(load_space("ampere_forward").bind(problem(), H200), {})
    assert set(family.bound.space.definition.constants) >= {"rescale_threshold", "tile_order"}
    assert {"rescale_threshold", "tile_order"}.isdisjoint(family.shapes.read)
    assert all(len(shape.twins) == 4 for shape in family.shapes.all)


# ---- what binds


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (problem(64, 8192, seqlen_q=1, batch=64), "hbm"),
        (problem(seqlen=64), "launch"),
        (problem(batch=1, heads_q=2, heads_kv=2), "idle"),
    ],
    ids=["decode", "short", "few heads"],
)
def test_the_binding_limit_of_problems_that_tiling_does_not_help(asked: Problem, key: str) -> None:
    at = load_space("ampere_forward").bind(asked, H200)
    best = min(at.feasible(), key=lambda variant: (cost.roofline_us(at, variant), str(variant)))
    found = limits.explain(at, best)
    assert found.key == key
    assert found.name and found.evidence and found.remedy


def test_every_limit_has_a_name_and_a_remedy() -> None:
    at = load_space("ampere_forward").bind(problem(), H200)
    assert all(limits._remedy(key, at, at.fallback()) for key in limits.NAMES)


# ---- measured times


def test_a_recorded_study_brings_its_times_and_registers() -> None:
    asked = problem(seqlen=2048, mask=Mask.causal(), batch=8)
    found = explorer.explore(asked, H200, families=["ampere_forward"], lengths=[2048], measured_from=[STUDY], compare=False)
    here = [cell for cell in found.cells if cell.capacity_bytes == H200.shared_bytes_per_cta and cell.measured_us]
    assert len(found.measured) > 200 and len(here) > 20
    assert any(cell.registers_from == "compiler" for cell in here)
    times = {each.variant: each.median_us for each in found.measured}
    assert all(cell.measured_us in times.values() for cell in here)


def test_a_study_of_another_space_is_refused_with_both_digests(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(STUDY, folder)
    space = folder / "ampere_forward.yaml"
    space.chmod(0o644)
    space.write_text(space.read_text().replace("choices: [32, 64, 128, 256]", "choices: [64, 128]").replace("block_q: 32", "block_q: 64"))
    with pytest.raises(StudyMismatch, match=r"another search space of ampere_forward: its digest is sha256:.* that of .* is sha256:"):
        measured.read([folder], H200)


def test_a_study_of_another_device_is_refused() -> None:
    with pytest.raises(StudyMismatch, match=r"recorded on NVIDIA H200; the exploration is of NVIDIA A100"):
        measured.read([STUDY], device.preset("a100"))


def test_times_of_other_problems_are_refused_by_name() -> None:
    with pytest.raises(StudyMismatch, match=r"No measured time belongs to .* d64 .*; they are of .* d128 "):
        explorer.explore(problem(64), H200, measured_from=[STUDY], compare=False)


# ---- refusals


def test_a_capacity_below_the_smallest_variant_says_which_and_why() -> None:
    with pytest.raises(EmptySpace, match=r"With 2 KiB .*\n  ampere_forward\[.*\] needs [\d,]+ bytes; fits_shared: .* fails"):
        explorer.explore(problem(), H200, families=["ampere_forward"], capacities=[2048], compare=False)


@pytest.mark.parametrize(("capacity", "length"), [(0, 64), (2**40, 64), (49152, 0)])
def test_impossible_grids_are_refused(capacity: int, length: int) -> None:
    with pytest.raises(InvalidProblem):
        explorer.explore(problem(), H200, capacities=[capacity], lengths=[length], compare=False)


def test_head_dims_and_devices_that_nobody_serves_are_refused() -> None:
    with pytest.raises(UnsupportedProblem):
        explorer.explore(problem(512), H200, compare=False)
    with pytest.raises(UnknownDevice):
        flashgen.explore(problem(), "h900")


def test_a_named_gpu_can_be_explored_without_cupy(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def absent() -> str:
        raise MissingDependency("CuPy cannot be imported")

    monkeypatch.setattr(compiler, "nvrtc_version", absent)
    options = {"families": ["simt_forward"], "lengths": [512], "compare": False}
    found = explorer.explore(problem(64, 512), device.preset("rtx4090"), **options)
    assert found.best() is not None and not found.reports
    with pytest.raises(MissingDependency):
        explorer.explore(problem(64, 512), device.preset("rtx4090"), compile_best=1, **options)


# ---- results


def test_rows_are_flat_and_become_a_frame(found: Exploration, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = found.rows()
    assert len(rows) == len(found.cells)
    assert all(isinstance(value, (str, int, float, bool, type(None))) for row in rows for value in row.values())
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    assert found.frame() == rows
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependency, match="pandas"):
        found.frame()


def test_the_best_cell_is_the_fastest_that_fits(found: Exploration) -> None:
    best = found.best()
    assert best is not None and best.predicted_us == found.here().prediction.us
    assert found.here().variant == best.variant


def test_the_python_api_takes_a_gpu_by_name(found: Exploration) -> None:
    same = flashgen.explore(
        problem(), "h200", families=["ampere_forward"], capacities=[49152, 99 * 1024], lengths=[512, 4096], compare=False
    )
    assert same.cells == found.cells


def test_the_command_prints_the_frontier_and_json(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    arguments = ["explore", "--head-dim", "64", "--gpu", "a100", "--family", "simt_forward", "--sram", "48K,163K", "--seqlen", "256,512"]
    assert cli.run([*arguments, "--no-compare"]) == 0
    printed = capsys.readouterr().out
    assert "by shared memory per CTA" in printed and "48.0 KiB" in printed and "163.0 KiB" in printed and "predicted" in printed
    assert cli.run([*arguments, "--no-compare", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "flashgen.explore/1" and len(record["lengths"]) == 2
    assert {cell["capacity_bytes"] for cell in record["cells"]} == {49152, 163 * 1024}


def test_the_command_refuses_what_is_no_size(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert cli.run(["explore", "--head-dim", "64", "--sram", "lots"]) == 2
    assert "48K" in capsys.readouterr().err
    assert cli.run(["explore", "--head-dim", "64", "--out", str(home / "nowhere" / "report.html")]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.compiled
@pytest.mark.slow
def test_shared_memory_is_the_compiled_kernels_static_plus_dynamic_and_stored_kernels_show_their_registers(home: Path) -> None:
    asked = problem(64, 512)
    found = explorer.explore(asked, H200, lengths=[512], compile_best=24, compare=False)
    assert len(found.reports) >= 24
    for family in found.families:
        for shape in family.shapes.all:
            report = family.report(shape)
            if report is not None:
                dynamic = max(entry.shared_bytes for entry in family.bound.space.entry_points(asked.klass(), shape.first))
                assert family.taken(shape).shared_bytes == report.static_shared_bytes + dynamic
                assert family.taken(shape).est_registers == report.registers
    again = explorer.explore(asked, H200, lengths=[512], compare=False)
    assert again.cells == found.cells
    assert any(cell.registers_from == "compiler" for cell in again.cells)


def test_masks_reach_the_accounting() -> None:
    found = explorer.explore(problem(64, 2048, Mask.causal()), H200, families=["simt_forward"], lengths=[2048], compare=False).here()
    full = replace(found.problem, mask=Mask())
    at, standard = (load_space(family).bind(full, H200) for family in ("simt_forward", "standard_forward"))
    assert found.problem.mask.kind is MaskKind.CAUSAL
    assert found.tiled.read_bytes < accounting.account(at, found.variant).read_bytes
    # The textbook kernels skip nothing.
    assert found.standard.total_bytes == accounting.account(standard, standard.fallback()).total_bytes


def test_variants_print_in_rows(found: Exploration) -> None:
    assert all(isinstance(cell.variant, Variant) for cell in found.cells)
    assert found.rows()[0]["variant"].startswith("ampere_forward[")
