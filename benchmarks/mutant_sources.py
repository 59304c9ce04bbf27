"""The mutants of a module: mutmut's operators, applied to every function whatever its decorators.

mutmut itself leaves decorated functions out, because it selects a mutant inside a running process through wrappers.
Here that would be everything below `@torch.no_grad()`: the decision of a step and its application. So a mutant is the
text of a whole module, which a fresh process imports in place of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import libcst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

# What has no behaviour to test: types, imports, and the wording of errors, of which tests look for a part.
_LEFT_OUT = (libcst.Annotation, libcst.Decorator, libcst.Import, libcst.ImportFrom)
_DEVICE = re.compile(r"(,\s*)?(device\s*=\s*)?(\bNone|\b[\w.]*device)\b")
_ERRORS = ("NALoRAError", "warn")


class Mutant(NamedTuple):
    """One change to one module.

    Args:
        file: of the module, below the repository's root.
        number: among the module's mutants, in the order of the text.
        first: line of the changed expression.
        last: line of it.
        change: what it was and what it is.
    """

    file: str
    number: int
    first: int
    last: int
    change: str

    @property
    def name(self) -> str:
        """Short and stable as long as the module is not edited."""
        return f"{self.file.removeprefix('src/nalora/').removesuffix('.py')}:{self.first}#{self.number}"


def mutants(root: Path, file: str) -> Iterator[tuple[Mutant, str]]:
    """Every mutant of a module with its text."""
    module = libcst.parse_module((root / file).read_text(encoding="utf-8"))
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    places = wrapper.resolve(PositionProvider)
    number, seen = 0, {module.code}
    for node in _nodes(module, inside=False):
        for kind, operator in mutation_operators:
            if not isinstance(node, kind):
                continue
            for changed in operator(node):  # type: ignore[operator]
                text = module.deep_replace(node, changed).code  # type: ignore[arg-type]
                if text in seen:
                    continue
                seen.add(text)
                place = places[node]
                assert isinstance(place, CodeRange)
                if _is_of_the_device(module.code_for_node(node), module.code_for_node(changed)):
                    continue
                change = f"{_short(module.code_for_node(node))}  →  {_short(module.code_for_node(changed))}"
                yield Mutant(file, number, place.start.line, place.end.line, change), text
                number += 1


def _nodes(node: libcst.CSTNode, inside: bool) -> Iterator[libcst.CSTNode]:
    """What may be changed: all of a function but its types, and constants of the module and its classes."""
    if isinstance(node, _LEFT_OUT) or _is_docstring(node) or _is_error(node) or _is_wording(node):
        return
    constant = isinstance(node, libcst.Assign | libcst.AnnAssign) and not inside
    if constant and not _is_a_value(node):
        return
    if inside:
        yield node
    inside = inside or isinstance(node, libcst.FunctionDef) or constant
    for child in node.children:
        # Its name and its arguments' names are no behaviour; their defaults are.
        if not (isinstance(node, libcst.FunctionDef | libcst.Param | libcst.ClassDef) and child is node.name):
            yield from _nodes(child, inside)


def _is_docstring(node: libcst.CSTNode) -> bool:
    return isinstance(node, libcst.Expr) and isinstance(node.value, libcst.SimpleString | libcst.ConcatenatedString)


def _is_wording(node: libcst.CSTNode) -> bool:
    """Whether it is a text for people: a title, a reason, part of a sentence. Names and keys have no spaces."""
    texts = libcst.SimpleString | libcst.ConcatenatedString
    return isinstance(node, texts) and " " in str(node.evaluated_value or "")


def _is_error(node: libcst.CSTNode) -> bool:
    return (
        isinstance(node, libcst.Call)
        and isinstance(name := node.func, libcst.Name | libcst.Attribute)
        and (name.value if isinstance(name, libcst.Name) else name.attr.value) in _ERRORS
    )


def _is_a_value(node: libcst.CSTNode) -> bool:
    """Not a name for a type, such as Callable[[Tensor], Tensor] or TypeVar("Claim")."""
    value = getattr(node, "value", None)
    return not (value is None or isinstance(value, libcst.Subscript | libcst.BinaryOperation | libcst.Call))


def _is_of_the_device(before: str, after: str) -> bool:
    """Whether the change is only of where a tensor lives, which a machine without a GPU cannot notice."""
    first, second = (re.sub(r",\s*\)", ")", _DEVICE.sub("", code)) for code in (before, after))
    return first == second


def _short(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) <= 70 else f"{text[:67]}…"
