"""DeepSpeed's ZeRO-1 and 2 in gradient space train as one process does; everything else is refused by name.

The ranks are processes of their own that run this file as a script, on the CPU with gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import results_of_two
from test_fsdp2 import batch, build, my_rows, world
from test_trainer import make_trainer, rows
from torch.optim import SGD

import nalora
from nalora import NALoRAConfig, NALoRAError

# SGD: Adam would divide most of the control out again, and rounding in float32 with it.
STEPS, CLIP, RATE = 10, 0.2, 0.3


def start(stage: int, accumulated: int = 1, dtype=torch.float32, model="llama", **zero):
    import deepspeed

    model = build(model, torch.float32)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=SGD(tiny.trainable(model), lr=RATE, momentum=0.9), config=settings
    )
    return engine, optimizer


def run(stage: int, dtype=torch.float32, config=None, model="llama") -> dict:
    engine, optimizer = start(stage, dtype=dtype, model=model)
    controller = nalora.attach(engine, optimizer, config)
    for step in range(STEPS):
        engine.backward(tiny.sum_loss(engine, *batch(step, 0, my_rows())) * world())
        engine.step()
    return {"parameters": tiny.adapter_state(engine.module), "state": controller.state_dict()["tensors"]}


def alone(controlled: bool = True, model="llama") -> dict:
    """One process, plain torch."""
    model = build(model, torch.float32)
    optimizer = SGD(tiny.trainable(model), lr=RATE, momentum=0.9)
    controller = nalora.attach(model, optimizer) if controlled else None
    for step in range(STEPS):
        tiny.sum_loss(model, *batch(step, 0, slice(None))).backward()
        if controller:
            controller.clip_grad_norm_(CLIP)
        else:
            torch.nn.utils.clip_grad_norm_(tiny.trainable(model), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": tiny.adapter_state(model),
        "state": controller.state_dict()["tensors"] if controller else None,
    }


def train(folder, deepspeed: bool) -> dict:
    """6 steps of 8 sequences by a Trainer."""
    zero = {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
    }
    settings = dict(optim="sgd", learning_rate=RATE, per_device_train_batch_size=8 // world())
    trainer = make_trainer(
        folder, data=rows(48), dtype=torch.float32, **settings, deepspeed=zero if deepspeed else None
    )
    controller = nalora.attach_trainer(trainer)
    trainer.train()
    return {"parameters": tiny.adapter_state(trainer.model), "state": controller.state_dict()["tensors"]}


def refusals() -> dict[str, str]:
    def two_backward_passes():
        engine, optimizer = start(2)
        nalora.attach(engine, optimizer)
        for last in (False, True):
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(tiny.sum_loss(engine, *batch(0, 0, my_rows())))
        engine.step()

    def clipping():
        nalora.attach(*start(1)).clip_grad_norm_(1.0)

    actions = {
        "stage 3": lambda: nalora.attach(*start(3)),
        "stage 0": lambda: nalora.attach(*start(0)),
        "update": lambda: nalora.attach(*start(1), NALoRAConfig(apply_to="update")),
        "accumulation": lambda: nalora.attach(*start(2, accumulated=2)),
        "two backward passes": two_backward_passes,
        "clipping": clipping,
    }
    found = {}
    for name, action in actions.items():
        try:
            action()
            found[name] = "no error"
        except NALoRAError as error:
            found[name] = str(error)
    return found


def main(folder: Path) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = {f"ZeRO-{stage}": run(stage) for stage in (1, 2)}
    found["experts"] = run(2, model="mixtral")
    found["bf16"] = run(2, torch.bfloat16)
    found["refusals"] = refusals()
    found["Trainer"] = train(folder, deepspeed=True)
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    return results_of_two(__file__, folder, DS_ACCELERATOR="cpu")


def assert_near(expected, first, second):
    for part in ("parameters", "state"):
        for key, value in expected[part].items():
            assert torch.equal(first[part][key], second[part][key]), key
            torch.testing.assert_close(first[part][key], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "model"), [("ZeRO-1", "llama"), ("ZeRO-2", "llama"), ("experts", "mixtral")])
def test_two_ranks_are_one(name, model, launched):
    expected = alone(model=model)
    assert_near(expected, *(each[name] for each in launched))
    plain = alone(controlled=False, model=model)
    assert tiny.largest_difference(expected["parameters"], plain["parameters"]) > 1e-3


def test_trainer(launched, tmp_path):
    """Accelerate's engine wrapper steps inside backward."""
    assert_near(train(tmp_path, deepspeed=False), *(each["Trainer"] for each in launched))


def test_bf16_with_a_master_copy(launched):
    """Statistics are in float32 and equal on both ranks."""
    first, second = (each["bf16"]["state"] for each in launched)
    assert all(torch.equal(first[key], second[key]) for key in first)
    expected = alone()["state"]
    for key in expected:
        assert first[key].dtype == expected[key].dtype
        torch.testing.assert_close(first[key], expected[key], rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("stage 3", "DeepSpeedZeroOptimizer_Stage3"),
        ("stage 0", "without ZeRO"),
        ("update", "apply_to='update' with DeepSpeed"),
        ("accumulation", "gradient_accumulation_steps > 1"),
        ("two backward passes", "2 backward passes before one step"),
        ("clipping", "gradient_clipping in DeepSpeed's configuration"),
    ],
)
def test_everything_else_is_refused_by_name(name, named, launched):
    for found in launched:
        assert named in found["refusals"][name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
