"""The guard of near matches, logs of problems, and how tables cover them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import recorded_variants
from shipping import H200, entry, gradients, problem, table_of

import flashgen
from flashgen import cli, cost, near, table, traffic
from flashgen.errors import InvalidProblem
from flashgen.model import DType, Mask, Problem, Variant
from flashgen.space import load_space, load_spaces
from flashgen.traffic import Cover

Captured = pytest.CaptureFixture[str]


def slowest(asked: Problem) -> Variant:
    bound = load_space("ampere_forward").bind(asked, H200)
    return max(bound.feasible(), key=lambda each: cost.roofline_us(bound, each))


def beside_fallback(asked: Problem, chosen: Variant) -> float:
    """Predicted time over the predicted time of the fallback that serves the problem untuned."""
    bounds = [space.bind(asked, H200) for space in load_spaces(asked.op) if space.unsupported(asked, H200) is None]
    fallback = near.fallback_of(bounds)
    assert fallback is not None
    of = {bound.space.family: bound for bound in bounds}
    return cost.roofline_us(of[chosen.family], chosen) / cost.roofline_us(of[fallback.family], fallback)


def test_a_near_match_that_is_predicted_slower_than_the_fallback_is_passed_over(tmp_path: Path) -> None:
    asked = problem(1024, head_dim=128, batch=1, heads_q=2, heads_kv=1)
    slow = slowest(asked)
    tuned = entry(replace(asked, seqlen_q=4096, seqlen_kv=4096), chosen=slow, kind="predicted")
    answer = near.look_up(asked, H200, [table_of(tmp_path / "a.yaml", tuned)])
    assert answer.found is None and any("a near match, but predicted to take" in step for step in answer.steps)


def test_what_was_measured_corrects_the_cost_model_for_near_matches(tmp_path: Path) -> None:
    """The variant of a measured entry beat the fallback, whatever the model says; it is believed where it says worse than that."""
    asked = problem(1024, head_dim=128, batch=1, heads_q=2, heads_kv=1)
    slow, served = slowest(asked), set()
    for length in (512, 700, 1500, 2048, 4096):
        tuned = replace(asked, seqlen_q=length, seqlen_kv=length)
        answer = near.look_up(asked, H200, [table_of(tmp_path / "a.yaml", entry(tuned, chosen=slow))])
        believed = beside_fallback(asked, slow) > near.DRIFT * beside_fallback(tuned, slow) > near.DRIFT
        assert (answer.found is None) == believed, answer.explain()
        served.add(answer.found is not None)
    assert served == {True, False}


def test_a_farther_entry_goes_first_where_the_model_sees_a_better_tile_for_the_very_length(tmp_path: Path) -> None:
    """Waves of CTAs: at 1192 rows fewer tiles of 192 rows are clearly better than tiles of 128, at 1024 rows they are not."""
    base = Problem(DType.FLOAT16, 192, 128, 16, 10, 10, 1024, 1024)
    space = load_space("hopper_forward")
    common = {"num_stages": 2, "query_slots": 1, "scheduler": 1, "softmax_mode": 0}
    common |= {"head_section": 1, "group_pack": 1, "rescale_threshold": 8}
    tiles = {2: {"block_kv": 128, "ping_pong": 1, "epilogue": 0}, 3: {"block_kv": 64, "ping_pong": 0, "epilogue": 1}}
    rows = {groups: space.bind(base, H200).variant({"consumer_warpgroups": groups, **tile, **common}) for groups, tile in tiles.items()}
    known = table_of(
        tmp_path / "a.yaml", entry(base, chosen=rows[2]), entry(replace(base, batch=1, seqlen_q=32_768, seqlen_kv=32_768), chosen=rows[3])
    )
    served = {}
    for length in (1000, 1192):
        asked = replace(base, batch=13, seqlen_q=length, seqlen_kv=length)
        answer = near.look_up(asked, H200, [known])
        assert answer.found is not None
        served[length] = answer.found.entry.variant
        expected = {groups: cost.roofline_us(space.bind(asked, H200), variant) for groups, variant in rows.items()}
        clearly = expected[3] <= table.CLEARLY * expected[2]
        assert served[length] == rows[3 if clearly else 2], answer.explain()
    assert served == {1000: rows[2], 1192: rows[3]}


def test_the_model_is_no_judge_of_backward_variants(tmp_path: Path) -> None:
    made = gradients()
    assert near.expectation(made.problem, H200)(made) is None
    assert near.expectation(problem(), H200)(entry()) is not None


def test_nine_in_ten_pairs_of_good_variants_that_are_predicted_clearly_apart_are_in_that_order() -> None:
    """What `table.CLEARLY` rests on: recorded times of blindly drawn variants within 30 % of the best of their problem."""
    right = pairs = 0
    for group in recorded_variants.drawn():
        if group.family == "hopper_forward":
            times, predicted = list(group.times.values()), group.predicted()
            good = [index for index, each in enumerate(times) if each <= 1.3 * min(times)]
            apart = [(one, other) for one in good for other in good if predicted[one] <= table.CLEARLY * predicted[other]]
            pairs += len(apart)
            right += sum(times[one] < times[other] for one, other in apart)
    assert pairs > 1000 and right >= 0.9 * pairs, (right, pairs)


def test_an_exact_match_is_served_whatever_the_cost_model_says(tmp_path: Path) -> None:
    asked = problem(1024, head_dim=128, batch=1, heads_q=2, heads_kv=1)
    found = table_of(tmp_path / "a.yaml", entry(asked, chosen=slowest(asked)))
    assert near.look_up(asked, H200, [found]).found is not None


def test_no_near_match_is_ever_slower_than_the_fallback_by_the_cost_model(tmp_path: Path) -> None:
    tuned = problem(2048, head_dim=64, batch=4, heads_q=8, heads_kv=8)
    space = load_space("ampere_forward")
    variants = space.bind(tuned, H200).feasible()[::40]
    for number, chosen in enumerate(variants):
        found = table_of(tmp_path / f"{number}.yaml", entry(tuned, chosen=chosen, kind="predicted"))
        for length in (512, 1000, 1500, 3000, 8192):
            asked = replace(tuned, seqlen_q=length, seqlen_kv=length)
            answer = near.look_up(asked, H200, [found])
            if answer.found is not None:
                bound = space.bind(asked, H200)
                assert cost.roofline_us(bound, chosen) <= cost.roofline_us(bound, bound.fallback())


# The log --------------------------------------------------------------------------------------------------------------


def test_a_log_survives_writing_and_reading(tmp_path: Path) -> None:
    asked = [problem(), problem(77, mask=Mask.window(12, -1)), problem(0), replace(problem(), deterministic=True)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{traffic.line_of(each, number + 1)}\n" for number, each in enumerate(asked)))
    assert dict(traffic.read(path)) == {each: number + 1 for number, each in enumerate(asked)}


def test_nothing_is_recorded_unless_asked_for_and_threads_count_together(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    traffic.note(problem())
    with flashgen.record_problems(path):
        threads = [threading.Thread(target=lambda: [traffic.note(problem()) for _ in range(200)]) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        traffic.note(problem(512))
    traffic.note(problem())
    assert dict(traffic.read(path)) == {problem(): 800, problem(512): 1}


def test_two_recordings_at_once_are_refused(tmp_path: Path) -> None:
    with traffic.record(tmp_path / "a"), pytest.raises(InvalidProblem, match="recorded already"), traffic.record(tmp_path / "b"):
        pass


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "missing required field"),
        ("not json", "malformed"),
        ('{"dtype": "bfloat16"', "truncated"),
        (traffic.line_of(problem()).replace('"head_dim":64', '"head_dim":-1'), "head_dim"),
        (traffic.line_of(problem()).replace('"heads_q":4', '"heads_q":3'), "multiple of the KV heads"),
        (traffic.line_of(problem())[:-1] + ',"surprise":1}', "surprise"),
        ("[" * 3000, "log.jsonl:2"),
        ("9" * 5000, "more than 4096 bytes"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"{traffic.line_of(problem())}\n{line}\n")
    with pytest.raises(InvalidProblem) as refused:
        traffic.read(path)
    assert "log.jsonl:2" in str(refused.value) and said in str(refused.value)


# Coverage -------------------------------------------------------------------------------------------------------------


def covers(tmp_path: Path, *asked: Problem) -> dict[Problem, Cover]:
    tuned = problem(1024)
    found = table_of(tmp_path / "a.yaml", entry(tuned, chosen=load_space("hopper_forward").bind(tuned, H200).fallback()))
    return {each.problem: each.cover for each in traffic.coverage(dict.fromkeys(asked, 1), H200, [found])}


def test_traffic_is_exact_near_or_left_to_the_fallback(tmp_path: Path) -> None:
    exact, near, far, other = problem(1024), problem(1500), problem(16384), problem(1024, mask=Mask())
    nothing = problem(1024, head_dim=264)
    assert covers(tmp_path, exact, near, far, other, nothing) == {
        exact: Cover.EXACT, near: Cover.NEAR, far: Cover.FALLBACK, other: Cover.FALLBACK, nothing: Cover.NOTHING,
    }  # fmt: skip


def test_traffic_of_the_backward_pass_is_counted_by_entries_of_its_own(tmp_path: Path) -> None:
    forward, backward = problem(), gradients().problem
    near, same_bits = replace(backward, batch=4), replace(backward, deterministic=True)
    asked = [forward, backward, near, same_bits]
    found = table_of(tmp_path / "a.yaml", gradients())
    covered = {each.problem: each.cover for each in traffic.coverage(dict.fromkeys(asked, 1), H200, [found])}
    assert covered == {forward: Cover.FALLBACK, backward: Cover.EXACT, near: Cover.NEAR, same_bits: Cover.FALLBACK}
    commands = traffic.tune_commands(traffic.coverage({same_bits: 1}, H200, [found]))
    assert len(commands) == 1 and "--op backward --deterministic" in commands[0]


def test_the_commands_that_tune_the_rest_ask_for_just_those_problems(tmp_path: Path) -> None:
    asked = [problem(16384), problem(8192), problem(1024, mask=Mask()), problem(64, mask=Mask.window(7, 0))]
    asked[-1] = replace(asked[-1], head_dim_v=128, seqlen_q=1)
    found = table_of(tmp_path / "a.yaml", entry())
    commands = traffic.tune_commands(traffic.coverage(dict.fromkeys(asked, 1), H200, [found]), "h200")
    from flashgen.cli.options import request_of
    from flashgen.cli.tune import tune

    again: set[Problem] = set()
    for command in commands:
        context = tune.make_context("tune", command.split()[2:])
        again |= set(request_of(context.params).problems())
    assert again == set(asked)


def test_the_coverage_command_counts_calls(tmp_path: Path, capsys: Captured) -> None:
    found = table_of(tmp_path / "a.yaml", entry())
    log = tmp_path / "log.jsonl"
    log.write_text(f"{traffic.line_of(problem(1024), 9)}\n{traffic.line_of(problem(16384), 3)}\n")
    assert cli.run(["table", "coverage", str(log), "--table", str(found.path), "--gpu", "h200", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["calls"] == {"exact": 9, "near": 0, "fallback": 3, "nothing": 0}
    assert cli.run(["table", "coverage", str(log), "--table", str(found.path), "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "12 calls: 9 exact (75%), 3 fallback (25%)" in shown and "flashgen tune --head-dim 64" in shown
