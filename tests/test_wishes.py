"""Standard lists of problems: what they hold, what they are expected to take, and how they are divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen import evaluators, standard, table, wishes
from flashgen.errors import InvalidProblem
from flashgen.model import DType, Mask, Op


@pytest.mark.parametrize("op", list(Op))
def test_the_full_list_holds_each_head_dim_mask_and_length_and_searches_some_lengths(op: Op) -> None:
    asked_for = [each for each in wishes.full() if each.problem.op is op]
    searched, filled = ([each.problem for each in asked_for if each.searched is kind] for kind in (True, False))
    plain = [each.problem for each in asked_for if each.problem.dtype is DType.BFLOAT16 and each.problem.gqa_group == 1]
    assert {(each.head_dim, each.head_dim_v, each.mask, each.seqlen_q) for each in plain} == {
        (*dims, mask, length) for dims in wishes.DIMS for mask in wishes.MASKS for length in wishes.LENGTHS
    }
    lengths = len(wishes.SEARCHED[op]) + len(wishes.SEARCHED_GROUPS[op])
    assert len(searched) == 7 * 2 * lengths and {each.dtype for each in searched} == {DType.BFLOAT16}
    assert {each.gqa_group for each in searched} == ({1} if op is Op.FORWARD else {1, 8})
    assert {each.gqa_group for each in filled} == {1, 4, 8}
    assert {each.dtype for each in filled} == {DType.BFLOAT16, DType.FLOAT16}
    assert {each.batch_heads * each.seqlen_q * each.head_dim >= 4 * wishes.TOKENS * wishes.HIDDEN for each in filled} == {True, False}


def test_no_entry_of_the_full_list_is_made_twice() -> None:
    keys = [table.full_key(each.problem) for each in wishes.full()]
    assert len(set(keys)) == len(keys)


def test_every_length_of_the_range_is_near_every_kind_of_entry() -> None:
    kinds: dict[object, set[int]] = {}
    for each in (wish.problem for wish in wishes.full()):
        if each.batch == max(1, wishes.TOKENS // each.seqlen_q):
            kinds.setdefault((each.klass(), each.gqa_group), set()).add(each.seqlen_q)
    assert len(kinds) == 2 * 7 * 2 * 4, "operation, head dims, mask; bf16, fp16, groups of 4 and 8"
    for lengths in kinds.values():
        assert all(min(max(one, other) / min(one, other) for other in lengths) <= 2 for one in wishes.LENGTHS)


def test_what_fills_a_problem_comes_before_it() -> None:
    searched = set[object]()
    for each in wishes.full():
        relatives = replace(each.problem.klass(), dtype=DType.BFLOAT16)
        assert each.searched or relatives in searched, each.problem
        searched.add(relatives)


def test_the_full_list_fits_25_minutes_of_one_gpu_by_the_expected_times() -> None:
    assert sum(map(wishes.seconds, wishes.full())) <= 25 * 60


def test_longer_problems_are_expected_to_take_longer_and_get_fewer_rounds() -> None:
    short, long = (wishes.shaped(128, 128, length, Mask(), op=Op.BACKWARD) for length in (512, 32_768))
    for searched in (True, False):
        assert wishes.seconds(wishes.Wish(short, searched)) < wishes.seconds(wishes.Wish(long, searched))
    assert (wishes.rounds(short, 9), wishes.rounds(long, 9)) == (30, 8)


def test_gradients_with_the_same_bits_are_a_list_of_their_own() -> None:
    asked_for = wishes.gradients(wishes.full())
    assert asked_for and all(each.problem.deterministic and each.problem.op is Op.BACKWARD for each in asked_for)
    assert not wishes.gradients(wishes.small())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_the_parts_of_a_list_make_up_the_whole_and_keep_neighbours_together(count: int) -> None:
    asked_for = wishes.full()
    parts = [wishes.part_of(asked_for, f"{number + 1}/{count}") for number in range(count)]
    assert sorted(map(str, (each for part in parts for each in part))) == sorted(map(str, asked_for))
    for part in parts:
        assert part == [each for each in asked_for if each in set(part)], "in the list's order"
    groups = [{(each.problem.op, each.problem.head_dim, each.problem.head_dim_v, each.problem.mask) for each in part} for part in parts]
    assert sum(map(len, groups)) == len(set().union(*groups)), "no head dim and mask in two parts"


@pytest.mark.parametrize("count", [2, 4])
def test_parts_take_equally_long(count: int) -> None:
    asked_for = wishes.full()
    takes = [sum(map(wishes.seconds, wishes.part_of(asked_for, f"{number + 1}/{count}"))) for number in range(count)]
    assert max(takes) <= 1.1 * min(takes)


@pytest.mark.parametrize("part", ["0/4", "5/4", "2", "a/b", "-1/4", "1/0"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(InvalidProblem, match="2/4"):
        wishes.part_of(wishes.small(), part)


def test_the_docs_name_the_numbers_of_the_list() -> None:
    said = " ".join((Path(__file__).parents[1] / "docs" / "tables.md").read_text().split())
    forward, backward = (wishes.LATER_BUDGET[op] for op in Op)
    words = {2: "two", 5: "five", 8: "eight"}
    assert f"# {len(wishes.small())} forward problems" in said and f"# {len(wishes.full())} problems, both passes" in said
    assert f"the {words[standard.NEIGHBOURS]} best of the nearest problems are timed" in said
    assert (
        f"A search of this list has {wishes.BUDGET} trials; where it begins with what won nearby, {forward}, of gradients {backward}, "
        f"and {wishes.GROUPS_BUDGET} with query groups" in said
    )
    assert f"Its {words[standard.Remembering.finalists]} finalists, each certified quickly" in said
    assert f"the best {words[standard.Remembering.proved]} go through the whole suite" in said
    assert f"fewer rounds, {min(wishes.ROUNDS)} instead of {evaluators.INTERLEAVE_ROUNDS}" in said
