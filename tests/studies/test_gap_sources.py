"""Every arm of studies/gap-sources.yaml trains what its name says, in a whole run of two steps of a small model."""

from __future__ import annotations

import math

import pytest
import tiny
from safetensors.torch import load_file

from nalora.runs.folder import RunFolder
from nalora.runs.settings import check
from nalora.studies.study import read
from nalora.training.run import train

STUDY = read("gap-sources")
ARMS = {arm.name: arm for arm in STUDY.arms}
ATTENTION, FFN = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
PARTS = {name.partition("_")[0]: {name} for name in sorted(ATTENTION | FFN)} | {
    "FFN": FFN,
    "attention": ATTENTION,
    "embeddings": {"embed_tokens"},
    "norms": {"norm", "input_layernorm", "post_attention_layernorm"},
}
# Which modules each arm trains whole, and which have adapters.
EXPECTED = {
    "lora": (set(), ATTENTION | FFN),
    "full fine-tuning": (ATTENTION | FFN | PARTS["embeddings"] | PARTS["norms"], set()),
    "all linear layers whole": (ATTENTION | FFN, set()),
    "FFN alone whole": (FFN, set()),
    "attention alone whole": (ATTENTION, set()),
    **{f"r = {rank}": (set(), ATTENTION | FFN) for rank in (4, 16, 32, 64, 128, 256)},
    **{f"{name} whole": (part, (ATTENTION | FFN) - part) for name, part in PARTS.items()},
    **{f"{name} alone": (set(), part) for name, part in PARTS.items() if name not in ("embeddings", "norms")},
}
# Those of the model, by their input and output dimensions: SmolLM2-135M has 9 heads, 3 for keys and values.
DIMENSIONS = {"q_proj": 576 + 576, "o_proj": 576 + 576, "k_proj": 576 + 192, "v_proj": 576 + 192} | dict.fromkeys(
    FFN, 576 + 1536
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)  # as SmolLM2


def test_the_arms_are_those_of_the_question():
    assert set(ARMS) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_arm_trains_what_its_name_says(name, base, tmp_path):
    settings = dict(ARMS[name].settings)
    if "rank_pattern" in settings:
        settings |= {"rank_pattern": {"k_proj": 2, "v_proj": 2}, "alpha_pattern": {"k_proj": 4, "v_proj": 4}}
    run = check({
        **settings, "model": base, "task": "gym/chain_sum", "train_size": 16, "test_size": 4, "rank": 4, "alpha": 8,
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, "steps": 2, "batch_size": 4,
        "learning_rate": ARMS[name].learning_rates[0] if ARMS[name].learning_rates else 4e-3, "max_length": 128,
        "output": str(tmp_path / "run"), "device": "cpu", "warmup": 0.0,
    })  # fmt: skip
    result = train(run)
    assert math.isfinite(result["train_loss"])
    folder = RunFolder(tmp_path / "run")
    before = load_file(f"{base}/model.safetensors")
    if folder.model.is_dir():
        after = load_file(folder.model / "model.safetensors")
        whole = {key.split(".")[-2] for key in before if (after[key] != before[key]).any()}
        adapted = set()
    else:
        after = load_file(folder.adapter / "adapter_model.safetensors")
        adapted = {key.split(".")[-3] for key in after if ".lora_" in key}
        plain = {key.removeprefix("base_model.model."): key for key in after if ".lora_" not in key}
        # The head of a tied model is saved next to the embedding that it shares.
        assert {key for key in plain if key not in before} <= {"lm_head.weight"}
        whole = {
            key.split(".")[-2] for key, full in plain.items() if key in before and (after[full] != before[key]).any()
        }
    assert (whole, adapted) == EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.endswith(" alone")])
def test_one_part_alone_has_as_many_parameters_as_lora(name):
    _, adapted = EXPECTED[name]
    own = ARMS[name].settings["rank"] * sum(DIMENSIONS[module] for module in adapted)
    assert own == pytest.approx(8 * sum(DIMENSIONS.values()), rel=0.0125)
    assert ARMS[name].settings["alpha"] == 2 * ARMS[name].settings["rank"]
