"""Activations defined by the user: found by name, checked, and as accurate as known ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from nalora.activations import KNOWN, get
from nalora.control.custom_activation import by_differences, find, from_function, known_equivalent
from nalora.errors import NALoRAError

SOURCE = """
import numpy as np
import torch

def steep(z):
    return z * torch.sigmoid(3 * z)

def tabled(z):
    return torch.from_numpy(np.array(z.numpy() / (1 + np.exp(-z.numpy()))))

class Gate(torch.nn.Module):
    def forward(self, z):
        return torch.nn.functional.gelu(z)

number = 3
"""


def numpy_silu(z):
    return torch.from_numpy(np.array(z.numpy() / (1 + np.exp(-z.numpy()))))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gates.py"
    path.write_text(SOURCE)
    return path


def test_known_names_and_aliases():
    assert find("swish") is get("silu")
    with pytest.raises(
        NALoRAError, match=r"did you mean silu\? \(or give your own as module:function or file.py:name\)"
    ):
        find("sillu")


def test_a_function_in_a_file(file):
    steep = find(f"{file}:steep")
    assert steep.name == "steep"
    assert steep.characteristic_points == pytest.approx([x / 3 for x in get("silu").characteristic_points], abs=1e-9)
    assert known_equivalent(steep) is None


def test_a_module_class_in_a_file(file):
    gate = find(f"{file}:Gate")
    assert gate.name == "Gate"
    assert known_equivalent(gate) is get("gelu")


def test_a_function_in_a_module_on_the_path_or_in_the_folder(file, monkeypatch):
    assert known_equivalent(find("torch.nn.functional:mish")) is get("mish")
    monkeypatch.chdir(file.parent)
    assert find("gates:steep").characteristic_points == find(f"{file}:steep").characteristic_points


def test_numpy_functions_are_differentiated_by_their_values(file):
    tabled = find(f"{file}:tabled")
    assert tabled.characteristic_points == pytest.approx(get("silu").characteristic_points, abs=1e-8)
    assert known_equivalent(tabled) is get("silu")


@pytest.mark.parametrize("what", ["phi", "derivative", "selection", "kappa", "chi"])
def test_differences_agree_with_the_closed_form(what):
    z = torch.linspace(-6, 6, 241, dtype=torch.float64)
    mine, known = getattr(from_function(numpy_silu, "mine"), what), getattr(get("silu"), what)
    torch.testing.assert_close(mine(z), known(z), rtol=1e-8, atol=1e-9)


def test_differences_can_be_differentiated_again():
    z = torch.linspace(-3, 3, 25, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(by_differences(numpy_silu)(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    (truth,) = torch.autograd.grad(get("silu").derivative(z).sum(), z)
    torch.testing.assert_close(second, truth, rtol=1e-7, atol=1e-8)


def test_float32_is_too_coarse_for_differences_but_not_for_autograd():
    with pytest.raises(NALoRAError, match="float32 and no autograd"):
        from_function(lambda z: numpy_silu(z.float()), "narrow")
    through = from_function(lambda z: functional.silu(z.float()), "narrow")
    assert through.derivative(torch.ones(1, dtype=torch.float64)).dtype == torch.float64


def test_a_hard_gate_out_of_numpy_has_no_points():
    relu = from_function(lambda z: torch.from_numpy(np.maximum(z.numpy(), 0)), "hard")
    assert relu.characteristic_points is None
    assert relu.kappa(torch.tensor([-1.0, 1.0], dtype=torch.float64)).tolist() == pytest.approx([0, 1])


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)
def test_twin_knows_each_known(known):
    assert known_equivalent(from_function(known.phi, "copy")) is known


@pytest.mark.parametrize(
    ("phi", "found"),
    [
        (lambda z: functional.softmax(z, dim=-1), "depends on the other elements"),
        (lambda z: z.sum(), "a result of"),
        (lambda z: 3.0, "a result of float"),
        (torch.log, "not finite"),
        (torch.matmul, "TypeError"),
    ],
)
def test_what_is_not_elementwise_is_refused(phi, found):
    with pytest.raises(NALoRAError, match=found) as error:
        from_function(phi, "odd")
    assert error.value.where == "odd"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nowhere.py:f", "no such file"),
        ("no_such_module:f", "cannot be imported"),
        ("{file}:missing", "no function 'missing'"),
        ("{file}:number", "expected one of .*steep"),
        ("{broken}:f", "SyntaxError"),
    ],
)
def test_what_is_not_there_is_reported(file, tmp_path, name, found):
    broken = tmp_path / "broken.py"
    broken.write_text("def (")
    with pytest.raises(NALoRAError, match=found):
        find(name.format(file=file, broken=broken))
