"""Evaluate an answer as a Python literal or a formula without running it as code.

Scorers of reasoning-gym pass answers to `eval` and to sympy's `parse_expr`, which calls it. Code in an answer would
then run in the process that writes its score, and no limit on that process keeps it from writing a different score.
So both are replaced: they accept only a text whose syntax tree consists of numbers, names and operators, call
nothing but the functions in `_FUNCTIONS`, and are stopped by the scorer's limits if they take too long.
"""

from __future__ import annotations

import ast
import builtins
import operator
import re
import sys
from collections.abc import Callable
from typing import Any

# Longer than the answers of any family; bounds the time and depth of parsing.
_LONGEST = 100_000
_LARGEST_BITS = 100_000
_FORMULA = re.compile(r"[A-Za-z0-9_+\-*/().,\s]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
# Functions in antiderivatives and polynomials. Not `integrate`, `diff`, `expand` and similar ones, with which sympy
# would solve the question.
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
    """Replace `eval`: return numbers, strings, lists, tuples, sets and dicts of them, and arithmetic with numbers.

    Raises a ValueError for anything else and for numbers that grow too large, a SyntaxError if it is not Python.
    """
    return _value(_parsed(text))


def _parsed(text: Any) -> ast.expr:
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ValueError("not a text of at most 100,000 characters")
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=value) if value is not ...:
            return value
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=items):
            return {_value(item) for item in items}
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_number(operand))
        case ast.BinOp(op=operation) if type(operation) in _BINARY:
            left, right = _number(node.left), _number(node.right)
            if isinstance(operation, (ast.Pow, ast.LShift)) and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * right if isinstance(operation, ast.Pow) else left.bit_length() + right
                if bits > _LARGEST_BITS:
                    raise ValueError("the number is too large")
            return _BINARY[type(operation)](left, right)
    raise ValueError(f"{type(node).__name__} is not a literal")


def _number(node: ast.expr) -> Any:
    value = _value(node)
    if not isinstance(value, (int, float, complex)):
        raise ValueError("arithmetic with something that is not a number")
    return value


def is_formula(text: Any, names: Any = ()) -> bool:
    """Return whether the text is only arithmetic with numbers, variables and elementary functions.

    Variables are single letters, words without a meaning in Python and sympy, and the `names` of the scorer.
    """
    if not isinstance(text, str) or not _FORMULA.fullmatch(text):
        return False
    try:
        return _is_formula(_parsed(text), frozenset(names or ()))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False


def _is_formula(node: ast.expr, names: frozenset[str]) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return name in names or _is_variable(name)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _is_formula(operand, names)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow()):
            return _is_formula(node.left, names) and _is_formula(node.right, names)
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
            return function in _FUNCTIONS and all(_is_formula(argument, names) for argument in arguments)
    return False


def _is_variable(name: str) -> bool:
    """Return whether a name is one letter, "pi", or a word that is a name in neither Python nor sympy."""
    if len(name) == 1 or name == "pi":
        return name.isalpha()
    known = hasattr(builtins, name) or hasattr(sys.modules.get("sympy"), name)
    return _NAME.fullmatch(name) is not None and not known


def replace_evaluation() -> None:
    """Replace the functions that run text in every module of reasoning-gym and sympy; import all of them first."""
    original = getattr(sys.modules.get("sympy.parsing.sympy_parser"), "parse_expr", None)

    def parse_expr(text: Any, local_dict: Any = None, *options: Any, **named: Any) -> Any:
        if original is None or not is_formula(text, local_dict):
            raise ValueError("not a formula")
        return original(text.strip(), local_dict, *options, **named)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("scoring runs no code")

    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package == "reasoning_gym":
            for attribute, function in (("eval", literal), ("exec", refuse), ("compile", refuse)):
                module.__dict__.setdefault(attribute, function)  # one module defines its own `compile`
        if original is not None and package in ("reasoning_gym", "sympy"):
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, parse_expr)
