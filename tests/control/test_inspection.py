"""Inspection finds the plan of every kind of model a user can name, from configs alone."""

from __future__ import annotations

import json

import peft
import pytest
import tiny
import torch
import transformers
from installed import EXPERTS

import nalora
from nalora.control.inspection import inspect_model
from nalora.models import gguf_cache

SMALL = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4)


def llama_config(**changes) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**SMALL | dict(vocab_size=64, architectures=["LlamaForCausalLM"]) | changes)


@pytest.fixture
def llama(tmp_path):
    folder = tmp_path / "llama"
    llama_config().save_pretrained(folder)
    return folder


def save_adapter(llama, folder, **settings) -> str:
    model = transformers.AutoModelForCausalLM.from_config(llama_config())
    model.name_or_path = str(llama)
    settings = dict(r=2, target_modules=["gate_proj", "down_proj"]) | settings
    peft.get_peft_model(model, peft.LoraConfig(**settings)).save_pretrained(folder)
    return str(folder)


def test_the_plan_is_the_one_attach_makes(llama):
    model = tiny.with_lora(transformers.LlamaForCausalLM(llama_config()), r=8)
    controller = nalora.attach(model, torch.optim.SGD(tiny.trainable(model), lr=0.1))
    seen = inspect_model(str(llama))
    assert seen.plan.rows() == controller.plan.rows()
    assert seen.plan.others == controller.plan.others
    assert seen.trainable == sum(p.numel() for p in tiny.trainable(model))
    assert (seen.architecture, seen.rank) == ("LlamaForCausalLM", 8)


def test_folder_and_config_file_give_the_same_plan(llama):
    assert inspect_model(str(llama)).plan.rows() == inspect_model(str(llama / "config.json")).plan.rows()


def test_nothing_is_allocated(llama, monkeypatch):
    seen = []
    find_blocks = nalora.control.inspection.find_blocks
    monkeypatch.setattr(
        nalora.control.inspection, "find_blocks", lambda model: seen.append(model) or find_blocks(model)
    )
    inspect_model(str(llama))
    assert {p.device.type for p in seen[0].parameters()} == {"meta"}


def test_the_number_of_threads_stays(llama):
    threads = torch.get_num_threads()
    inspect_model(str(llama))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"gate_proj": 4}}])
def test_an_adapter_brings_its_own_lora(llama, tmp_path, settings):
    folder = save_adapter(llama, tmp_path / "adapter", **settings)
    seen = inspect_model(folder)
    (row,) = seen.plan.rows()
    assert row[1] == "gate gate_proj, up up_proj (no adapter), down down_proj"
    assert seen.rank == 2
    assert inspect_model(f"{folder}/adapter_config.json").plan.rows() == [row]


def test_a_start_that_needs_weights_is_no_obstacle(llama, tmp_path):
    folder = save_adapter(llama, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": "pissa"}))
    assert len(inspect_model(folder).plan.blocks) == 2


@EXPERTS
@pytest.mark.parametrize("targets", [[], ["mlp.gate_proj", "mlp.down_proj"]])
def test_dense_layers_of_a_mixture_of_experts_are_in_the_plan(tmp_path, targets):
    """PEFT takes their names for experts; what is inspected is what a run adapts."""
    experts = dict(num_experts=4, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[0], num_key_value_heads=2)
    transformers.Qwen3MoeConfig(**SMALL, vocab_size=64, **experts).save_pretrained(tmp_path)
    plan = inspect_model(str(tmp_path), target_modules=targets).plan
    gates = [each.block.gate.name.rpartition("model.")[2] for each in plan.blocks]
    assert gates == ["layers.0.mlp.gate_proj", *([] if targets else ["layers.1.mlp.experts.gate_up_proj"])]


def test_parameters_of_experts_are_adapted_by_name(tmp_path):
    sizes = dict(num_local_experts=4, intermediate_size=24, head_dim=8, num_key_value_heads=2, vocab_size=64)
    transformers.GptOssConfig(**SMALL | sizes).save_pretrained(tmp_path)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    inspection = inspect_model(str(tmp_path), target_modules=["o_proj"], target_parameters=parameters)
    assert [each.block.experts.number for each in inspection.plan.blocks] == [4, 4]
    with pytest.raises(nalora.NALoRAError, match=r"target_parameters: experts.gate_proj: .*experts.gate_up_proj"):
        inspect_model(str(tmp_path), target_parameters=["experts.gate_proj"])


def test_without_architectures_the_causal_model_is_built(tmp_path):
    llama_config(architectures=None).save_pretrained(tmp_path)
    assert inspect_model(str(tmp_path)).architecture == "LlamaForCausalLM"


def test_without_a_causal_model_the_bare_one_is_built(tmp_path):
    transformers.ViTConfig(**SMALL).save_pretrained(tmp_path)
    seen = inspect_model(str(tmp_path))
    assert seen.architecture == "ViTModel"
    assert {each.block.activation.name for each in seen.plan.blocks} == {"gelu"}


def test_a_model_that_training_refuses_is_named_with_the_reason(tmp_path, llama):
    transformers.BertConfig(**SMALL).save_pretrained(tmp_path / "bert")
    assert "bert, an encoder without a decoder" in inspect_model(str(tmp_path / "bert")).refusal
    assert inspect_model(str(llama)).refusal is None


def test_a_quantised_checkpoint_has_the_plan_of_a_dense_one(llama, tmp_path):
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    llama_config(quantization_config=quantised).save_pretrained(tmp_path / "quantised")
    assert inspect_model(str(tmp_path / "quantised")).plan.rows() == inspect_model(str(llama)).plan.rows()


def broken_json(folder):
    (folder / "config.json").write_text("{")


def foreign_json(folder):
    (folder / "config.json").write_text('{"colour": "green"}')


def binary(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")


def unknown_type(folder):
    (folder / "config.json").write_text('{"model_type": "no-such-type"}')


def impossible_sizes(folder):
    llama_config().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": -5}))


def heads_that_do_not_divide(folder):
    llama_config().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 33, "num_attention_heads": 4}))


def broken_adapter(folder):
    (folder / "adapter_config.json").write_text("{")


def adapter_of_another_kind(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3", "base_model_name_or_path": "."}')


def adapter_without_base(folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["gate_proj"]}')


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda folder: None, "neither config.json nor adapter_config.json"),
        # Below a heading of transformers', which says only that a check failed.
        (heads_that_do_not_divide, r"The hidden size \(33\) is not a multiple of the number of attention heads \(4\)"),
        (broken_json, "no readable JSON"),
        (binary, "no readable JSON"),
        (foreign_json, "model_type"),
        (unknown_type, "no-such-type"),
        (impossible_sizes, "cannot be built"),
        (broken_adapter, "adapter_config.json"),
        (adapter_of_another_kind, "IA3Config"),
        (adapter_without_base, "no base_model_name_or_path"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_cannot_be_inspected_is_named(tmp_path, make, found):
    make(tmp_path)
    with pytest.raises(nalora.NALoRAError, match=found) as refusal:
        inspect_model(str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "missing.json", "no spaces please"])
def test_a_missing_path_never_contacts_the_hub(monkeypatch, name):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(nalora.NALoRAError, match="no such file or folder"):
        inspect_model(name)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("We couldn't connect to the hub, and found no cached files.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(nalora.NALoRAError, match="couldn't connect") as refusal:
        inspect_model("someone/some-model")
    assert "\n" not in str(refusal.value)


def test_unknown_target_modules_are_answered_with_the_known_ones(llama):
    with pytest.raises(nalora.NALoRAError, match=r"among q_proj, .*gate_proj, up_proj, down_proj, lm_head\."):
        inspect_model(str(llama), target_modules=["gate"])
    with pytest.raises(nalora.NALoRAError, match=r"no layer called gate;.* did you mean gate_proj\?"):
        inspect_model(str(llama), target_modules=["q_proj", "gate"])
    assert inspect_model(str(llama), target_modules=["mlp.gate_proj", "q_proj"]).plan.blocks


@pytest.mark.parametrize("settings", [{"rank": 4}, {"target_modules": ["gate_proj"]}])
def test_an_adapter_leaves_no_choice_of_rank_and_targets(llama, tmp_path, settings):
    folder = save_adapter(llama, tmp_path / "adapter")
    with pytest.raises(nalora.NALoRAError, match="saved adapter"):
        inspect_model(folder, **settings)


def test_the_named_model_needs_neither_network_nor_weights(monkeypatch):
    monkeypatch.setattr(gguf_cache, "dense_folder", lambda _: pytest.fail("made dense weights"))
    seen = inspect_model("smollm2-135m")
    assert (seen.architecture, len(seen.plan.blocks)) == ("LlamaForCausalLM", 30)
