"""Finding the program in what a model wrote: a fenced block, a repeated function, or only the rest of one."""

from __future__ import annotations

import ast
import re
import textwrap
from itertools import takewhile

_BLOCK = re.compile(r"^[ \t]*```(?P<language>[^\n`]*)\n(?P<text>.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "python", "python3", "py")
_FUTURE = re.compile(r"^from __future__ import [^\n]*\n?", re.MULTILINE)
# At the margin a program begins with one of these (a definition, an import, a constant), and goes on with them and
# what closes brackets and comments; every other line there has left it.
_BEGINS = r"(def|class|async|import|from)\s|@|[A-Za-z_]\w*\s*(:[^=\n]+)?=(?!=)"
_CODE = re.compile(rf"\s*({_BEGINS})")
_GOES_ON = re.compile(rf"{_BEGINS}|[)\]}}#]")


def through_first_block(text: str) -> str | None:
    """The text from its beginning through the end of the first fenced block; None where no block was closed."""
    block = _BLOCK.search(text)
    return text[: block.end()] if block and block[0].endswith("```") else None


def whole_program(output: str) -> str:
    """A program from an answer that should contain all of it."""
    text, fenced = _code(output)
    return textwrap.dedent(text) if fenced else _without_prose(text)


def completed_function(output: str, prompt: str, entry_point: str) -> str:
    """A program from an answer to the beginning of a function.

    Args:
        output: what the model wrote: a block or bare code, with the signature or without.
        prompt: imports and helpers, then the function's signature and docstring.
        entry_point: the function's name.
    """
    definition = re.compile(rf"^[ \t]*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    text, fenced = _code(output, definition)
    if definition.search(text):
        begins = definition.search(prompt)
        before = prompt[: begins.start()] if begins else ""
        return _future_first(before + (textwrap.dedent(text) if fenced else _without_prose(text)))
    return _with_body(prompt, text)


def _code(output: str, definition: re.Pattern[str] | None = None) -> tuple[str, bool]:
    """(the text that holds the program, whether it stood between fences).

    Of several blocks it is the first with the `definition`, else the first in Python: others hold commands and output.
    """
    output = output.replace("\r\n", "\n")
    blocks = list(_BLOCK.finditer(output))
    if not blocks:
        return output, False
    before = output[: blocks[0].start()]
    # Code right from the start: this fence ends it, and belongs to a block that the prompt had opened.
    if _begins_with_code(before):
        return before, False
    defining = [block for block in blocks if definition and definition.search(block["text"])]
    in_python = [block for block in blocks if block["language"].strip().lower() in _PYTHON]
    return (defining or in_python or blocks)[0]["text"], True


def _begins_with_code(text: str) -> bool:
    """Whether the first lines are a program, or the body of a function, and not a sentence that looks like one."""
    text = text.strip("\n")
    if not text.strip() or not (text[0] in " \t" or _CODE.match(text)):
        return False
    lines = textwrap.dedent(text).split("\n")
    starts = (textwrap.indent("\n".join(lines[:count]), "    ") for count in range(1, len(lines) + 1))
    return any(_says_more_than_a_word(f"def _():\n{start}\n") for start in starts)


def _says_more_than_a_word(function: str) -> bool:
    """Whether it is Python, and does anything: "Sure" and "Sure," are names to Python."""
    if not _is_python(function):
        return False
    (body,) = ast.parse(function).body
    assert isinstance(body, ast.FunctionDef)
    return any(not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in body.body)


def _future_first(program: str) -> str:
    """Python wants these imports before all others, also before those of the prompt."""
    found = _FUTURE.findall(program)
    return "".join(line.rstrip("\n") + "\n" for line in found) + _FUTURE.sub("", program)


def _without_prose(text: str) -> str:
    """Bare code from its first definition or import to the first line at the margin that is neither."""
    lines = textwrap.dedent(text).split("\n")
    start = next((i for i, line in enumerate(lines) if _CODE.match(line)), 0)
    end = start + 1
    while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t" or _GOES_ON.match(lines[end])):
        end += 1
    return "\n".join(lines[start:end])


def _with_body(prompt: str, body: str) -> str:
    """The prompt's function with a body whose indentation may have suffered: of its readings as Python the longest."""
    lines = body.strip("\n").rstrip().split("\n")
    inside = [lines[0], *takewhile(lambda line: not line.strip() or line[0] in " \t", lines[1:])]
    # The tokenizer, or a strip, may have taken the spaces before the first line.
    mended = ["    " + inside[0].lstrip(), *inside[1:]]
    if lines[0][:1] in (" ", "\t"):
        readings = [inside, mended, textwrap.indent(textwrap.dedent("\n".join(inside)), "    ").split("\n")]
    else:
        # At the margin nothing marks where the function ends, but that the prose after it is no Python.
        readings = [mended, *([f"    {line}" for line in lines[:count]] for count in range(len(lines), 0, -1))]
    head = prompt if prompt.endswith("\n") else f"{prompt}\n"
    for reading in sorted(readings, key=len, reverse=True):
        program = "\n".join([head + reading[0], *reading[1:], ""])
        if _is_python(program):
            return program
    return head + body


def _is_python(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
