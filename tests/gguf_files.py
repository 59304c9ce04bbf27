"""Small GGUF files of a Llama, with a header of the test's choice."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

SPECIAL = ("<pad>", "<s>", "</s>", "<eot>", "<unk>")
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content + '<eot>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The 256 characters by which byte-level vocabularies write bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_llama(
    path: Path,
    *,
    model: str = "gpt2",
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    eot: bool = True,
    chat_template: str | None = CHAT,
    hidden: int = 32,
    layers: int = 2,
    quantised: bool = False,
    seed: int = 0,
) -> Path:
    """A Llama of random weights; its tokenizer is of bytes ("gpt2") or of SentencePiece's pieces ("llama")."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    # SentencePiece's own special pieces come first in every such vocabulary.
    plain = byte_characters() if model == "gpt2" else ["▁", *map(chr, range(33, 127)), "ab", "▁a"]
    merges = ["a b", "Ġ a"] if model == "gpt2" else []
    tokens = [*SPECIAL, *plain, *(merge.replace(" ", "") for merge in merges)]
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(hidden // 4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    if model == "gpt2":
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([0.0] * len(SPECIAL) + [-float(i) for i in range(len(tokens) - len(SPECIAL))])
    for name, add in (
        ("pad", writer.add_pad_token_id),
        ("s", writer.add_bos_token_id),
        ("/s", writer.add_eos_token_id),
    ):
        add(SPECIAL.index(f"<{name}>"))
    writer.add_unk_token_id(SPECIAL.index("<unk>"))
    if eot:
        writer.add_eot_token_id(SPECIAL.index("<eot>"))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if add_eos is not None:
        writer.add_add_eos_token(add_eos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    shapes = {"token_embd": (len(tokens), hidden), "output": (len(tokens), hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        block = {
            "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_output": (hidden, hidden),
            "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden), "ffn_gate": (2 * hidden, hidden),
            "ffn_up": (2 * hidden, hidden), "ffn_down": (hidden, 2 * hidden),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        values = np.ones(shape) if name.endswith("norm") else 0.1 * generator.standard_normal(shape)
        values = values.astype(np.float32)
        if quantised and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
