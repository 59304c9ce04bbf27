"""The tuners of the installed PEFT with a line each, from its files alone: to import PEFT takes four seconds."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

PREFIX = "peft/"

_REGISTERED = re.compile(r"register_peft_method\((.*?)\)", re.DOTALL)
_ARGUMENT = re.compile(r"\b(name|config_cls)=\"?(\w+)")
_PROMPTS = "method: lora; it trains virtual tokens in front of the prompt, which a run's rows of tokens do not have"

# Tuners that no run trains, with what to use instead and why.
UNSUPPORTED = {
    "adalora": "method: adalora, which also calls PEFT's rank allocation at every step",
    "adaption_prompt": "method: lora; prompts inside attention are not a change of linear layers",
    "cartridge": _PROMPTS,
    "cpt": _PROMPTS,
    "multitask_prompt_tuning": _PROMPTS,
    "p_tuning": _PROMPTS,
    "poly": "method: peft/lora; Poly routes by task ids, which no run has",
    "prefix_tuning": _PROMPTS,
    "prompt_tuning": _PROMPTS,
    "shadow": "method: peft/lora; Shadow replaces the model's forward pass, which the Trainer calls otherwise",
    "trainable_tokens": "method: full; it trains rows of the embedding, which no run names",
    "xlora": "method: lora; X-LoRA mixes adapters that are trained already",
}
# What each tuner trains. PEFT's own docstrings describe arguments, and some of them another tuner.
DESCRIPTIONS = {
    "adamss": "AdaMSS: low-rank updates in subspaces of the weight, clustered from its SVD",
    "beft": "BEFT: bias terms of chosen projections",
    "boft": "BOFT: an orthogonal rotation of the weight as a product of butterfly factors",
    "bone": "Bone: one block of values, repeated over the weight",
    "c3a": "C³A: circular convolutions of blocks",
    "deft": "DEFT: a low-rank subspace of the weight replaced by a trained one",
    "delora": "DeLoRA: LoRA with direction and strength of the update separated",
    "fourierft": "FourierFT: few coefficients of the update's Fourier transform",
    "frod": "FRoD: a sparse rotation and a diagonal between directions shared by layers",
    "glora": "GLoRA: scaling and shift of weight, input and bias",
    "gralora": "GraLoRA: a LoRA on each of k × k blocks of the weight",
    "hira": "HiRA: the weight times a low-rank matrix, entry by entry",
    "hra": "HRA: a product of Householder reflections",
    "ia3": "(IA)³: a factor for each channel of keys, values and FFN",
    "lily": "Lily: LoRA whose B matrices are shared between layers and mixed by a router",
    "ln_tuning": "the weights of the norm layers",
    "loha": "LoHa: the product, entry by entry, of two low-rank matrices",
    "lokr": "LoKr: a Kronecker product of small matrices",
    "lora": "LoRA with every field of PEFT's LoraConfig",
    "miss": "MiSS: one small matrix, repeated over shards of the weight",
    "oft": "OFT: an orthogonal rotation of the weight in blocks",
    "osf": "OSF: singular directions of the weight with small singular values",
    "peanut": "PEANuT: the update as a small network of the weight itself",
    "psoft": "PSOFT: a rotation inside the principal subspace of the weight",
    "pvera": "PVeRA: VeRA with vectors drawn from a trained distribution",
    "randlora": "RandLoRA: a sum of fixed random low-rank matrices with trained scales, of full rank",
    "road": "RoAd: rotations of pairs of output channels",
    "shira": "SHiRA: a sparse set of entries of the weight",
    "supertuning": "Super-Tuning: the largest entries of the weight, optionally with LoRA",
    "tinylora": "TinyLoRA: a few numbers, projected by fixed random tensors onto the weight's SVD",
    "unilora": "Uni-LoRA: one vector for all layers, projected by a fixed random matrix",
    "vblora": "VB-LoRA: LoRA composed of vectors from a bank that all layers share",
    "vera": "VeRA: trained scales of random matrices that all layers share",
    "waveft": "WaveFT: few coefficients of the update's wavelet transform",
}


@functools.cache
def registered() -> dict[str, str]:
    """Return the configuration classes of all tuners that PEFT registers, by the tuner's name."""
    package = importlib.util.find_spec("peft")
    folders = (package.submodule_search_locations if package else None) or []
    files = [file for folder in folders for file in sorted(Path(folder, "tuners").glob("*/__init__.py"))]
    calls = (call for file in files for call in _REGISTERED.findall(file.read_text(encoding="utf-8")))
    arguments = [dict(_ARGUMENT.findall(call)) for call in calls]
    return {found["name"]: found["config_cls"] for found in arguments if len(found) == 2}


def described() -> dict[str, tuple[str, str]]:
    """Return (description, configuration class) of every tuner that a run can train, by the tuner's name."""
    return {
        name: (DESCRIPTIONS.get(name, f"PEFT's {config.removesuffix('Config')}"), f"peft.{config}")
        for name, config in sorted(registered().items())
        if name not in UNSUPPORTED
    }
