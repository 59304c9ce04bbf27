"""MT-Bench: eighty conversations of two turns, rated from 1 to 10 by a language model.

Questions, reference answers and the judge's prompts are FastChat's (Apache-2.0). The prompts are not on the hub and
not shipped here; see `_ORIGIN`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nalora.errors import NALoRAError, require
from nalora.tasks.judge import Judge, Judgements, rating
from nalora.tasks.prompts import alpaca
from nalora.tasks.sources import field, find_file, holds, jsonl_rows, read_rows, text, texts
from nalora.tasks.task import Example, Scores, Task

_ORIGIN = "fastchat/llm_judge/data of github.com/lm-sys/FastChat"
_QUESTIONS = ("mt_bench/question.jsonl", "question.jsonl")
# FastChat's own place for the references comes last: data_dir may be its data folder as it is.
_REFERENCES = tuple(
    f"{folder}{name}"
    for name in ("reference_gpt-4.jsonl", "reference_answer/gpt-4.jsonl")
    for folder in ("mt_bench/", "")
)
_JUDGE_PROMPTS = ("mt_bench/judge_prompts.jsonl", "judge_prompts.jsonl")
_WIZARDLM = "WizardLMTeam/WizardLM_evol_instruct_70k"
_TRAINING = ("wizardlm/alpaca_evol_instruct_70k.json", "alpaca_evol_instruct_70k.json")

# Judged beside a reference answer, since judges are easily led astray by a wrong calculation.
_WITH_REFERENCE = frozenset({"math", "reasoning", "coding"})
_FIRST_ID = 81  # the official number of the first question; the hub keeps the order and drops the numbers
_REFUSALS = ("sorry", "as an ai")


class MTBench(Task):
    """The task.

    Args:
        data_dir: a folder with FastChat's judge_prompts.jsonl and reference answers, which scoring needs; its
            question.jsonl and WizardLM's alpaca_evol_instruct_70k.json there take the place of the hub's.
        judge_model: the judge's name on its server.
        judge_url: an OpenAI-compatible server; OPENAI_BASE_URL, else OpenAI, by default. The key is OPENAI_API_KEY.
        judge_tokens: the longest answer of the judge; one that is cut off is no verdict.
        judge_timeout: seconds until an answer is given up.
        judgements: a JSON-lines file that keeps what the judge said, so that a repeated run asks nothing twice.
        limit: how many training examples are taken, from the first.

    Raises:
        NALoRAError: a `judge_timeout` that is no number of seconds.
    """

    name = "mt-bench"
    title = "80 conversations of two turns, rated from 1 to 10 by a model; trains on WizardLM"
    # Papers on LoRA report the first turn. All three are on the judge's scale, 1 to 10.
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
        is_number = isinstance(judge_timeout, (int, float)) and not isinstance(judge_timeout, bool)
        require(
            is_number and judge_timeout > 0,
            "judge_timeout",
            judge_timeout,
            "seconds, more than 0",
            "leave it out for 300",
        )
        record = Judgements(judgements)
        self.judge = Judge(judge_model, url=judge_url, record=record, max_tokens=judge_tokens, timeout=judge_timeout)
        self.data_dir, self.limit = data_dir, limit

    def train_examples(self) -> Sequence[Example]:
        """WizardLM's evolved instructions without refusals, in file order."""
        examples: list[Example] = []
        folder = self.data_dir if holds(self.data_dir, _TRAINING) else None
        where, rows = read_rows(self.name, folder, _TRAINING, _WIZARDLM, "train")
        for number, row in enumerate(rows):
            if len(examples) == self.limit:
                break
            instruction, output = (text(row, name, f"{where}, row {number}") for name in ("instruction", "output"))
            if not any(word in output.lower() for word in _REFUSALS):
                examples.append(Example(f"wizardlm/{number}", alpaca(instruction), output, question=instruction))
        return examples

    def test_examples(self) -> Sequence[Example]:
        """The questions in their official order; a follow-up is the text to append after the first answer."""
        return [
            Example(
                id=f"mt-bench/{row['question_id']}",
                prompt=alpaca(row["turns"][0]),
                follow_ups=(f"\n\n### Instruction:\n{row['turns'][1]}\n\n### Response:\n",),
                facts={"question": row["question_id"], "category": row["category"], "turns": tuple(row["turns"])},
                question=row["turns"][0],
                further_questions=(row["turns"][1],),
            )
            for row in self._questions
        ]

    def score(self, example: Example, outputs: Sequence[str]) -> Scores:
        """The judge's ratings of both answers."""
        first, second = (self.judge.ask(*self._rating_prompt(example, outputs, turn), read=rating) for turn in range(2))
        return {"rating_turn_1": first, "rating_turn_2": second, "rating": (first + second) / 2}

    def refuse_unready(self) -> None:
        """See that a judge is named, and that its prompts and the references are there.

        Raises:
            NALoRAError: one of them is not.
        """
        later = "or judge_model=null to train now and name the judge when evaluating (--option judge_model=NAME)"
        if not self.judge.model:
            raise NALoRAError(
                "judge_model",
                found="no judge for MT-Bench, whose answers a language model rates",
                expected="the name of a model on the server at OPENAI_BASE_URL (OpenAI by default)",
                fix=f"add judge_model=NAME and data_dir=FOLDER with FastChat's judge prompts, {later}",
            )
        for files in (_JUDGE_PROMPTS, _REFERENCES):
            self._file_of_fastchat(files)

    def prepare_scoring(self) -> None:
        """See that the prompts, the references and the judge are there.

        Raises:
            NALoRAError: a file is missing or incomplete, or the judge does not answer.
        """
        for example in self.test_examples():
            for turn in range(2):
                self._rating_prompt(example, ("", ""), turn)
        self.judge.check()

    def judge_prompt(self, name: str, **parts: str) -> tuple[str, str]:
        """(system prompt, prompt) of the official template with this name.

        Raises:
            NALoRAError: the file has no such template.
        """
        if name not in self._judge_prompts:
            raise NALoRAError(
                "judge_prompts.jsonl",
                found=f"templates {', '.join(self._judge_prompts) or 'none'}",
                expected=f"also {name!r}",
                fix=f"fetch the file again from {_ORIGIN}",
            )
        template = self._judge_prompts[name]
        return template["system_prompt"], template["prompt_template"].format(**parts)

    def _rating_prompt(self, example: Example, outputs: Sequence[str], turn: int) -> tuple[str, str]:
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
                    fix=f"put it into data_dir; it is in {_ORIGIN}",
                )
            parts |= {"ref_answer_1": references[0], "ref_answer_2": references[1]}
        return self.judge_prompt(f"{name}-multi-turn" if turn else name, **parts)

    @functools.cached_property
    def _questions(self) -> list[dict[str, Any]]:
        folder = self.data_dir if holds(self.data_dir, _QUESTIONS) else None
        where, rows = read_rows(self.name, folder, _QUESTIONS, "HuggingFaceH4/mt_bench_prompts", "train")
        if folder is None:
            rows = [{**row, "question_id": _FIRST_ID + i, "turns": row.get("prompt")} for i, row in enumerate(rows)]
        return [
            {
                "question_id": field(row, "question_id", f"{where}, row {index}", int),
                "category": text(row, "category", f"{where}, row {index}"),
                "turns": texts(row, "turns", f"{where}, row {index}", least=2),
            }
            for index, row in enumerate(rows)
        ]

    @functools.cached_property
    def _references(self) -> dict[int, tuple[str, str]]:
        """GPT-4's answers to both turns by question, in maths, reasoning and coding."""
        file = self._file_of_fastchat(_REFERENCES)
        references = {}
        for index, row in enumerate(jsonl_rows(file)):
            where = f"{file}, row {index}"
            choices = field(row, "choices", where, list)
            first = choices[0] if choices and isinstance(choices[0], dict) else {}
            one, two, *_ = texts(first, "turns", where, least=2)
            references[field(row, "question_id", where, int)] = (one, two)
        return references

    @functools.cached_property
    def _judge_prompts(self) -> dict[str, dict[str, str]]:
        file = self._file_of_fastchat(_JUDGE_PROMPTS)
        columns = ("name", "system_prompt", "prompt_template")
        prompts = [
            {name: text(row, name, f"{file}, row {index}") for name in columns}
            for index, row in enumerate(jsonl_rows(file))
        ]
        return {prompt["name"]: prompt for prompt in prompts}

    def _file_of_fastchat(self, candidates: Sequence[str]) -> Path:
        try:
            return find_file(self.name, self.data_dir, candidates)
        except NALoRAError as error:
            fix = f"fetch it from {_ORIGIN} (Apache-2.0) into data_dir"
            raise NALoRAError(self.name, found=error.found, expected=f"{candidates[0]} there", fix=fix) from None


TASKS = (MTBench,)
