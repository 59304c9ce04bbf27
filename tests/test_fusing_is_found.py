"""A reader who wants speed alone finds `nalora.fuse` and its page, and the pages explain its settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_the_first_screen_of_the_readme_says_what_to_write():
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:30])
    for part in (
        "layers = nalora.fuse(model)", "cuda_graphs=True", 'base="fp8"', "(docs/fusing.md)", "(docs/how-fast.md)",
        "(docs/performance.md)", "(examples/fused_layers.py)",
    ):  # fmt: skip
        assert part in screen


@pytest.mark.parametrize("name", ["README.md", "docs/runs.md", "docs/trainers.md"])
def test_links_of_the_pages_lead_to_files(name):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert any(link.endswith("fusing.md") for link in links)
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_the_pages_say_how_runs_and_trainers_use_it():
    assert "nalora.fuse(trainer.model)" in page("docs/trainers.md")
    assert "unless `evaluate_quantised: false` is set" in page("docs/runs.md")
    assert "Adapters of `base: fp8` runs are always evaluated on the base in its own precision" in page("docs/runs.md")
    changes = page("CHANGELOG.md").partition("## 0.1.0")[0]
    for part in (
        "`nalora.fuse(model)`",
        "`base: fp8`",
        "cuda_graphs=True)`",
        "by default in a single process on a GPU",
    ):
        assert part in changes
    assert "`evaluate_quantised: false`" in changes
