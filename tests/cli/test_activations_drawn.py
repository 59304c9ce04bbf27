"""`nalora activations`: the table and the plots."""

from __future__ import annotations

import functools

import pytest
from figure_files import check_files

from nalora.activations import KNOWN


@pytest.fixture
def activations(run):
    return functools.partial(run, "activations")


def test_only_those_named_are_listed(activations):
    code, out, _ = activations("gelu", "swish")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "." in line]
    assert [row[:3] for row in rows] == [
        ["gelu", "-0.751791525", "+0.839923676"],
        ["silu", "-1.278464543", "+1.278464543"],
    ]


def test_all_are_drawn(activations, tmp_path):
    code, out, _ = activations("--draw", str(tmp_path))
    assert code == 0
    for known in KNOWN:
        files = [tmp_path / f"{known.name}.{kind}" for kind in ("png", "svg")]
        assert all(str(file) in out for file in files)
        check_files(files, must_say=["χ(z)", known.name])


def test_a_custom_activation_is_listed_with_its_points_and_drawn(activations, tmp_path):
    source = tmp_path / "gates.py"
    source.write_text("import torch\n\ndef steep(z):\n    return z * torch.sigmoid(3 * z)\n")
    code, out, _ = activations(f"{source}:steep", "torch.nn:SiLU", "--draw", str(tmp_path / "drawn"))
    assert code == 0
    assert "+0.426154848" in out
    assert "SiLU (same values as silu)" in out
    check_files([tmp_path / "drawn" / f"steep.{kind}" for kind in ("png", "svg")], must_say=["+0.4262"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sillu", "did you mean silu"), ("torch:logsumexp", "elementwise"), ("none.py:f", "no such file")],
)
def test_a_mistake_is_one_line(activations, name, expected):
    code, out, err = activations(name)
    assert (code, out) == (2, "")
    assert expected in err
    assert len(err.splitlines()) == 1
