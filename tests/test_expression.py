"""The expression language of search spaces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.expression import ExpressionError, parse_condition, parse_expression, parse_relation

AT = {"a": 7, "b": 3, "flag": True, "problem.head_dim": 128, "zero": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("a + b * 2", 13),
        ("(a + b) * 2", 20),
        ("a - b - 1", 3),
        ("a // b", 2),
        ("a % b", 1),
        ("-a // b", -3),
        ("ceil_div(a, b)", 3),
        ("ceil_div(6, b)", 2),
        ("ceil_div(0, b)", 0),
        ("min(a, b, 5)", 3),
        ("max(a, b)", 7),
        ("a * (1 - flag)", 0),
        ("flag * 4 + 1", 5),
        ("problem.head_dim // 16", 8),
        ("  a\n  ", 7),
    ],
)
def test_arithmetic_has_the_value_of_the_same_integer_arithmetic(text: str, value: int) -> None:
    assert parse_expression(text).value(AT) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "a b", "a / b", "a ** b", "a << b", "a & b", "~a", "not a", "a if b else 1", "1.5", "'x'", "True", "None", "1j", "[a]", "a[0]",
        "lambda: 1", "(x := 1)", "f'{a}'", "a <= b", "a and b", "open('x')", "__import__('os')", "a.b.c", "min.x(a, b)", "min(a)",
        "min(*a)", "max(a, b=1)", "max(a, key=b)", "ceil_div(a)", "ceil_div(a, b, a)", "abs(a)", "(a).__class__()", "1; 2", "a = 1",
        "[a for a in b]", "9" * 30, "9" * 5000, "(" * 300 + "a" + ")" * 300, "-" * 900 + "a" * 200, "a\x00b",
    ],
)  # fmt: skip
def test_anything_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


@pytest.mark.parametrize("text", ["-" * 900 + "a", " + ".join(["a"] * 200), "(" * 100 + "a" + " + a)" * 100])
def test_a_deep_expression_is_refused_before_anything_recurses(text: str) -> None:
    with pytest.raises(ExpressionError, match="nested deeper than 60 levels"):
        parse_expression(text)


def test_names_are_collected() -> None:
    assert parse_expression("a + max(problem.head_dim, b) - a").names == {"a", "b", "problem.head_dim"}
    assert parse_relation("a % b <= zero").names == {"a", "b", "zero"}
    assert parse_condition("a <= b and flag == 1").names == {"a", "b", "flag"}


@pytest.mark.parametrize("text", ["a // zero", "a % zero", "ceil_div(a, zero)"])
def test_division_by_zero_names_expression_and_values(text: str) -> None:
    with pytest.raises(ExpressionError, match=r"division by zero in .*zero = 0"):
        parse_expression(text).value(AT)


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ExpressionError, match=r"undefined name problem\.depth"):
        parse_expression("problem.depth + 1").value(AT)


@pytest.mark.parametrize(("text", "violation"), [("a <= 7", 0.0), ("a <= 5", 0.4), ("a <= 0", 7.0), ("a <= -2", 4.5), ("0 <= a", 0.0)])
def test_a_violation_is_the_distance_relative_to_the_right_side(text: str, violation: float) -> None:
    assert parse_relation(text).violation(AT) == violation


@pytest.mark.parametrize("text", ["a", "a < b", "a == b", "a >= b", "a <= b <= 3", "a <= b and b <= 3", "not a <= b", "1 if a <= b else 0"])
def test_a_constraint_is_one_less_or_equal(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_relation(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a <= 7", 1), ("a <= 6", 0), ("a == 7", 1), ("a == b", 0), ("a == 7 and b == 3 and flag == 1", 1), ("a == 7 and b == 4", 0)],
)
def test_a_condition_is_relations_joined_by_and(text: str, value: int) -> None:
    assert parse_condition(text).value(AT) == value


@pytest.mark.parametrize("text", ["a", "a != b", "a < b", "a <= b or b <= a", "not a <= b", "a <= b <= 3", "a in b", "a <= b and b"])
def test_a_condition_outside_its_grammar_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_condition(text)


_LEAVES = st.one_of(st.integers(0, 99).map(str), st.sampled_from(["a", "b", "flag"]))
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max", "ceil_div"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    ),
    max_leaves=12,
)


@given(_TREES)
def test_closures_agree_with_python(text: str) -> None:
    try:
        expected = eval(text, {"min": min, "max": max, "ceil_div": lambda x, y: -(-x // y)}, dict(AT))
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="division by zero"):
            parse_expression(text).value(AT)
        return
    assert parse_expression(text).value(AT) == expected
