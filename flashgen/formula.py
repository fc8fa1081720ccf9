"""Formulas of a search space, freed from it: derived names written out, parameters as numbers, as text of the same grammar or as C.

A bundle states grids and workspaces this way, so that launching needs neither the space's file nor Python.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from flashgen.expression import Expression, ExpressionError, parse_expression
from flashgen.model import ProblemClass, Variant
from flashgen.space import Space

RUN_TIME_NAMES = (
    "problem.batch", "problem.heads_q", "problem.heads_kv", "problem.gqa_group", "problem.batch_heads", "problem.seqlen_q",
    "problem.seqlen_kv", "device.sm_count",
)  # fmt: skip
"""What a formula may still read once the kernel is chosen."""

_MAX_NODES = 2000


def launch_formulas(space: Space, klass: ProblemClass, variant: Variant) -> tuple[tuple[str, ...], str]:
    """(grid of each entry point, bytes of workspace) of a variant, as formulas of RUN_TIME_NAMES. Raises ExpressionError for others."""
    known = {name: int(value) for name, value in space.checked(variant.as_dict()).items()}
    known |= {"problem.head_dim": klass.head_dim, "problem.head_dim_v": klass.head_dim_v, "problem.element_bytes": klass.dtype.bytes}
    known |= {f"problem.mask_{kind}": int(klass.mask is kind) for kind in type(klass.mask)}
    derived = space.definition.derived
    grids = tuple(settle(rule.grid, known, derived) for rule in space.definition.launches)
    return grids, settle(space.definition.workspace_bytes, known, derived)


def settle(formula: Expression, known: Mapping[str, int], derived: Mapping[str, Expression]) -> str:
    """The text of a formula with derived names written out, known names as numbers, and constant parts computed."""
    tree = _Settle(known, derived).visit(ast.parse(formula.text.strip(), mode="eval").body)
    text = ast.unparse(tree)
    left = parse_expression(text).names - set(RUN_TIME_NAMES)
    if left:
        raise ExpressionError(f"{formula.text!r} needs {', '.join(sorted(left))} when it is launched, which a bundle does not know")
    return text


def to_c(text: str) -> str:
    """A settled formula as a C expression of `int64_t` values. The names become members of `fg_shape`, as in `s->seqlen_q`.

    Division and remainder are of non-negative numbers, where C and Python agree.
    """
    parse_expression(text)
    return _c(ast.parse(text, mode="eval").body)


class _Settle(ast.NodeTransformer):
    def __init__(self, known: Mapping[str, int], derived: Mapping[str, Expression]) -> None:
        self.known, self.derived, self.nodes = known, derived, 0

    def visit(self, node: ast.AST) -> ast.AST:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise ExpressionError(f"a formula of more than {_MAX_NODES} parts cannot be written out")
        seen: ast.AST = super().visit(node)
        return _computed(seen)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._named(node.id, node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._named(ast.unparse(node), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        arguments: list[ast.expr] = [self.visit(each) for each in node.args]  # type: ignore[misc]
        return ast.Call(node.func, arguments, [])

    def _named(self, name: str, node: ast.AST) -> ast.AST:
        if name in self.known:
            return ast.Constant(int(self.known[name]))
        if name in self.derived:
            return self.visit(ast.parse(self.derived[name].text.strip(), mode="eval").body)
        return node


def _computed(node: ast.AST) -> ast.AST:
    """A constant in place of an operation on constants."""
    parts = node.args if isinstance(node, ast.Call) else [node.left, node.right] if isinstance(node, ast.BinOp) else []
    if parts and all(isinstance(part, ast.Constant) for part in parts):
        return ast.Constant(parse_expression(ast.unparse(node)).value({}))
    return node


_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%"}


def _c(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return f"INT64_C({int(node.value)})"  # type: ignore[arg-type]
    if isinstance(node, ast.Attribute):
        return f"s->{node.attr}"
    if isinstance(node, ast.UnaryOp):
        return f"(-{_c(node.operand)})"
    if isinstance(node, ast.BinOp):
        return f"({_c(node.left)} {_OPERATORS[type(node.op)]} {_c(node.right)})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        first, *rest = (_c(each) for each in node.args)
        for each in rest:
            first = f"fg_{node.func.id}({first}, {each})"
        return first
    raise ExpressionError(f"{ast.unparse(node)} has no C form")
