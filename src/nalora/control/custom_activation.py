"""Activations defined by the user, named on the command line as `module:function` or `file.py:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nalora.activations import KNOWN, Activation, get
from nalora.equations import Elementwise
from nalora.errors import NALoRAError
from nalora.files import python_files


def find(name: str) -> Activation:
    """Return the known activation of that name, or the function that `module:function` or `file.py:name` refers to.

    Raises:
        NALoRAError: no such activation, or not an elementwise function of a tensor.
    """
    if ":" not in name:
        try:
            return get(name)
        except NALoRAError as error:
            fix = f"{error.fix} (or give your own as module:function or file.py:name)"
            raise NALoRAError(error.where, found=error.found, expected=error.expected, fix=fix) from None
    place, _, attribute = name.rpartition(":")
    return from_function(_attribute(name, _module(name, place), attribute), called=attribute)


def from_function(phi: Callable[[Tensor], Tensor], called: str) -> Activation:
    """Return an activation with derivatives by autograd, or by differences for a function without autograd.

    Raises:
        NALoRAError: `phi` is not elementwise, or not finite.
    """
    _check_elementwise(phi, called)
    smooth = phi
    if not _has_gradient(phi):
        smooth = by_differences(phi)
        dtype = phi(torch.zeros(1, dtype=torch.float64)).dtype
        if dtype != torch.float64:
            raise NALoRAError(
                called,
                found=f"values in {dtype} and no autograd",
                expected="float64 for z in float64, since derivatives are computed from values",
                fix="compute in the dtype of z, or with torch's own functions",
            )

    def named(z: Tensor) -> Tensor:
        return smooth(z).to(z.dtype)

    named.__name__ = called
    return get(named)


def known_equivalent(activation: Activation) -> Activation | None:
    """Return the known activation with the same values, None without one."""
    z = torch.linspace(-12, 12, 481, dtype=torch.float64)
    values = activation.phi(z)
    return next((known for known in KNOWN if torch.allclose(values, known.phi(z), rtol=1e-5, atol=1e-5)), None)


def by_differences(phi: Callable[[Tensor], Tensor]) -> Elementwise:
    """Return `phi` with a derivative from its values, for functions that do not use torch (NumPy, lookup tables).

    Five points: in float64 the derivative is accurate to 1e-12 and the second derivative to 1e-9, so that
    characteristic points have nine digits. Steps are shorter than the 1e-2 of the search for these, so a kink at 0 is
    no root.
    """
    h = 1e-3

    def slope(z: Tensor) -> Tensor:
        at = [phi(z + k * h).to(z.dtype) for k in (-2, -1, 1, 2)]
        return (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h)

    class Differences(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, z: Tensor) -> Tensor:
            context.save_for_backward(z)
            return phi(z.detach()).to(z.dtype)

        @staticmethod
        def backward(context: Any, upstream: Tensor) -> Tensor:
            (z,) = context.saved_tensors
            # The slope is differentiated in the same way, since κ′ needs φ″.
            return upstream * by_differences(slope)(z)

    def apply(z: Tensor) -> Tensor:
        result: Tensor = Differences.apply(z)  # type: ignore[no-untyped-call]
        return result

    return apply


def _module(name: str, place: str) -> Any:
    try:
        if place.endswith(".py"):
            file = Path(place)
            if not file.is_file():
                raise ImportError("no such file")
            return python_files.load(file)
        if "" not in sys.path:  # an installed command does not search the current folder
            sys.path.insert(0, "")
        return importlib.import_module(place)
    except Exception as error:  # a user's file may raise anything
        raise NALoRAError(
            name,
            found=f"{place!r} cannot be imported ({type(error).__name__}: {error})",
            expected="module:function or file.py:name",
            fix="check the module's name or the file's path",
        ) from error


def _attribute(name: str, module: Any, attribute: str) -> Callable[[Tensor], Tensor]:
    function: Any = getattr(module, attribute, None)
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        function = function()
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        listed = f"one of {', '.join(names[:8])}" if names else "a function in it"
        raise NALoRAError(name, found=f"no function {attribute!r} there", expected=listed, fix="name that one")
    result: Callable[[Tensor], Tensor] = function
    return result


@torch.no_grad()
def _check_elementwise(phi: Callable[[Tensor], Tensor], called: str) -> None:
    z = torch.linspace(-6, 6, 48, dtype=torch.float64)
    try:
        values = phi(z)
        found = ""
        if not isinstance(values, Tensor) or values.shape != z.shape:
            found = f"a result of {getattr(values, 'shape', type(values).__name__)} for z of {tuple(z.shape)}"
        elif not torch.allclose(phi(z[:24].reshape(6, 4)).flatten().to(z), values[:24].to(z), equal_nan=True):
            found = "a value that depends on the other elements"
        elif not values.isfinite().all():
            found = f"{int((~values.isfinite()).sum())} of 48 values between -6 and 6 that are not finite"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        raise NALoRAError(
            called,
            found=found,
            expected="an elementwise function: a tensor to a finite tensor of its shape",
            fix="compute every element independently, as torch.nn.functional.silu does",
        )


def _has_gradient(phi: Callable[[Tensor], Tensor]) -> bool:
    z = torch.linspace(-6, 6, 48, dtype=torch.float64, requires_grad=True)
    try:
        with torch.enable_grad():
            return phi(z).requires_grad
    except (RuntimeError, TypeError):  # NumPy does not accept tensors that require grad
        return False
