"""Numbers and lists of numbers as launchers write them: `[0]*3+[1]*58`, `48`, `1024*8`. No other text is evaluated."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # a shell's division is whole
    ast.Mod: operator.mod,
}
#: The most elements of a list, and digits of a number.
LONGEST = 10_000


class LiteralError(ValueError):
    """Text that is no number or list of numbers."""


def literal(text: str) -> Any:
    """The value of `text`: an int, a float, or a list of them. Raises LiteralError."""
    try:
        (statement,) = ast.parse(text.strip()[:LONGEST]).body
        return _value(statement.value)  # type: ignore[attr-defined]  # no other statement has one that is a literal
    except (
        AttributeError,
        SyntaxError,
        TypeError,
        ValueError,
        ZeroDivisionError,
        RecursionError,
        MemoryError,
    ) as error:
        raise LiteralError(f"{text[:80]!r} is no number or list of numbers") from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and (combine := _OPERATORS.get(type(node.op))):
        left, right = _value(node.left), _value(node.right)
        if isinstance(left, list) != isinstance(right, list) and _size(left) * _size(right) > LONGEST:
            raise ValueError("too long")
        return combine(left, right)
    raise ValueError(ast.dump(node)[:40])


def _size(value: Any) -> int:
    return len(value) if isinstance(value, list) else int(abs(value))
