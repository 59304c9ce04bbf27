"""Extract the program from a model's output: a fenced block, a repeated function, or only the body of one."""

from __future__ import annotations

import ast
import re
import textwrap
from itertools import takewhile

_BLOCK = re.compile(r"^[ \t]*```(?P<language>[^\n`]*)\n(?P<text>.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_FUTURE = re.compile(r"^from __future__ import [^\n]*\n?", re.MULTILINE)
# An unindented line of a program is one of these (a definition, an import, a constant), and after the first also
# a closing bracket or a comment; every other unindented line ends the program.
_STATEMENT = r"(def|class|async|import|from)\s|@|[A-Za-z_]\w*\s*(:[^=\n]+)?=(?!=)"
_CODE = re.compile(rf"\s*({_STATEMENT})")
_CONTINUES = re.compile(rf"{_STATEMENT}|[)\]}}#]")


def through_first_block(text: str) -> str | None:
    """Return the text through the end of the first fenced block, or None without a closed block."""
    block = _BLOCK.search(text)
    return text[: block.end()] if block and block[0].endswith("```") else None


def whole_program(output: str) -> str:
    """Return the program in an output that should contain all of it."""
    text, fenced = _code(output)
    return textwrap.dedent(text) if fenced else _without_prose(text)


def completed_function(output: str, prompt: str, entry_point: str) -> str:
    """Return the program in an output that completes a function.

    Args:
        output: a block or bare code, with or without the function's signature.
        prompt: imports and helpers, then the function's signature and docstring.
        entry_point: the function's name.
    """
    definition = re.compile(rf"^[ \t]*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    text, fenced = _code(output, definition)
    if not definition.search(text):
        return _with_body(prompt, text)
    start = definition.search(prompt)
    program = prompt[: start.start()] if start else ""
    program += textwrap.dedent(text) if fenced else _without_prose(text)
    # Python requires these imports before all others, those of the prompt included.
    return "".join(line.rstrip("\n") + "\n" for line in _FUTURE.findall(program)) + _FUTURE.sub("", program)


def _code(output: str, definition: re.Pattern[str] | None = None) -> tuple[str, bool]:
    """Return the text that contains the program and whether it was a fenced block.

    Of several blocks it is the first with the `definition`, or the first in Python: others hold commands and output.
    """
    output = output.replace("\r\n", "\n")
    blocks = list(_BLOCK.finditer(output))
    if not blocks:
        return output, False
    before = output[: blocks[0].start()]
    # The output starts with code: this fence closes a block that the prompt opened.
    if _starts_with_code(before):
        return before, False
    defining = [block for block in blocks if definition and definition.search(block["text"])]
    in_python = [block for block in blocks if block["language"].strip().lower() in _PYTHON]
    return (defining or in_python or blocks)[0]["text"], True


def _starts_with_code(text: str) -> bool:
    """Return whether the first lines are a program or the body of a function, and not a sentence that resembles one."""
    text = text.strip("\n")
    if not text.strip() or not (text[0] in " \t" or _CODE.match(text)):
        return False
    lines = textwrap.dedent(text).split("\n")
    starts = (textwrap.indent("\n".join(lines[:count]), "    ") for count in range(1, len(lines) + 1))
    return any(_has_effect(f"def _():\n{start}\n") for start in starts)


def _has_effect(function: str) -> bool:
    """Return whether it is Python with a statement that does something: "Sure" and "Sure," are valid expressions."""
    tree = _tree(function)
    statements = [node for definition in tree.body for node in getattr(definition, "body", ())] if tree else []
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in statements)


def _without_prose(text: str) -> str:
    """Return bare code from its first definition or import to the first unindented line that is not code."""
    lines = textwrap.dedent(text).split("\n")
    start = next((i for i, line in enumerate(lines) if _CODE.match(line)), 0)
    code = takewhile(lambda line: not line.strip() or line[0] in " \t" or _CONTINUES.match(line), lines[start + 1 :])
    return "\n".join([lines[start], *code])


def _with_body(prompt: str, body: str) -> str:
    """Return the prompt's function with the longest reading of the body, whose indentation may be damaged."""
    lines = body.strip("\n").rstrip().split("\n")
    inside = [lines[0], *takewhile(lambda line: not line.strip() or line[0] in " \t", lines[1:])]
    # The tokenizer, or a strip, may have removed the spaces before the first line.
    repaired = ["    " + inside[0].lstrip(), *inside[1:]]
    if lines[0][:1] in (" ", "\t"):
        readings = [inside, repaired, textwrap.indent(textwrap.dedent("\n".join(inside)), "    ").split("\n")]
    else:
        # Without indentation the function ends where the text is no longer Python.
        readings = [repaired, *([f"    {line}" for line in lines[:count]] for count in range(len(lines), 0, -1))]
    head = prompt if prompt.endswith("\n") else f"{prompt}\n"
    for reading in sorted(readings, key=len, reverse=True):
        program = "\n".join([head + reading[0], *reading[1:], ""])
        if _tree(program) is not None:
            return program
    return head + body


def _tree(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
