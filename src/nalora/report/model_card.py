"""The model card of an exported model: what it is, what it was trained on, its results, and code that loads it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nalora import __version__
from nalora.files import expanded
from nalora.models import gguf_cache, loading
from nalora.models.adapters import adapter_config
from nalora.report.evaluations import label, read_evaluations
from nalora.runs.folder import RunFolder
from nalora.runs.settings import Run
from nalora.runs.targets import Target
from nalora.tasks.text_measures import title_of

# Settings that the card names elsewhere, or that say nothing about the model.
_ELSEWHERE = {"model", "task", "output", "device", "method", "log_every", "save_every", "snapshot_every", "data_dir"}
# Settings of every adapter, which are listed whether they were chosen or not, by their names in PEFT's configuration.
_OF_ADAPTERS = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LIBRARIES = {"peft": "peft", "vllm": "peft", "merged": "transformers", "gguf": "gguf"}
_TITLES = {
    "peft": "a PEFT adapter",
    "vllm": "a LoRA adapter with one rank and one scaling, for vLLM",
    "merged": "the base model with the adapter merged into its weights",
    "gguf": "one GGUF file for llama.cpp, with the adapter merged into the weights",
}


@dataclass(frozen=True)
class Card:
    """What a model card states.

    Args:
        target: the exported run, adapter or model.
        form: ``peft``, ``merged``, ``gguf`` or ``vllm``.
        name: of the exported folder.
        base: what the base model is loaded from: a hub id or an absolute path.
        chat: whether prompts are made by the tokenizer's chat template.
        facts: further sentences: the check of the export, how weights were rounded, what differs.
        file: the name of the GGUF file.
        rank: the value of --max-lora-rank.
    """

    target: Target
    form: str
    name: str
    base: str
    chat: bool
    facts: Sequence[str] = ()
    file: str = ""
    rank: int = 0

    def text(self) -> str:
        """Return the card in Markdown."""
        run = self.target.run
        parts = [
            self._front(),
            f"# {_plain(self.name)}",
            self._first_sentences(run.run if run else None),
            *_section("Export", "\n".join(f"- {_plain(fact)}" for fact in self.facts)),
            *_section("Settings", self._settings()),
            *_section("Results", results_table(run.folder, run.run) if run else ""),
            *_section("Load it", self._loading()),
        ]
        return "\n\n".join(parts) + "\n"

    def _front(self) -> str:
        lines = [f"library_name: {_LIBRARIES[self.form]}", "tags: [nalora, lora]"]
        if not self._is_local and _HUB_ID.fullmatch(self.base):
            lines.insert(0, f"base_model: {self.base}")
        return "\n".join(["---", *lines, "---"])

    @property
    def _is_local(self) -> bool:
        return loading.is_path(self.base)

    def _settings(self) -> str:
        adapter, run = self.target.adapter, self.target.run
        if run:
            return settings_table(chosen_settings(run.run, _OF_ADAPTERS.values() if adapter else ()))
        config = adapter_config(adapter) if adapter else {}
        return settings_table({name: config[key] for key, name in _OF_ADAPTERS.items() if config.get(key)})

    def _first_sentences(self, run: Run | None) -> str:
        name = self.target.spec.name
        dequantised = is_dequantised(name)
        base = f"`{_plain(name)}`" + (", dequantised from a GGUF file" if dequantised else "")
        if loading.is_path(name):
            base += " (a path of the machine that exported it; no other name is known)"
        lines = [f"This is {_TITLES[self.form]}.", "", f"- Base model: {base}"]
        if run:
            lines += [
                f"- Data: `{_plain(_without_folder(run.settings.task))}`",
                f"- Method: {run.method.title} (`{run.method.name}`)",
            ]
            lines += [f"- Reference: {run.method.reference}"] if run.method.reference else []
        return "\n".join([*lines, f"- Made by nalora {__version__}"])

    def _loading(self) -> str:
        if self.form == "gguf":
            return f"{_code(*self._llama_cpp())}\n\n{_code(*self._programs(), language='sh')}"
        served = ""
        if self._is_local and self.form != "merged":
            served = "The path of the base model is that of the machine that exported it: replace it by yours.\n\n"
        if self.form == "vllm":
            adapter = shlex.quote(f"{self.name}=.")
            options = f"--enable-lora --max-lora-rank {self.rank} --lora-modules {adapter}"
            line = f"vllm serve {shlex.quote(self.base)} {options}"
            served += f"In this folder:\n\n{_code(line, language='sh')}\n\nThe same adapter in PEFT:\n\n"
        return served + _code(*self._transformers())

    def _llama_cpp(self) -> list[str]:
        ask = ['print(model("Hello", max_tokens=64)["choices"][0]["text"])']
        if self.chat:
            ask = [
                'messages = [{"role": "user", "content": "Hello!"}]',
                "answer = model.create_chat_completion(messages, max_tokens=64)",
                'print(answer["choices"][0]["message"]["content"])',
            ]
        return ["from llama_cpp import Llama", "", f"model = Llama({self.file!r}, n_ctx=2048)", *ask]

    def _programs(self) -> list[str]:
        file = shlex.quote(self.file)
        create = f"ollama create {shlex.quote(self.name)} -f Modelfile"
        return [f"llama-server -m {file}", f"echo {shlex.quote(f'FROM ./{self.file}')} > Modelfile && {create}"]

    def _transformers(self) -> list[str]:
        auto = "AutoModelForSeq2SeqLM" if self.target.spec.kind == "seq2seq" else "AutoModelForCausalLM"
        imports = [f"from transformers import {auto}, AutoTokenizer", ""]
        load = [f'model = {auto}.from_pretrained(".")  # this folder']
        if self.form != "merged":
            imports.insert(0, "from peft import PeftModel")
            load = [
                f"base = {auto}.from_pretrained({self.base!r})",
                'model = PeftModel.from_pretrained(base, ".")  # this folder',
            ]
        ask = ['inputs = tokenizer("Hello", return_tensors="pt")']
        if self.chat:
            ask = [
                'messages = [{"role": "user", "content": "Hello!"}]',
                "inputs = tokenizer.apply_chat_template(",
                '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
                ")",
            ]
        answer = ["answer = model.generate(**inputs, max_new_tokens=64)", "print(tokenizer.decode(answer[0]))"]
        return [*imports, *load, 'tokenizer = AutoTokenizer.from_pretrained(".")', *ask, *answer]


def chosen_settings(run: Run, always: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings of a run that differ from their defaults, and those that are `always` of interest."""
    defaults: dict[str, Any] = dict(run.method.defaults())
    for field in dataclasses.fields(run.settings):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return {
        name: value
        for name, value in run.to_dict().items()
        if name not in _ELSEWHERE and value is not None
        if name in always or name not in defaults or defaults[name] != value
    }


def settings_table(settings: Mapping[str, Any]) -> str:
    """Return settings as a Markdown table, files by their names alone; nothing without settings."""
    rows = [(f"`{_plain(name)}`", _plain(_without_folder(value))) for name, value in settings.items()]
    return _table(("setting", "value"), rows) if rows else ""


def results_table(folder: RunFolder, run: Run) -> str:
    """Return the evaluations of a run, base model and adapted model, with 95 % intervals, as a Markdown table."""
    (evaluations,) = label([read_evaluations(folder.evaluations, run.to_dict(), [])])
    rows: list[tuple[str, ...]] = []
    for task, by_model in evaluations.items():
        for model, summary in by_model.items():
            title = {"base": "base model", "adapted": "this model"}.get(model, model)
            measures = {title_of(name): measured for name, measured in summary["measures"].items()}
            if summary["target_loss"]:
                measures["loss of the answers"] = summary["target_loss"]
            rows += [
                (_plain(task), title, _plain(name), *_with_interval(measured), str(summary.get("examples", "")))
                for name, measured in measures.items()
            ]
    return _table(("task", "model", "measure", "value", "95 % interval", "examples"), rows) if rows else ""


def _with_interval(measured: Mapping[str, Any]) -> tuple[str, str]:
    low, high = measured.get("binomial") or measured["bootstrap"]
    return f"{measured['value']:.4f}", f"{low:.4f} … {high:.4f}"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(*lines: str, language: str = "python") -> str:
    return "\n".join([f"```{language}", *lines, "```"])


def _without_folder(value: object) -> object:
    """Return the name alone of an absolute path, which means nothing on another machine."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _plain(value: object) -> str:
    """Return a value in one line, without what Markdown would take for the end of a cell or for code."""
    text = " ".join(str(value).split())
    return text.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def is_dequantised(name: str) -> bool:
    """Return whether a base model is a GGUF file, or the dense copy that nalora made of one."""
    return loading.gguf_file(name) is not None or gguf_cache.is_dense_copy(expanded(name))


def base_name(target: Target) -> str:
    """Return what the base model of a target is loaded from by stock libraries."""
    local = loading.local_source(target.spec)
    return str(Path(local).absolute()) if local else target.spec.name
