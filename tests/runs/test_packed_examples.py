"""Packing is refused for models in which packed examples would see each other, and leaves the others as they were."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers

import nalora
from nalora.runs.packed_examples import refuse_unless_isolated
from nalora.runs.settings import check
from nalora.training.run import train

SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FEED_FORWARD = {**SIZE, "intermediate_size": 64}
APART = {
    "llama": transformers.LlamaConfig(**FEED_FORWARD),
    "gpt2": transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    "gpt_neox": transformers.GPTNeoXConfig(**FEED_FORWARD),
    "mixtral": transformers.MixtralConfig(**FEED_FORWARD, num_key_value_heads=2, num_local_experts=4),
}
MIXED = {
    # With weights as small as its fresh ones, attention adds less than bfloat16 rounds.
    "bloom": transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2),
    "falcon": transformers.FalconConfig(**SIZE, alibi=True),
    "opt": transformers.OPTConfig(**SIZE, ffn_dim=64, word_embed_proj_dim=32),
    "mpt": transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4),
    "mamba": transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
}


def model_of(config, attention="sdpa"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", APART)
def test_models_that_use_positions_are_accepted(name, attention, dtype):
    refuse_unless_isolated(model_of(APART[name], attention).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXED)
def test_models_that_would_mix_examples_are_refused(name, dtype):
    attention = "eager" if name in ("bloom", "falcon", "mpt", "mamba") else "sdpa"
    with pytest.raises(nalora.NALoRAError, match=f"a {name} model, in which an example sees the one packed before it"):
        refuse_unless_isolated(model_of(MIXED[name], attention).to(dtype))


def test_the_model_and_the_draws_of_chance_stay_as_they_were():
    model = model_of(APART["llama"]).train()
    model.model.layers[0].eval()
    modes = [each.training for each in model.modules()]
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.get_rng_state()
    refuse_unless_isolated(model)
    assert [each.training for each in model.modules()] == modes
    assert model.config.use_cache
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], each) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_an_encoder_decoder_is_refused_before_it_trains(tmp_path):
    run = check({
        "model": tiny.saved_t5(tmp_path / "t5"), "task": "sst2", "data_dir": tiny.saved_sst2(tmp_path), "packing": True,
        "device": "cpu", "output": str(tmp_path / "run"), "steps": 1, "batch_size": 4,
    })  # fmt: skip
    with pytest.raises(nalora.NALoRAError, match="packing: true: found an encoder-decoder"):
        train(run)
    assert not (tmp_path / "run").exists(), "the corrected run may start there"


def test_a_decoder_that_mixes_them_is_refused_before_it_trains(tmp_path):
    made = tiny.tokenizer()
    config = transformers.BloomConfig(vocab_size=len(made), hidden_size=32, n_layer=1, n_head=4)
    model_of(config, "eager").save_pretrained(tmp_path / "bloom")
    made.save_pretrained(tmp_path / "bloom")
    settings = {
        "model": str(tmp_path / "bloom"), "task": "gym/chain_sum", "train_size": 8, "test_size": 2,
        "device": "cpu", "output": str(tmp_path / "run"), "steps": 1, "batch_size": 4, "max_length": 256,
    }  # fmt: skip
    with pytest.raises(nalora.NALoRAError, match="a bloom model"):
        train(check({**settings, "packing": True}))
    assert train(check(settings))["steps"] == 1
