"""Literals and formulas are read as Python and sympy read them; nothing else is read, and nothing is run."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nalora.tasks.sandboxed.expressions import is_formula, literal

# Python's parser warns about "2if" and similar texts.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)
# Pieces of formulas and of attacks, put together at random.
pieces = st.lists(
    st.sampled_from(
        [
            *("x", "y", "C", "2", "3.5", "+", "-", "*", "/", "**", "(", ")", ",", " ", "sin", "exp(", "sqrt(x)", "pi"),
            *("__import__", "os", "eval", "open", ".", "[", "]", "'", '"', "lambda", ":", "=", "for", "in", "if", "\n"),
            *("integrate", "expand", "Symbol", "print", "getattr", "_", "{", "}", "@", "#", ";", "\\", "`", "!", "x=1"),
        ]
    ),
    max_size=12,
).map("".join)


@given(plain)
def test_literals_are_read_as_python_reads_them(value):
    assert literal(repr(value)) == value


@given(pieces)
@settings(max_examples=500)
def test_what_is_read_as_a_formula_calls_only_elementary_functions(text):
    if not is_formula(text):
        return
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        assert not isinstance(
            node, (ast.Attribute, ast.Subscript, ast.Lambda, ast.JoinedStr, ast.ListComp, ast.Starred, ast.keyword)
        )
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            assert node.func.id in ("sin", "exp", "sqrt")
        if isinstance(node, ast.Name):
            assert node.id not in ("eval", "open", "print", "getattr", "__import__", "integrate", "expand", "Symbol")
        if isinstance(node, ast.Constant):
            assert type(node.value) in (int, float)


@given(pieces)
@settings(max_examples=500)
def test_a_literal_runs_nothing(text):
    """It returns data, or raises an error that makes the answer wrong."""
    try:
        value = literal(text)
    except (ValueError, SyntaxError, TypeError, ArithmeticError, MemoryError, RecursionError):
        return
    assert type(value) in (int, float, complex, str, bytes, list, tuple, set, dict, bool, type(None))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/2", 0.5), ("(0x1F << 2) - -3", 127), (" [1, 2] ", [1, 2]), ("2**10", 1024), ("~5 & 7", 2), ("1+2j", 1 + 2j)],
)
def test_arithmetic_with_numbers_is_done(text, value):
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "1 << 10**9", "[1] * 10**9", "'a' * 9", "...", "x", "f()", "[x for x in ()]", "{**{}}", "f'{1}'", 7],
)
def test_large_numbers_and_other_expressions_are_refused(text):
    with pytest.raises(ValueError, match="not a literal|too large|not a number|not a text"):
        literal(text)


@pytest.mark.parametrize(
    "text", ["x**2/2 + C", "-3*sin(2*x)/4", " exp(-x)*log(Abs(x)) ", "(x + 1)*(y - 2.5)", "pi*x", "alpha"]
)
def test_formulas_are_accepted(text):
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        *("integrate(x)", "x.diff()", "(lambda: 1)()", "x if x else y", "x[0]", "'x'", "x == 1", "eval", "_x", "1j"),
        *("sin(x, evaluate=1)", "sin(*x)", "x;y", "x:=1", "ｓin(x)", "x!", "", "x" * 200_000, None, 5, b"x"),
    ],
)
def test_everything_else_is_not_a_formula(text):
    assert not is_formula(text)


def test_names_that_the_scorer_defines_are_variables():
    assert not is_formula("print + 1")
    assert is_formula("print + 1", {"print": 1})
