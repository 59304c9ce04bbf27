"""MT-Bench: eighty conversations of two turns, rated from 1 to 10 by a language model.

Questions, reference answers and the judge's prompts are FastChat's (Apache-2.0). The prompts are neither on the hub
nor part of nalora; see `_ORIGIN`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError
from nalora.tasks.judge import Judge, rating
from nalora.tasks.sources import field, find_file, holds, jsonl_rows, read_rows, text, texts
from nalora.tasks.task import Example, Scores, Task, alpaca

_ORIGIN = "fastchat/llm_judge/data of github.com/lm-sys/FastChat"
_QUESTIONS = ("mt_bench/question.jsonl", "question.jsonl")
# FastChat's own path of the references is last: data_dir may be FastChat's data folder itself.
_REFERENCES = tuple(
    f"{folder}{name}"
    for name in ("reference_gpt-4.jsonl", "reference_answer/gpt-4.jsonl")
    for folder in ("mt_bench/", "")
)
_JUDGE_PROMPTS = ("mt_bench/judge_prompts.jsonl", "judge_prompts.jsonl")
_WIZARDLM = "WizardLMTeam/WizardLM_evol_instruct_70k"
_TRAINING = ("wizardlm/alpaca_evol_instruct_70k.json", "alpaca_evol_instruct_70k.json")

# Rated with a reference answer, since a wrong calculation easily misleads a judge.
_WITH_REFERENCE = frozenset({"math", "reasoning", "coding"})
_FIRST_ID = 81  # official id of the first question; the hub keeps the order and omits the ids
_REFUSALS = ("sorry", "as an ai")


class MTBench(Task):
    """The MT-Bench task.

    Args:
        data_dir: a folder with FastChat's judge_prompts.jsonl and reference answers, which scoring needs; its
            question.jsonl and WizardLM's alpaca_evol_instruct_70k.json replace those of the hub.
        judge_model: the judge's name on its server.
        judge_url: an OpenAI-compatible server; by default OPENAI_BASE_URL, then OpenAI's. The key is OPENAI_API_KEY.
        judge_tokens: maximum length of the judge's answer; one that is cut off is not a verdict.
        judge_timeout: time limit in seconds for one answer of the judge.
        judgements: a JSON-lines file that records the judge's answers, so that a repeated run requests none twice.
        limit: number of training examples, from the first.

    Raises:
        NALoRAError: `judge_timeout` is not a positive number.
    """

    name = "mt-bench"
    title = "80 conversations of two turns, rated from 1 to 10 by a model; trains on WizardLM"
    # Papers on LoRA report the first turn. All three measures use the judge's scale, 1 to 10.
    measures = ("rating_turn_1", "rating_turn_2", "rating")
    max_new_tokens = 1024
    stop = ("\n\n### Instruction:",)
    scoring_threads = 8

    def __init__(
        self,
        data_dir: str | Path | None = None,
        judge_model: str | None = None,
        judge_url: str | None = None,
        judge_tokens: int = 2048,
        judge_timeout: float = 300.0,
        judgements: str | Path | None = None,
        limit: int | None = 52_000,
    ) -> None:
        self.judge = Judge.of_settings(judge_model, judge_url, judge_tokens, judge_timeout, judgements)
        self.data_dir, self.limit = data_dir, limit

    def train_examples(self) -> Sequence[Example]:
        """Return WizardLM's evolved instructions without refusals, in file order."""
        examples: list[Example] = []
        where, rows = self._rows(_TRAINING, _WIZARDLM)
        for number, row in enumerate(rows):
            if len(examples) == self.limit:
                break
            instruction, output = (text(row, name, f"{where}, row {number}") for name in ("instruction", "output"))
            if not any(word in output.lower() for word in _REFUSALS):
                examples.append(Example(f"wizardlm/{number}", alpaca(instruction), output, question=instruction))
        return examples

    def test_examples(self) -> Sequence[Example]:
        """Return the questions in their official order; a follow-up is the text to append after the first answer."""
        examples = []
        where, rows = self._rows(_QUESTIONS, "HuggingFaceH4/mt_bench_prompts")
        for index, row in enumerate(rows):
            if not holds(self.data_dir, _QUESTIONS):
                row = {**row, "question_id": _FIRST_ID + index, "turns": row.get("prompt")}
            place = f"{where}, row {index}"
            number, category = field(row, "question_id", place, int), text(row, "category", place)
            first, second, *others = texts(row, "turns", place, least=2)
            examples.append(
                Example(
                    id=f"mt-bench/{number}",
                    prompt=alpaca(first),
                    follow_ups=(f"\n\n### Instruction:\n{second}\n\n### Response:\n",),
                    facts={"question": number, "category": category, "turns": (first, second, *others)},
                    question=first,
                    further_questions=(second,),
                )
            )
        return examples

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """Return the judge's ratings of both answers."""
        first, second = (self.judge.verdict(*self._prompt(example, outputs, turn), read=rating) for turn in range(2))
        return {"rating_turn_1": first, "rating_turn_2": second, "rating": (first + second) / 2}

    def refuse_unready(self) -> None:
        """Raise a NALoRAError if no judge is named, or its prompts or the references are missing."""
        if not self.judge.model:
            raise NALoRAError(
                "judge_model",
                found="no judge for MT-Bench, whose answers a language model rates",
                expected="the name of a model on the server at OPENAI_BASE_URL (OpenAI by default)",
                fix="add judge_model=NAME and data_dir=FOLDER with FastChat's judge prompts, or judge_model=null to "
                "train now and name the judge when evaluating (--option judge_model=NAME)",
            )
        for files in (_JUDGE_PROMPTS, _REFERENCES):
            self._fastchat_file(files)

    def prepare_scoring(self) -> None:
        """Raise a NALoRAError if the prompts or references are incomplete, or the judge does not answer."""
        for example in self.test_examples():
            for turn in range(2):
                self._prompt(example, ("", ""), turn)
        self.judge.check()

    def _prompt(self, example: Example, outputs: Sequence[str], turn: int) -> tuple[str, str]:
        """Return the system prompt and the prompt of FastChat's template for this turn."""
        questions = example.facts["turns"]
        parts = {"question": questions[0], "question_1": questions[0], "question_2": questions[1]}
        parts |= {"answer": outputs[0], "answer_1": outputs[0], "answer_2": outputs[1]}
        name = "single-v1"
        if example.facts["category"] in _WITH_REFERENCE:
            name = "single-math-v1"
            references = self._references.get(example.facts["question"])
            if references is None:
                raise NALoRAError(
                    example.id,
                    found=f"no reference answer to a question of {example.facts['category']}",
                    expected=f"one in {' or '.join(_REFERENCES)}",
                    fix=f"add it to data_dir; it is in {_ORIGIN}",
                )
            parts |= {"ref_answer_1": references[0], "ref_answer_2": references[1]}
        name = f"{name}-multi-turn" if turn else name
        if name not in self._judge_prompts:
            found, fix = ", ".join(self._judge_prompts) or "none", f"download the file again from {_ORIGIN}"
            raise NALoRAError("judge_prompts.jsonl", found=f"templates {found}", expected=f"also {name!r}", fix=fix)
        system, template = self._judge_prompts[name]
        return system, template.format(**parts)

    @functools.cached_property
    def _references(self) -> dict[int, list[str]]:
        """GPT-4's answers to both turns in maths, reasoning and coding, by question."""
        file = self._fastchat_file(_REFERENCES)
        references = {}
        for index, row in enumerate(jsonl_rows(file)):
            where = f"{file}, row {index}"
            choices = field(row, "choices", where, list)
            first = choices[0] if choices and isinstance(choices[0], dict) else {}
            references[field(row, "question_id", where, int)] = texts(first, "turns", where, least=2)
        return references

    @functools.cached_property
    def _judge_prompts(self) -> dict[str, tuple[str, str]]:
        """System prompt and template by the name of the template."""
        file = self._fastchat_file(_JUDGE_PROMPTS)
        prompts = {}
        for index, row in enumerate(jsonl_rows(file)):
            columns = ("name", "system_prompt", "prompt_template")
            name, system, template = (text(row, column, f"{file}, row {index}") for column in columns)
            prompts[name] = (system, template)
        return prompts

    def _rows(self, files: Sequence[str], dataset: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the source and the rows of these files in data_dir, or of the hub's data set without them."""
        return read_rows(self.name, self.data_dir if holds(self.data_dir, files) else None, files, dataset, "train")

    def _fastchat_file(self, candidates: Sequence[str]) -> Path:
        try:
            return find_file(self.name, self.data_dir, candidates)
        except NALoRAError as error:
            fix = f"download it from {_ORIGIN} (Apache-2.0) into data_dir"
            raise NALoRAError(self.name, found=error.found, expected=f"{candidates[0]} there", fix=fix) from None


TASKS = (MTBench,)
