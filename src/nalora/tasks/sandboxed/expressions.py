"""Reading an answer as Python literals or as a formula, without running it.

Scorers of reasoning-gym give answers to `eval` and to sympy's `parse_expr`, which calls it. Code in an answer would
then run in the process that gives its mark, and no limit on that process keeps it from writing a mark of its own. So
both are replaced: only texts whose syntax tree consists of numbers, names and operators are read, nothing in them is
called but the functions of `_FUNCTIONS`, and what takes too long is ended by the scorer's limits.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

# Longer than any answer of a family; it bounds the time and depth of parsing.
_LONGEST = 100_000
_LARGEST_BITS = 100_000
_FORMULA = re.compile(r"[A-Za-z0-9_+\-*/().,\s]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# What an antiderivative or a polynomial is written with. Not `integrate`, `diff`, `expand` and the like: with these
# sympy would solve the question.
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "asec", "acsc", "acot"),
        *("sinh", "cosh", "tanh", "sech", "csch", "coth", "asinh", "acosh", "atanh"),
        *("exp", "log", "ln", "sqrt", "Abs", "Rational"),
    )
)

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Invert: operator.invert,
}  # fmt: skip


def literal(text: Any, *_names: Any) -> Any:
    """In place of `eval`: numbers, texts, lists, tuples, sets and dicts of them, and arithmetic with numbers.

    Raises:
        ValueError: anything else, or numbers that grow too large.
        SyntaxError: no Python.
    """
    return _value(_parsed(text))


def _parsed(text: Any) -> ast.expr:
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ValueError("no text of a reasonable length")
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Constant) and node.value is not ...:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return kind(_value(item) for item in node.elts)
    if isinstance(node, ast.Dict):
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_number(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _number(node.left), _number(node.right)
        if isinstance(node.op, (ast.Pow, ast.LShift)) and isinstance(left, int) and isinstance(right, int):
            grows = left.bit_length() * right if isinstance(node.op, ast.Pow) else left.bit_length() + right
            if grows > _LARGEST_BITS:
                raise ValueError("a number that is too large")
        return _BINARY[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} is no literal")


def _number(node: ast.expr) -> Any:
    value = _value(node)
    if not isinstance(value, (int, float, complex)):
        raise ValueError("arithmetic with something that is no number")
    return value


def is_formula(text: Any, names: Any = ()) -> bool:
    """Whether the text is arithmetic with numbers, variables and elementary functions and nothing else.

    Args:
        text: as an answer holds it.
        names: of variables that the scorer itself defines.
    """
    if not isinstance(text, str) or not _FORMULA.fullmatch(text):
        return False
    try:
        return _is_formula(_parsed(text), frozenset(names or ()))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _is_formula(node: ast.expr, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Name):
        return node.id in names or _is_variable(node.id)
    if isinstance(node, ast.UnaryOp):
        return type(node.op) in (ast.UAdd, ast.USub) and _is_formula(node.operand, names)
    if isinstance(node, ast.BinOp):
        known = type(node.op) in (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
        return known and _is_formula(node.left, names) and _is_formula(node.right, names)
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        return named and all(_is_formula(argument, names) for argument in node.args)
    return False


def _is_variable(name: str) -> bool:
    """A letter, or a word that means nothing to Python and sympy, which make everything else a function or a class."""
    if len(name) == 1 or name == "pi":
        return name.isalpha()
    known = hasattr(builtins, name) or hasattr(sys.modules.get("sympy"), name)
    return _NAME.fullmatch(name) is not None and not known


def replace_evaluation() -> None:
    """Give every module of reasoning-gym, and sympy itself, the functions above in place of those that run texts.

    To be called once all of them are imported.
    """
    original = getattr(sys.modules.get("sympy.parsing.sympy_parser"), "parse_expr", None)

    def parse_expr(text: Any, local_dict: Any = None, *options: Any, **named: Any) -> Any:
        if original is None or not is_formula(text, local_dict):
            raise ValueError("no formula")
        return original(text.strip(), local_dict, *options, **named)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("scoring runs no code")

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            for attribute, function in (("eval", literal), ("exec", refuse), ("compile", refuse)):
                module.__dict__.setdefault(attribute, function)  # one module has a `compile` of its own
        if original is not None and name.partition(".")[0] in ("reasoning_gym", "sympy"):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, parse_expr)
