"""The mutants of a module: mutmut's operators, applied to every function, decorated or not.

mutmut itself skips decorated functions, because it selects a mutant inside a running process through wrappers. Here it
would skip all functions with `@torch.no_grad()`: the decision of a step and its application. So a mutant is the text of
a whole module, which a new process imports instead of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import libcst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

# No behaviour to test: types, imports, and the wording of errors, of which tests match a part.
_LEFT_OUT = (libcst.Annotation, libcst.Decorator, libcst.Import, libcst.ImportFrom)
_DEVICE = re.compile(r"(,\s*)?(device\s*=\s*)?(\bNone|\b[\w.]*device)\b")
_ERRORS = (
    "NALoRAError",
    "missing_package",
    "missing_path",
    "unknown_name",
    "unusable",
    "warn",
    "wrong_kind",
    "wrong_value",
)


class Mutant(NamedTuple):
    """One change to one module.

    Args:
        file: the module's path below the repository's root.
        number: the index among the module's mutants, in the order of the text.
        first: the first line of the changed expression.
        last: its last line.
        change: the expression before and after.
    """

    file: str
    number: int
    first: int
    last: int
    change: str

    @property
    def name(self) -> str:
        """A short name, stable as long as the module is not edited."""
        return f"{self.file.removeprefix('src/nalora/').removesuffix('.py')}:{self.first}#{self.number}"


def mutants(root: Path, file: str) -> Iterator[tuple[Mutant, str]]:
    """Yield every mutant of a module with its text."""
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
    """Yield the nodes to change: all of a function but its types, and constants of the module and its classes."""
    if isinstance(node, _LEFT_OUT) or _is_docstring(node) or _is_error(node) or _is_wording(node):
        return
    constant = isinstance(node, libcst.Assign | libcst.AnnAssign) and not inside
    if constant and not _is_a_value(node):
        return
    if inside:
        yield node
    inside = inside or isinstance(node, libcst.FunctionDef) or constant
    for child in node.children:
        # The names of functions and arguments are no behaviour; the arguments' defaults are.
        if not (isinstance(node, libcst.FunctionDef | libcst.Param | libcst.ClassDef) and child is node.name):
            yield from _nodes(child, inside)


def _is_docstring(node: libcst.CSTNode) -> bool:
    return isinstance(node, libcst.Expr) and isinstance(node.value, libcst.SimpleString | libcst.ConcatenatedString)


def _is_wording(node: libcst.CSTNode) -> bool:
    """Return whether a string is text for users: a title, a reason, a sentence. Names and keys have no spaces."""
    texts = libcst.SimpleString | libcst.ConcatenatedString
    return isinstance(node, texts) and " " in str(node.evaluated_value or "")


def _is_error(node: libcst.CSTNode) -> bool:
    return (
        isinstance(node, libcst.Call)
        and isinstance(name := node.func, libcst.Name | libcst.Attribute)
        and (name.value if isinstance(name, libcst.Name) else name.attr.value) in _ERRORS
    )


def _is_a_value(node: libcst.CSTNode) -> bool:
    """Return False for the name of a type, such as Callable[[Tensor], Tensor] or TypeVar("Claim")."""
    value = getattr(node, "value", None)
    return not (value is None or isinstance(value, libcst.Subscript | libcst.BinaryOperation | libcst.Call))


def _is_of_the_device(before: str, after: str) -> bool:
    """Return whether only a tensor's device changes, which no test on a machine without a GPU can detect."""
    first, second = (re.sub(r",\s*\)", ")", _DEVICE.sub("", code)) for code in (before, after))
    return first == second


def _short(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) <= 70 else f"{text[:67]}…"
