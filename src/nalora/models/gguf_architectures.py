"""Models of transformers as llama.cpp computes them: the header's settings, names of tensors and changed weights.

llama.cpp has code of its own for each architecture, in which some choices are fixed. A configuration that it would
compute otherwise is refused, since the file would load there and answer differently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nalora.errors import NALoRAError

# llama.cpp's name of an architecture by transformers' model type.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3_text": "gemma3"}
# Activations that llama.cpp computes in the FFN of each architecture.
_ACTIVATIONS = {"llama": ("silu", "swish"), "gemma": ("gelu_pytorch_tanh",)}
# The number of layers of the model whose attention is scaled by its width per head instead of by `head_dim`.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Every how many layers one sees the whole context where the file says nothing else.
_PERIODS = {"gemma2": 2, "gemma3": 6}
_IN_MULTIMODAL = re.compile(r"^model\.language_model\.")
_NOT_LANGUAGE = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class Architecture:
    """An architecture of llama.cpp with the settings of one model.

    Args:
        config: the model's configuration in transformers.

    Raises:
        NALoRAError: an architecture that is not converted, or a setting that llama.cpp computes differently.
    """

    def __init__(self, config: Any) -> None:
        config = config.get_text_config()
        if config.model_type not in ARCHITECTURES:
            raise NALoRAError(
                "export to GGUF",
                found=f"a model of the architecture {config.model_type!r}",
                expected=f"one of {', '.join(ARCHITECTURES)}",
                fix="export --to merged and convert the folder with llama.cpp's convert_hf_to_gguf.py",
            )
        self.config, self.name = config, ARCHITECTURES[config.model_type]
        self.is_gemma = self.name.startswith("gemma")
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = dict(config.rope_parameters)
        # Layers with a sliding window have their own frequencies in Gemma 3; all others share one set.
        self.rope = rope.get("full_attention", rope)
        self.local_rope = rope.get("sliding_attention") if self.name == "gemma3" else None
        self._refuse_what_differs()

    def settings(self) -> dict[str, Any]:
        """Return the header's values by the names of `gguf.GGUFWriter`'s methods, without their ``add_``."""
        config = self.config
        values: dict[str, Any] = {
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "head_count": config.num_attention_heads,
            "head_count_kv": config.num_key_value_heads,
            "key_length": self.head_size,
            "value_length": self.head_size,
            "rope_dimension_count": self.head_size,
            "layer_norm_rms_eps": config.rms_norm_eps,
            "rope_freq_base": float(self.rope["rope_theta"]),
            "vocab_size": config.vocab_size,
        }
        if self.is_gemma:
            values["sliding_window"] = config.sliding_window
            pattern = [kind == "sliding_attention" for kind in config.layer_types]
            period = _PERIODS[self.name]
            if pattern != [(layer + 1) % period > 0 for layer in range(len(pattern))]:
                values["sliding_window_pattern"] = pattern
            values["attn_logit_softcapping"] = config.attn_logit_softcapping
            values["final_logit_softcapping"] = config.final_logit_softcapping
        if self.local_rope:
            values["rope_freq_base_swa"] = float(self.local_rope["rope_theta"])
        return {name: value for name, value in values.items() if value is not None} | self._rope_scaling()

    def tensor_names(self) -> Callable[[str], str]:
        """Return the function from a parameter's name in transformers to that in the file; empty if it is left out.

        That function raises NALoRAError for a parameter that the architecture has not in llama.cpp.
        """
        import gguf

        number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.name)
        table = gguf.get_tensor_name_map(number, self.config.num_hidden_layers)

        def name_in_file(name: str) -> str:
            if name.startswith(_NOT_LANGUAGE):
                return ""
            known: str | None = table.get_name(_IN_MULTIMODAL.sub("model.", name), try_suffixes=(".weight", ".bias"))
            if known is None:
                raise NALoRAError(
                    name,
                    found=f"a parameter that llama.cpp's {self.name} has not",
                    expected="the parameters of the published architecture",
                    fix="export --to merged",
                )
            return known

        return name_in_file

    def changed(self, name: str, weight: Tensor) -> Tensor:
        """Return a parameter as llama.cpp expects it.

        In a Llama the two halves of each query and key head become pairs, since llama.cpp rotates neighbours where
        transformers rotates halves. Gemma multiplies by 1 + w in its norms, llama.cpp by the value in the file.
        """
        layer, _, kind = name.rpartition(".")
        if self.name == "llama" and layer.endswith(("q_proj", "k_proj")):
            halves = weight.reshape(-1, 2, self.head_size // 2, *weight.shape[1:])
            return halves.transpose(1, 2).reshape(weight.shape)
        if self.is_gemma and layer.endswith("norm") and kind == "weight":
            return weight.float() + 1
        return weight

    def additional(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that are no parameters: by how much Llama 3's rope scaling divides each frequency."""
        if self.rope.get("rope_type") != "llama3":
            return
        factor, low, high = (float(self.rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float64) / self.head_size
        wavelengths = 2 * math.pi * float(self.rope["rope_theta"]) ** exponents
        # The number of turns within the original context: few turns are slowed down, many are left as they are.
        turns = self.rope["original_max_position_embeddings"] / wavelengths
        share = ((turns - low) / (high - low)).clamp(0, 1)
        yield "rope_freqs.weight", (1 / ((1 - share) / factor + share)).float()

    def _rope_scaling(self) -> dict[str, Any]:
        kind = self.rope.get("rope_type", "default")
        if kind in ("default", "llama3"):
            return {}
        values = {"rope_scaling_type": kind, "rope_scaling_factor": float(self.rope["factor"])}
        if kind == "yarn":
            values["rope_scaling_orig_ctx_len"] = int(self.rope["original_max_position_embeddings"])
        return values

    def _refuse_what_differs(self) -> None:
        config, rope = self.config, self.rope
        kind = rope.get("rope_type", "default")
        kinds = {"llama": ("default", "linear", "llama3", "yarn"), "gemma2": ("default",)}
        plain = ("default", "linear", "yarn") if not self.is_gemma else ("default", "linear")
        self._check("rope_type", kind, kind in kinds.get(self.name, plain))
        for setting, default in (("beta_fast", 32), ("beta_slow", 1), ("attention_factor", None), ("truncate", True)):
            value = rope.get(setting, default)
            self._check(setting, value, kind != "yarn" or value in (default, None))
        for setting in ("mscale", "mscale_all_dim"):
            self._check(setting, rope.get(setting), not rope.get(setting))
        partial = rope.get("partial_rotary_factor", 1.0) or 1.0
        self._check("partial_rotary_factor", partial, partial == 1)
        if self.local_rope:
            self._check("rope_type", local := self.local_rope.get("rope_type", "default"), local == "default")
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        self._check("hidden_act", activation, activation in _ACTIVATIONS["gemma" if self.is_gemma else "llama"])
        windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        self._check("layer_types", "sliding_attention", self.is_gemma or not windows)
        if self.name != "llama":
            bias = bool(getattr(config, "attention_bias", False))
            self._check("attention_bias", bias, not bias)
        if self.is_gemma:
            layers, heads = config.num_hidden_layers, config.num_attention_heads
            by_width = layers == _SCALED_BY_WIDTH[self.name]
            scale = config.hidden_size // heads if by_width else self.head_size
            self._check("query_pre_attn_scalar", config.query_pre_attn_scalar, config.query_pre_attn_scalar == scale)
            both = config.attn_logit_softcapping and config.final_logit_softcapping
            self._check("final_logit_softcapping", None, self.name == "gemma3" or bool(both))
            capped = config.attn_logit_softcapping
            self._check("attn_logit_softcapping", capped, self.name == "gemma2" or capped is None)
            mirrored = getattr(config, "use_bidirectional_attention", None)
            self._check("use_bidirectional_attention", mirrored, not mirrored)

    def _check(self, setting: str, value: Any, holds: bool) -> None:
        if not holds:
            raise NALoRAError(
                "export to GGUF",
                found=f"{setting}: {value!r} in the model's configuration",
                expected=f"a setting with which llama.cpp computes the same as transformers for {self.name}",
                fix="export --to merged",
            )
