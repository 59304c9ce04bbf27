"""Small real models and batches for the tests."""

from __future__ import annotations

import peft
import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64


def llama(
    dtype: torch.dtype = torch.float64,
    layers: int = 2,
    target_modules="all-linear",
    seed: int = 0,
    lora_b: float = 0.05,
    spread: float = 3.0,
    ffn: int = 56,
    **lora,
) -> peft.PeftModel:
    """A Llama with LoRA on every linear layer, B ≠ 0 and gates spread over all three regimes."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="sdpa",
        initializer_range=0.1,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= spread
    return with_lora(model.to(dtype), target_modules, lora_b, **lora)


def with_lora(
    model: nn.Module, target_modules="all-linear", lora_b: float = 0.05, config=None, **lora
) -> peft.PeftModel:
    """The model with LoRA, or with the adapter of another configuration, GraLoRA's for example."""
    settings = dict(r=4, lora_alpha=8, target_modules=target_modules) | lora
    model = peft.get_peft_model(model, config or peft.LoraConfig(**settings), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and lora_b:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * lora_b).to(parameter)
    return model.train()


def tokens(batch: int = 4, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference over all parameters, relative to each one's norm."""
    assert one.keys() == other.keys()
    return max(((one[k] - other[k]).norm() / one[k].norm().clamp_min(1e-30)).item() for k in one)


def sum_loss(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Summed next-token loss over real tokens, so that splitting a batch only splits a sum. Scaled to order one."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    if mask is not None:
        losses = losses * mask[:, 1:].flatten()
    return losses.sum() / 40


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A token for every printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = ["<pad>", "</s>", "<unk>", "\n", *map(chr, range(32, 127))]
    made = Tokenizer(models.WordLevel({each: i for i, each in enumerate(characters)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def saved_llama(folder, layers: int = 2, hidden: int = 32, **settings) -> str:
    """A folder with a small Llama and its tokenizer, as `from_pretrained` reads them."""
    torch.manual_seed(0)
    made = tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(made),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        bos_token_id=None,
        **settings,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


def saved_gpt2(folder) -> str:
    """A folder with a small GPT-2, whose linear layers are Conv1D with transposed weights, and its tokenizer."""
    torch.manual_seed(0)
    made = tokenizer()
    config = transformers.GPT2Config(
        vocab_size=len(made),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=512,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        bos_token_id=None,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


def saved_t5(folder, **config) -> str:
    """A folder with a small T5 of one layer and its tokenizer."""
    torch.manual_seed(0)
    made = tokenizer()
    config = transformers.T5Config(
        vocab_size=len(made), d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4,
        decoder_start_token_id=made.pad_token_id, eos_token_id=made.eos_token_id, pad_token_id=made.pad_token_id,
        **config,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


def saved_bart(folder) -> str:
    """A folder with a small BART of one layer, without dropout, and its tokenizer."""
    torch.manual_seed(0)
    made = tokenizer()
    config = transformers.BartConfig(
        vocab_size=len(made), d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=512, dropout=0.0,
        decoder_start_token_id=made.pad_token_id, eos_token_id=made.eos_token_id, pad_token_id=made.pad_token_id,
        bos_token_id=made.pad_token_id, forced_eos_token_id=None,
    )  # fmt: skip
    transformers.BartForConditionalGeneration(config).save_pretrained(folder)
    made.save_pretrained(folder)
    return str(folder)


def saved_sst2(folder) -> str:
    """A folder with SST-2's files, of four sentences each."""
    words = {"train": ("good", "bad", "fine", "dull"), "dev": ("nice", "sad", "keen", "lame")}
    for split in ("train", "dev"):
        lines = [f"{word} film\t{1 - index % 2}" for index, word in enumerate(words[split])]
        (folder / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return str(folder)
