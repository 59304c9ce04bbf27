"""A GGUF file has the model's weights: read back by the gguf package and by transformers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from exported_models import ARCHITECTURES, CHAT, TRICKY, model_for, tokenizer_for

import nalora
from nalora.models.gguf_architectures import Architecture
from nalora.models.gguf_header import read_header
from nalora.models.gguf_vocabulary import vocabulary_of
from nalora.models.gguf_writer import write_gguf


def written(path, model, tokenizer, **options):
    vocabulary = vocabulary_of(tokenizer, model.get_input_embeddings().weight.shape[0])
    write_gguf(path, Architecture(model.config), vocabulary, model.state_dict(), **options)
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_reads_the_weights_back(architecture, tmp_path):
    tokenizer = tokenizer_for(architecture)
    # transformers' reader takes Qwen 3's published size of heads for granted.
    model = model_for(architecture, len(tokenizer) + 3, **{"head_dim": 128} if architecture == "qwen3" else {})
    done = []
    path = written(tmp_path / "model.gguf", model, tokenizer, precision="f32", report=lambda *each: done.append(each))
    assert done[-1][1] == done[-1][2] == len(gguf.GGUFReader(path).tensors)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert read.config.model_type == architecture
    state = read.state_dict()
    for name, weight in model.state_dict().items():
        # Gemma's norms lose the last bit where 1 is added and subtracted again.
        torch.testing.assert_close(state[name], weight, rtol=0, atol=2e-7 if "norm" in name else 0)


def test_the_header_has_tokenizer_and_template(tmp_path):
    tokenizer = tokenizer_for("llama")
    path = written(tmp_path / "m.gguf", model_for("llama", 448), tokenizer, name="mine", chat_template=CHAT)
    header = read_header(path)
    assert header.values["general.name"] == "mine"
    assert header.chat_template == CHAT
    assert (header.adds("bos"), header.adds("eos")) == (True, False)
    assert [header.token_id(name) for name in ("bos", "eos", "padding", "unknown")] == [1, 2, 3, 0]
    assert header.values["tokenizer.ggml.pre"] == "llama-bpe"
    read = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert read.convert_ids_to_tokens(list(range(400))) == tokenizer.convert_ids_to_tokens(list(range(400)))
    assert [read(text, add_special_tokens=False).input_ids for text in TRICKY[3:5]] == [
        tokenizer(text, add_special_tokens=False).input_ids for text in TRICKY[3:5]
    ]


@pytest.mark.parametrize(("precision", "bits"), [("f16", 11), ("bf16", 8), ("q8_0", 7)])
def test_matrices_are_rounded_once_and_vectors_not_at_all(precision, bits, tmp_path):
    model = model_for("qwen3", 448)
    path = written(tmp_path / "m.gguf", model, tokenizer_for("qwen3"), precision=precision)
    read = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    weight = model.model.layers[0].mlp.gate_proj.weight.detach().numpy()
    error = np.abs(read["blk.0.ffn_gate.weight"].reshape(weight.shape) - weight).max()
    assert 0 < error <= np.abs(weight).max() * 2.0**-bits
    norm = model.model.norm.weight.detach().numpy()
    assert np.array_equal(read["output_norm.weight"], norm)


def test_rows_that_q8_0_cannot_hold_are_float16(tmp_path):
    model = model_for("llama", 448, intermediate_size=40)
    path = written(tmp_path / "m.gguf", model, tokenizer_for("llama"), precision="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_tied_weights_are_written_once(tmp_path):
    names = {}
    for tied in (True, False):
        path = written(
            tmp_path / f"{tied}.gguf", model_for("llama", 448, tie_word_embeddings=tied), tokenizer_for("llama")
        )
        names[tied] = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert names[False] - names[True] == {"output.weight"}


def test_what_cannot_be_written_is_refused(tmp_path):
    model = model_for("llama", 448)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5
    with pytest.raises(nalora.NALoRAError, match=r"up_proj.*1e\+05.*bf16"):
        written(tmp_path / "m.gguf", model, tokenizer_for("llama"))
    untied = model_for("gemma2", 600, tie_word_embeddings=False)
    with pytest.raises(nalora.NALoRAError, match="lm_head"):
        written(tmp_path / "n.gguf", untied, tokenizer_for("gemma2"))
