"""Value of an arithmetic expression that a model wrote, read from its syntax tree and never evaluated as code."""

from __future__ import annotations

import ast
from fractions import Fraction

from instep.rewards.answers import plain

MAX_EXPRESSION = 200


def arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """(value, numbers used) of whole numbers under + - * / and brackets; None where the text is anything else.

    Powers are left out on purpose: 9**9**9 would not end.
    """
    text = plain(text).replace("×", "*").replace("÷", "/").replace("\\times", "*").replace("\\div", "/")
    if len(text) > MAX_EXPRESSION:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        numbers: list[int] = []
        return _value(tree, numbers), numbers
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError(f"{type(node).__name__} is no part of an arithmetic expression")


def reaches(text: str, numbers: list[int], target: int) -> bool:
    """Whether the expression uses each of the numbers once and comes to the target (countdown, puzzle24)."""
    result = arithmetic(text)
    return result is not None and result[0] == target and sorted(result[1]) == sorted(numbers)
