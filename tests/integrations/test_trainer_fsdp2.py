"""Trainer under FSDP2: Accelerate shards when training starts, the control follows it there.

On the CPU Accelerate drops an FSDP configuration and takes DDP. Here it is put back after the Trainer was built, so
that Accelerate's own code shards, switches the optimizer's parameters, clips, saves and loads. The ranks are processes
of their own that run this file as a script.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from ranks import results_of_two
from test_trainer import difference, make_trainer, rows

import nalora
from nalora import NALoRAConfig
from nalora.models.versions import FSDP2_RESUMES, is_older

CASES = {
    "gradient": {},
    "update": {"space": "update"},
    "checkpointing": {"space": "update", "activation_checkpointing": True},
    "loaded on the first rank": {"cpu_ram_efficient_loading": True},
}
# PEFT cannot write a FULL_STATE_DICT here: gathered tensors stay torch's asynchronous ones, which a copy to the host
# would resolve, but they are there already.
SAVED = {"state_dict_type": "SHARDED_STATE_DICT"}


def fully_sharded(trainer, **settings):
    """The trainer as it would be on GPUs with an FSDP2 configuration."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **{"cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT"} | settings,
    )
    trainer.accelerator.state.fsdp_plugin = plugin
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True
    return trainer


def whole(model) -> dict:
    """The adapters by their names without sharding and checkpointing."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def train(folder, ranks: int, space="gradient", resume=None, steps=None, **fsdp):
    """6 optimizer steps of 8 sequences each, in two micro-batches per rank; (adapters, controller's state)."""
    settings = dict(per_device_train_batch_size=4 // ranks, gradient_accumulation_steps=2)
    if steps:
        settings |= dict(save_strategy="steps", save_steps=steps)
    trainer = make_trainer(folder, data=rows(48), **settings)
    if ranks > 1:
        fully_sharded(trainer, **fsdp)
    controller = nalora.attach_trainer(trainer, NALoRAConfig(apply_to=space))
    trainer.train(resume_from_checkpoint=resume)
    assert not ranks > 1 or all(hasattr(p, "full_tensor") for p in trainer.model.parameters())
    return whole(trainer.model), controller.state_dict()["tensors"]


def main(folder: Path) -> None:
    found = {name: train(folder / name, 2, **settings) for name, settings in CASES.items()}
    found["saving"] = train(folder / "saving", 2, steps=3, **SAVED)
    try:
        found["resumed"] = train(folder / "resumed", 2, resume=str(folder / "saving" / "checkpoint-3"), **SAVED)
    except nalora.NALoRAError as error:
        found["refusal"] = str(error)
    torch.save(found, folder / f"rank-{os.environ['RANK']}.pt")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    return results_of_two(__file__, folder)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one(name, launched, tmp_path):
    first, second = (each[name] for each in launched)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert difference(train(tmp_path, 1, CASES[name].get("space", "gradient")), first) < 1e-9


def test_a_resumed_run_ends_where_the_whole_one_did_or_is_refused(launched):
    for found in launched:
        if is_older("accelerate", FSDP2_RESUMES):
            assert "accelerate 1.13 or later" in found["refusal"]
            continue
        assert difference(found["saving"], found["resumed"]) < 1e-12


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
