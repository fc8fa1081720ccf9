"""What is left of a certificate when text, compiler, driver, device or suite change: docs/tables.md as tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from shipping import H200, NVRTC, compiled, entry, gradients, invented_cubin, problem, source_of, stale, table_of, variant

from flashgen import device, staleness, standard, table
from flashgen.compiler import compile_source
from flashgen.cubins import Compiled, CubinStore
from flashgen.errors import CompileError, MissingDependency
from flashgen.model import ExecutorName, Source, TableEntry
from flashgen.staleness import Note, State, Tools
from flashgen.table_schema import device_record

HERE = Tools(NVRTC, "580.65")
OWNER = device_record(H200)


def same_code(source: Source, arch: str) -> Compiled:
    return compiled(source, arch)


def other_code(source: Source, arch: str) -> Compiled:
    return compiled(source, arch, invented_cubin(source) + b"other")


def unasked(source: Source, arch: str) -> Compiled:
    raise AssertionError("nothing is in doubt, so nothing may be compiled")


def state(of: TableEntry, tools: Tools = HERE, compile_: staleness.Compile | None = unasked, limits: object = H200) -> staleness.Assessment:
    return staleness.assess(of, OWNER, limits, tools, compile_)  # type: ignore[arg-type]


def test_an_entry_of_today_is_valid_without_compiling() -> None:
    found = state(entry())
    assert (found.state, found.reason, found.notes) == (State.VALID, "", ())


def test_a_changed_text_with_the_same_machine_code_carries_its_certificate_over() -> None:
    found = state(stale(entry()), compile_=same_code)
    assert found.state is State.CARRIED and found.state.serves
    assert "the text has changed, 000000000000" in found.reason


def test_a_changed_text_with_other_machine_code_is_stale() -> None:
    found = state(stale(entry()), compile_=other_code)
    assert found.state is State.STALE and found.state.fails and not found.state.serves


def test_a_changed_text_without_a_compiler_is_stale() -> None:
    assert state(stale(entry()), compile_=None).state is State.STALE


def test_a_new_compiler_that_makes_the_same_machine_code_carries_over() -> None:
    found = state(entry(), Tools("13.5"), same_code)
    assert found.state is State.CARRIED and found.reason == "NVRTC 13.5, the entry's is 13.0"


def test_a_new_compiler_that_makes_other_machine_code_asks_for_a_new_proof() -> None:
    assert state(entry(), Tools("13.5"), other_code).state is State.REPROVE


def test_a_new_compiler_that_refuses_the_text_makes_the_entry_stale() -> None:
    def refuses(source: Source, arch: str) -> Compiled:
        raise CompileError("NVRTC refused it (NVRTC_ERROR_COMPILATION)")

    found = state(entry(), Tools("13.5"), refuses)
    assert found.state is State.STALE and "no longer compiles" in found.reason


def test_where_there_is_no_compiler_a_same_text_is_unchecked() -> None:
    def absent(source: Source, arch: str) -> Compiled:
        raise MissingDependency("no NVRTC")

    assert state(replace(entry(), options=("--std=c++20",)), compile_=absent).state is State.UNCHECKED
    assert state(replace(entry(), options=("--std=c++20",)), compile_=None).state is State.UNCHECKED


def test_other_options_put_the_certificate_in_doubt() -> None:
    assert state(replace(entry(), options=("--std=c++20",)), compile_=other_code).state is State.REPROVE


def test_a_new_driver_is_noted_and_served() -> None:
    found = state(entry(), Tools(NVRTC, "600.10"))
    assert found.state is State.VALID
    assert found.notes == ((Note.DRIVER, "driver 600.10, the entry's is 580.65"),)


def test_an_older_suite_is_noted_and_served() -> None:
    of = entry()
    found = state(replace(of, certificate=replace(of.certificate, suite_digest="1" * 64)))
    assert found.state is State.VALID and [note for note, _ in found.notes] == [Note.SUITE]


def test_another_device_with_enough_resources_is_marked_foreign() -> None:
    found = state(entry(), limits=device.preset("h100"))
    assert found.state is State.VALID and [note for note, _ in found.notes] == [Note.FOREIGN]


def test_another_device_with_too_little_shared_memory_refuses_with_both_sides() -> None:
    big = problem(head_dim=128)
    chosen = variant(big, block_q=128, block_kv=128, num_warps=4, num_stages=2)
    found = state(entry(big, chosen=chosen), limits=device.preset("l40s"))
    assert found.state is State.REFUSED and "fits_shared: shared_bytes <= device.shared_bytes_per_cta fails" in found.reason


def test_a_variant_that_left_its_space_is_refused_with_the_parameter() -> None:
    of = entry()
    found = state(replace(of, variant=replace(of.variant, params=(("block_q", 48), *of.variant.params[1:]))))
    assert found.state is State.REFUSED and "block_q" in found.reason


def test_an_entry_of_which_another_variant_runs_is_noted_and_is_not_current() -> None:
    """Its certificate and its time speak of a kernel that nobody gets; what runs is certified when it is first used."""
    plain, odd = gradients(), gradients(clear_ahead=32)
    assert not state(plain).altered and standard.is_current(plain, H200, HERE, ExecutorName.DEVICE)
    found = state(odd)
    assert found.state is State.VALID and found.altered
    assert found.notes == ((Note.ALTERED, "another variant runs: clear_ahead 32 → 0"),)
    assert not standard.is_current(odd, H200, HERE, ExecutorName.DEVICE)


def test_an_emulated_certificate_speaks_of_the_text_whatever_the_compiler() -> None:
    of = entry(kind="predicted")
    assert of.certificate.executor is ExecutorName.EMULATED
    assert state(of, Tools("13.5"), other_code).state is State.VALID
    assert state(stale(of), Tools("13.5"), other_code).state is State.STALE


def test_carrying_over_needs_no_gpu_and_touches_pins_alone(tmp_path: Path) -> None:
    old, fresh = stale(entry(problem(512))), entry()
    found = table_of(tmp_path / "h200.yaml", old, fresh)
    assessed = staleness.assess_table(found, H200, HERE, same_code)
    carried = staleness.carry(found.entries, assessed, NVRTC)
    assert carried == (replace(old, source_digest=source_of(old.problem, old.variant).digest), fresh)
    table.update(found.path, found.device, lambda _: carried)
    again = staleness.assess_table(table.read(found.path, strict=True), H200, HERE, unasked)
    assert {each.state for each in again} == {State.VALID}


@pytest.mark.compiled
def test_the_machine_code_of_a_text_with_other_comments_is_the_same(tmp_path: Path) -> None:
    store = CubinStore(tmp_path)
    of = problem(head_dim=16)
    source = source_of(of, variant(of))
    text = "// another first line\n" + source.text.replace("#line 1 ", "// moved\n#line 1 ")
    built = [compile_source(each, "sm_90", store).report.cubin_digest for each in (source, replace(source, text=text))]
    assert built[0] == built[1]


def test_what_is_in_doubt_is_compiled_together_each_text_once(tmp_path: Path) -> None:
    asked, tools = [], Tools("13.9")

    def some_code(source: Source, arch: str) -> Compiled:
        asked.append(source.digest)
        if source.klass.head_dim == 96:
            raise CompileError("no registers left")
        return (same_code if source.klass.head_dim == 64 else other_code)(source, arch)

    shapes = [problem(seqlen, head_dim) for seqlen in (512, 1024) for head_dim in (64, 96, 128)]
    found = table_of(tmp_path / "a.yaml", *map(entry, shapes))
    assessed = staleness.assess_table(found, H200, tools, some_code)
    assert len(asked) == len(set(asked)) == 3
    states = {64: State.CARRIED, 96: State.STALE, 128: State.REPROVE}
    assert [each.state for each in assessed] == [states[each.entry.problem.head_dim] for each in assessed]
    assert assessed == tuple(staleness.assess(each, OWNER, H200, tools, some_code) for each in found.entries)
