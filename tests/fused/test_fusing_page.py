"""The code of docs/fusing.md runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

import peft
import pytest
import tiny
import torch

PAGE = Path(__file__).parents[2] / "docs" / "fusing.md"


def test_the_code_of_the_page_runs(capsys):
    pytest.importorskip("triton")
    model = tiny.llama(torch.float32, ffn=64)  # FP8 needs multiples of 16
    assert isinstance(model, peft.PeftModel)
    ids = tiny.tokens(length=8)
    names = {"model": model, "batch": {"input_ids": ids, "labels": ids}}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        code = compile(block, str(PAGE), "exec")
        if "liger_kernel" not in block:  # whose norms need a GPU
            exec(code, names)
    assert "Fused layers: " in capsys.readouterr().out
    assert names["agreement"].gradients < 1e-5
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
