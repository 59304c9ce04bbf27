"""Answers to the prompts of a file, in batches; a file that was not finished is continued."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nalora.evaluation.answer_file import AnswerFile
from nalora.evaluation.generation import AnswerGenerator
from nalora.runs.progress import Report
from nalora.tasks import Example

# Batches are made of this number of prompts at a time, so that a file of a million takes no more memory.
_WINDOW = 4_096


def generate_file(
    generator: AnswerGenerator,
    prompts: Sequence[Example],
    answers: AnswerFile,
    report: Report = lambda *progress: None,
) -> int:
    """Add the missing answers to the file, in the order of the prompts at the end; return how many were added."""
    added = 0
    for start in range(0, len(prompts), _WINDOW):
        numbers = range(start, min(start + _WINDOW, len(prompts)))
        if all(number in answers.done for number in numbers):
            continue
        for batch in generator.batches([prompts[number] for number in numbers]):
            missing = {example.id for example in batch if int(example.id) not in answers.done}
            if not missing:
                continue
            # A batch has the same random numbers whenever it is generated, so a continued file is the same file.
            torch.manual_seed(generator.sampling.seed + int(batch[0].id))
            rows = [
                {
                    "row": int(answer.example.id), "prompt": answer.example.question or answer.example.prompt,
                    "output": answer.outputs[0],
                    **({"expected": answer.example.target} if answer.example.target else {}),
                    "tokens": answer.tokens, "finished": answer.finished,
                }
                for answer in generator.answer(batch) if answer.example.id in missing
            ]  # fmt: skip
            answers.add(rows)
            added += len(rows)
            report("generating", len(answers.done), len(prompts))
    answers.sort()
    return added
