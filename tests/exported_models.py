"""Small models of the architectures that GGUF files are written for, and tokenizers of each kind, trained here."""

from __future__ import annotations

import functools
import json

import transformers
from small_models import causal_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|turn|>")
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
EXPRESSIONS = {"llama-bpe": rf"{WORDS}\p{{N}}{{1,3}}{REST}", "qwen2": rf"{WORDS}\p{{N}}{REST}"}
# What tokenizers and their copies disagree on: spaces, digits, apostrophes, marks, scripts, bytes, special tokens.
TRICKY = [
    "", " ", "  ", "Hello", " Hello  world", "it's WE'LL they'Re", "1 12 123 1234 12345.678",
    "a\n\nb\r\n\r\n  c\t\td \n",
    "naïve café Straße", "日本語のテキスト。中文", "Привет, мир!", "مرحبا بالعالم",
    "😀👩‍👩‍👧 e\u0301 ﬁ ™ ½ Ⅷ", "x" * 40 + "!!!???---",
    "def f(x):\n    return x**2  # ok\n", "<s>not</s> special <|turn|>user\nhi", "\u00a0\u2003thin\u200b",
    "▁under_score ▁▁",
]  # fmt: skip
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text")
_CORPUS = [text for text in TRICKY for _ in range(3)] + ["the quick brown fox jumps over the lazy dog's back 2024 " * 4]


def _tokenizer(made: Tokenizer, bos: bool) -> transformers.PreTrainedTokenizerFast:
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    wrapped.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    if bos:
        from tokenizers.processors import TemplateProcessing

        wrapped.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped.chat_template = CHAT
    return wrapped


def byte_level(pre: str, *, bos: bool = False, nfc: bool = False, ignore_merges: bool | None = None):
    """A byte-level tokenizer of 400 tokens whose pre-tokenizer llama.cpp calls `pre`."""
    made = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe" if ignore_merges is None else ignore_merges))
    made.normalizer = normalizers.NFC() if nfc else None
    if pre == "gpt-2":
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        split = pre_tokenizers.Split(Regex(EXPRESSIONS.get(pre, pre)), "isolated")
        steps = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL[:4]), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(_CORPUS, trainer)
    return _tokenizer(made, bos)


@functools.cache
def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary as SentencePiece's: special tokens, bytes, pieces; and all pairs that form one, best piece first."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=260, show_progress=False)
    made.train_from_iterator(_CORPUS, trainer)
    described = json.loads(made.to_str())["model"]
    known = [*described["vocab"]]
    tokens = [*SPECIAL[:4], *(f"<0x{byte:02X}>" for byte in range(256)), *known]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    plain = set(known)
    merges = [
        (piece[:cut], piece[cut:])
        for piece in known
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    return vocabulary, merges


def sentencepiece(form: str = "gemma", *, bos: bool = True):
    """A tokenizer with SentencePiece's merges and byte fallback, in one of the forms that transformers writes."""
    vocabulary, merges = _pieces()
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    replaced = normalizers.Replace(" ", "▁")
    if form == "llama":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    elif form == "gemma":
        made.normalizer = replaced
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=form, split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[:4]])
    return _tokenizer(made, bos)


def tokenizer_for(architecture: str):
    """A tokenizer of the kind that models of this architecture have."""
    if architecture.startswith("gemma"):
        return sentencepiece("gemma")
    if architecture == "llama":
        return byte_level("llama-bpe", bos=True)
    return byte_level("qwen2", nfc=True)


def model_for(architecture: str, vocabulary: int, **settings):
    """A model whose gates, norms and attention are far from their defaults' zeros and ones."""
    import torch

    sizes = dict(vocab_size=vocabulary, hidden_size=64, intermediate_size=96, head_dim=16, num_key_value_heads=2)
    sizes |= dict(num_hidden_layers=3, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=3)
    if architecture.startswith("gemma"):
        sizes |= dict(query_pre_attn_scalar=16, sliding_window=8)
    elif architecture == "qwen2":
        del sizes["head_dim"]
    model = causal_model(architecture, **sizes | settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
