"""Models that cannot write text are refused in one sentence, before their weights are loaded."""

from __future__ import annotations

import pytest
import tiny
import transformers

import nalora
from nalora.evaluation.targets import Request, evaluate_target
from nalora.models.kinds import is_encoder_only
from nalora.models.loading import ModelSpec, load
from nalora.runs.settings import check
from nalora.training.run import train

SMALL = dict(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def saved(folder, config) -> str:
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def no_weights(monkeypatch):
    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.parametrize("config", [transformers.BertConfig, transformers.RobertaConfig, transformers.MPNetConfig])
@pytest.mark.parametrize("task", ["gym/chain_sum", "sst2"])
def test_an_encoder_is_refused_in_training_and_evaluation(tmp_path, no_weights, config, task):
    model = saved(tmp_path / "model", config(**SMALL))
    data = {"data_dir": tiny.saved_sst2(tmp_path)} if task == "sst2" else {}
    run = check({"model": model, "task": task, "output": str(tmp_path / "run"), "device": "cpu", **data})
    for use in (lambda: train(run), lambda: evaluate_target(model, Request(task=task, **data), device="cpu")):
        with pytest.raises(nalora.NALoRAError, match="an encoder without a decoder") as raised:
            use()
        assert "\n" not in str(raised.value)


def test_an_encoder_decoder_is_refused_where_a_decoder_is_needed(tmp_path, no_weights):
    with pytest.raises(nalora.NALoRAError, match="t5, an encoder-decoder"):
        load(ModelSpec(tiny.saved_t5(tmp_path), "causal", device="cpu"))


def test_decoders_are_no_encoders():
    for config in (transformers.LlamaConfig(), transformers.GPT2Config(), transformers.BertConfig(is_decoder=True)):
        assert not is_encoder_only(config)
    assert not is_encoder_only(transformers.BartConfig())
    assert is_encoder_only(transformers.BertConfig())
