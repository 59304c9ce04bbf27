"""Liger's SwiGLU, whose backward writes over z and u: every token once, the same statistics as without it.

Triton decides at import whether its kernels are interpreted, so the checks run in a process of their own: this file
as a script, on the CPU with TRITON_INTERPRET=1, on a GPU with the real kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_liger(device, tmp_path):
    pytest.importorskip("liger_kernel")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    here = Path(__file__).resolve()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parents[1]), *sys.path])}
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, "-W", "ignore", str(here), device, str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all of it held" in done.stdout


def main(device: str, folder: str) -> None:
    if device == "cpu":
        teach_the_interpreter_floats()
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    calls = []
    forward = LigerSiLUMulFunction.forward
    LigerSiLUMulFunction.forward = staticmethod(lambda *args: calls.append(1) or forward(*args))
    attached_after_patching(device)
    assert calls
    calls.clear()
    switched_on_by_trainer(device, folder)
    assert calls
    print("all of it held")


def attached_after_patching(device: str) -> None:
    """Discovery runs the kernel on its replica, backward included."""
    import tiny
    from liger_kernel.transformers import LigerSwiGLUMLP
    from torch.optim import SGD

    import nalora

    def observe(patched: bool, importance: str):
        model = tiny.llama(torch.float32).to(device)
        for layer in model.base_model.model.model.layers if patched else ():
            layer.mlp.forward = types.MethodType(LigerSwiGLUMLP.forward, layer.mlp)
        optimizer = SGD(tiny.trainable(model), lr=0.1)
        controller = nalora.attach(model, optimizer, nalora.NALoRAConfig(importance=importance))
        mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3], device=device)
        tiny.sum_loss(model, tiny.tokens(2, 7).to(device), mask).backward()
        sensitivity, regimes, tokens = controller._window.groups[0].stacked.totals()
        sums = tokens.tolist(), regimes, sensitivity
        optimizer.step()
        return str(controller.plan), sums, tiny.adapter_state(model)

    for importance in ("derivative", "utility"):
        plan, sums, adapters = observe(False, importance)
        liger_plan, liger_sums, liger_adapters = observe(True, importance)
        assert liger_plan == plan
        assert liger_sums[0] == sums[0] == [11, 11]
        assert torch.equal(liger_sums[1], sums[1])
        torch.testing.assert_close(liger_sums[2], sums[2], rtol=1e-5, atol=1e-5)
        assert tiny.largest_difference(adapters, liger_adapters) < 1e-5


def switched_on_by_trainer(device: str, folder: str) -> None:
    """`use_liger_kernel=True` patches the model when training starts, after the attachment."""
    from test_trainer import difference, make_trainer, rows

    import nalora

    on = device == "cuda"
    kernels = {"swiglu": True, "rope": on, "rms_norm": on, "fused_linear_cross_entropy": False}

    def run(**liger):
        trainer = make_trainer(
            folder, dtype=torch.float32, data=rows(8), use_cpu=not on, per_device_train_batch_size=2, **liger
        )
        controller = nalora.attach_trainer(trainer, nalora.NALoRAConfig(apply_to="update"))
        counted, learned = [], []
        step, compute_loss = controller._leave_step, trainer.compute_loss

        def after_step(*args):
            counted.append(controller._window.groups[0].tokens.tolist())
            step(*args)

        def recorded(model, inputs, *args, **kwargs):
            learned.append([int(inputs["attention_mask"].sum())] * 2)
            return compute_loss(model, inputs, *args, **kwargs)

        controller._leave_step, trainer.compute_loss = after_step, recorded
        trainer.train()
        assert counted == learned
        assert len(counted) == 4
        state = {k: v.cpu() for k, v in controller.state_dict()["tensors"].items()}
        adapters = {name: p.detach().cpu() for name, p in trainer.model.named_parameters() if p.requires_grad}
        return adapters, state

    plain, liger = run(), run(use_liger_kernel=True, liger_kernel_config=kernels)
    assert difference(plain, liger) < 1e-3


def teach_the_interpreter_floats() -> None:
    """Triton 3.6's interpreter passes a float argument to the kernel as it is; Liger's kernels call its `.to`."""
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument):
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(numpy.array([argument], numpy.float32), tl.float32), tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats


if __name__ == "__main__":
    main(*sys.argv[1:])
