"""Model cards: only chosen settings, text of others kept out of code and tables, and code that is valid Python."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest

from nalora.models.loading import ModelSpec
from nalora.report.model_card import Card, chosen_settings, settings_table
from nalora.runs.settings import check
from nalora.runs.targets import Target

# A name that would end a string, a cell or a code block.
ODD = 'a"; print("x") | `b` <img src=x>\n```'


def card(form: str, base: str = "owner/name", name: str = "mine", chat: bool = True, adapter=None, **options) -> str:
    target = Target("adapter", "adapter" if adapter else "model", ModelSpec(base), adapter)
    return Card(target, form, name, base, chat, file="m.gguf", rank=8, **options).text()


def code(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("form", ["peft", "merged", "gguf", "vllm"])
def test_the_code_is_python_whatever_names_contain(form, chat):
    (block,) = code(card(form, ODD.replace("\n", " ").replace("`", ""), chat=chat), "python")
    called = {
        node.func.id for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }
    assert called <= {"print", "Llama", "model", "tokenizer"}
    assert block.count("print(") <= 2
    assert ("messages" in block) == chat


def test_the_serving_line_quotes_names():
    (line,) = code(card("vllm", "owner/na me", name="my adapter"), "sh")
    words = shlex.split(line)
    assert words[:3] == ["vllm", "serve", "owner/na me"]
    assert words[-1] == "my adapter=."


def test_facts_and_names_cannot_leave_their_place():
    text = card("merged", facts=[ODD])
    assert "<img" not in text
    assert text.count("```") == 2
    assert "base_model: owner/name" in text
    assert "base_model" not in card("merged", base="/somewhere/local")


def test_only_chosen_settings_are_listed():
    run = check({"model": "m", "task": "gsm8k", "method": "na-lora", "keep_ratio": 0.5, "rank": 8, "steps": 7})
    assert chosen_settings(run) == {"keep_ratio": 0.5, "steps": 7}
    table = settings_table(chosen_settings(run, ["rank", "target_modules"]) | {"test": "/home/me/held out.jsonl"})
    assert table.splitlines()[2:] == [
        "| `rank` | 8 |",
        "| `target_modules` | all-linear |",
        "| `steps` | 7 |",
        "| `keep_ratio` | 0.5 |",
        "| `test` | held out.jsonl |",
    ]


def test_the_settings_of_an_adapter_without_a_run_are_its_configuration_s(tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    text = card("peft", adapter=tmp_path)
    assert "| `rank` | 4 |\n| `alpha` | 12 |\n| `target_modules` | ['q_proj', 'v_proj'] |" in text


def test_a_path_of_this_machine_is_marked(tmp_path):
    for form in ("peft", "vllm"):
        assert card(form, base=str(tmp_path)).count("of the machine that exported it") == 2
        assert "machine" not in card(form, base="owner/name")


def test_a_base_from_a_gguf_file_is_called_dequantised(tmp_path):
    assert "dequantised" not in card("merged", base=str(tmp_path))
    (tmp_path / "NALORA-MANIFEST").write_text("{}")
    assert "dequantised from a GGUF file" in card("merged", base=str(tmp_path))
    assert "dequantised from a GGUF file" in card("merged", base="model.gguf")
