"""The expression language of search spaces: integers, dotted names, + - * // %, min max ceil_div, and one relation.

Expressions are parsed with `ast`, checked node by node against a whitelist, and compiled once to Python closures; `eval` is never called.
Booleans count as 0 and 1.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Names = Mapping[str, int]
Evaluator = Callable[[Names], int]

MAX_LENGTH = 1000
MAX_DEPTH = 60
MAX_LITERAL = 2**62
FUNCTIONS = ("ceil_div", "max", "min")


class ExpressionError(ValueError):
    """An expression breaks the grammar, or has no value: the message says where. Owners of a file add file and field."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An integer expression and the names it reads."""

    text: str
    names: frozenset[str]
    evaluate: Evaluator

    def value(self, names: Names) -> int:
        """The value. Raises ExpressionError for a division by zero or an unknown name."""
        try:
            return self.evaluate(names)
        except ZeroDivisionError:
            raise ExpressionError(f"division by zero in {self.text!r} with {self._read(names)}") from None
        except KeyError as missing:
            raise ExpressionError(f"undefined name {missing.args[0]} in {self.text!r}") from None

    def _read(self, names: Names) -> str:
        return ", ".join(f"{name} = {int(names[name])}" for name in sorted(self.names) if name in names) or "no names"


@dataclass(frozen=True, slots=True)
class Relation:
    """`left <= right`, measured: how far a point is from satisfying it."""

    text: str
    left: Expression
    right: Expression

    @property
    def names(self) -> frozenset[str]:
        """Every name that either side reads."""
        return self.left.names | self.right.names

    def violation(self, names: Names) -> float:
        """How far the point is from satisfying the relation, relative to the right side; 0.0 when it holds."""
        left, right = self.left.value(names), self.right.value(names)
        return (left - right) / max(1, abs(right)) if left > right else 0.0

    def sides(self, names: Names) -> tuple[int, int]:
        """Both values."""
        return self.left.value(names), self.right.value(names)


def parse_expression(text: str) -> Expression:
    """An arithmetic expression. Raises ExpressionError outside the grammar."""
    return _expression(text, _tree(text))


def parse_relation(text: str) -> Relation:
    """One `a <= b`, as the key `holds` wants it. Raises ExpressionError otherwise."""
    tree = _tree(text)
    if not (isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.LtE)):
        raise ExpressionError(f"{text!r} must be one relation of the form a <= b (a multiple is written a % b <= 0)")
    return Relation(text, _expression(text, tree.left), _expression(text, tree.comparators[0]))


def parse_condition(text: str) -> Expression:
    """Relations `a <= b` and `a == b`, joined by `and`, as the key `when` wants them; the value is 0 or 1."""
    names: set[str] = set()
    evaluate = _condition(text, _tree(text), names)
    return Expression(text, frozenset(names), evaluate)


def _tree(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"an expression has at most {MAX_LENGTH} characters; this one has {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        reason = problem.msg if isinstance(problem, SyntaxError) else type(problem).__name__
        raise ExpressionError(f"{text!r} is not an expression: {reason}") from None
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):  # counted without recursion, so that what follows may recurse
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ExpressionError(f"{text!r} is nested deeper than {MAX_DEPTH} levels; name its parts in `derived`")
    return tree


def _expression(text: str, tree: ast.expr) -> Expression:
    names: set[str] = set()
    evaluate = _arithmetic(text, tree, names)
    return Expression(text, frozenset(names), evaluate)


def _arithmetic(text: str, node: ast.expr, names: set[str]) -> Evaluator:
    if isinstance(node, ast.Constant):
        return _literal(text, node)
    if isinstance(node, (ast.Name, ast.Attribute)):
        name = _dotted(text, node)
        names.add(name)
        return operator.itemgetter(name)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_arithmetic(text, node.left, names), _arithmetic(text, node.right, names))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _arithmetic(text, node.operand, names)
        return lambda at: -operand(at)
    if isinstance(node, ast.Call):
        return _call(text, node, names)
    raise ExpressionError(f"{_shown(text, node)} is outside the grammar (integers, names, + - * // %, min, max, ceil_div)")


def _literal(text: str, node: ast.Constant) -> Evaluator:
    value = node.value
    if type(value) is not int or value > MAX_LITERAL:
        raise ExpressionError(f"{_shown(text, node)} is not an integer below 2^62")
    return lambda at: value


def _dotted(text: str, node: ast.Name | ast.Attribute) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    raise ExpressionError(f"{_shown(text, node)} is not a name; names have one dot at most, as problem.head_dim")


def _call(text: str, node: ast.Call, names: set[str]) -> Evaluator:
    if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
        raise ExpressionError(f"{_shown(text, node)} calls something other than {', '.join(FUNCTIONS)}")
    arguments = [_arithmetic(text, argument, names) for argument in node.args]
    if node.func.id == "ceil_div":
        if len(arguments) != 2:
            raise ExpressionError(f"{_shown(text, node)}: ceil_div takes two arguments")
        return _ceil_div(*arguments)
    if len(arguments) < 2:
        raise ExpressionError(f"{_shown(text, node)}: {node.func.id} takes two arguments or more")
    return _extremum(min if node.func.id == "min" else max, arguments)


def _extremum(choose: Callable[..., int], arguments: list[Evaluator]) -> Evaluator:
    if len(arguments) == 2:
        left, right = arguments
        return lambda at: choose(left(at), right(at))
    return lambda at: choose([argument(at) for argument in arguments])


def _add(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda at: left(at) + right(at)


def _subtract(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda at: left(at) - right(at)


def _multiply(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda at: left(at) * right(at)


def _divide(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda at: left(at) // right(at)


def _modulo(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda at: left(at) % right(at)


def _ceil_div(left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda at: -(-left(at) // right(at))


_BINARY: dict[type[ast.operator], Callable[[Evaluator, Evaluator], Evaluator]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.FloorDiv: _divide,
    ast.Mod: _modulo,
}


def _condition(text: str, node: ast.expr, names: set[str]) -> Evaluator:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = [_condition(text, part, names) for part in node.values]
        return lambda at: int(all(part(at) for part in parts))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.LtE, ast.Eq)):
        left, right = _arithmetic(text, node.left, names), _arithmetic(text, node.comparators[0], names)
        if isinstance(node.ops[0], ast.Eq):
            return lambda at: int(left(at) == right(at))
        return lambda at: int(left(at) <= right(at))
    raise ExpressionError(f"{_shown(text, node)} must be relations a <= b or a == b, joined by `and`")


def _shown(text: str, node: ast.AST) -> str:
    return repr(ast.get_source_segment(text.strip(), node) or text)
