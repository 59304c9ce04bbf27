"""Measure which families of reasoning-gym give points to trivial answers, and write the table of `nalora tasks`.

PYTHONHASHSEED=0 python benchmarks/gym_trust.py              all families, ten minutes on two CPU cores
PYTHONHASHSEED=0 python benchmarks/gym_trust.py coin_flip    some, which are printed and not written
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

from nalora.errors import NALoRAError
from nalora.files import atomic
from nalora.tasks import gym

# Questions of each family; fewer than that would not tell a tenth from nothing.
ITEMS = 25
QUESTION, OTHER = "the question itself", "the answer to another question"
TRIVIAL: dict[str, str] = {
    "nothing": "",
    "a space": " ",
    **{answer: answer for answer in gym.LITERAL},
    "400 digits": "9" * 400,
}


def measure(family: str, items: int = ITEMS) -> dict[str, Any]:
    """What the family's scorer gives to trivial answers, and to its own.

    Returns:
        `own`: the share of its own answers with the full score, None where the family provides none; and of the trivial
        answers, the one with the largest `accuracy` above `by_chance`, the share of questions that it is right for, and
        the one with the largest mean `score` above that.

    Raises:
        NALoRAError: the family cannot be drawn.
    """
    task = gym.Gym(f"gym/{family}", train_size=1, test_size=items)
    examples = task.test_examples()
    known = [example for example in examples if example.target]
    own = [score >= 1 for score in task.scores([(example, example.target) for example in known])]
    rows: list[dict[str, Any]] = []
    for name in (*TRIVIAL, QUESTION, OTHER):
        answers = [TRIVIAL.get(name, "")] * items
        if name == QUESTION:
            answers = [task._entry_of(example)["question"] for example in examples]
        elif name == OTHER:
            answers = [examples[index - 1].target for index in range(items)]
        scores = task.scores(list(zip(examples, answers, strict=True)))
        pairs = zip(answers, examples, strict=True)
        by_chance = sum(bool(each.target) and _plain(answer) == _plain(each.target) for answer, each in pairs) / items
        accuracy, mean = sum(score >= 1 for score in scores) / items, sum(scores) / items
        rows.append({"answer": name, "accuracy": accuracy, "score": round(mean, 4), "by_chance": by_chance})
    return {
        "own": round(sum(own) / len(own), 4) if own else None,
        "by_accuracy": max(rows, key=lambda row: row["accuracy"] - row["by_chance"]),
        "by_score": max(rows, key=lambda row: row["score"] - row["by_chance"]),
    }


def _plain(text: str) -> str:
    return text.strip().lower()


def main() -> None:
    """Measure, print a line for each family, and write the table if all were measured."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        raise SystemExit("run with PYTHONHASHSEED=0: the questions of some families depend on it")
    measured: dict[str, Any] = {}
    for family in sys.argv[1:] or sorted(gym.families()):
        try:
            measured[family] = measure(family)
        except NALoRAError as error:  # composite has no questions of its own, codeio draws others each time
            print(f"{family}: left out, {error.found}", flush=True)
            continue
        fault = gym.fault(measured[family])
        print(f"{family}: {fault.reason if fault else 'trusted'}", flush=True)
    rows = ",\n".join(f"  {json.dumps(family)}: {json.dumps(row)}" for family, row in measured.items())
    head = f'"reasoning_gym": {json.dumps(version("reasoning-gym"))},\n "items": {ITEMS}'
    table = f'{{{head},\n "families": {{\n{rows}\n }}\n}}\n'
    if sys.argv[1:]:
        print(table)
    else:
        atomic.write(gym.TRUST_FILE, table)


if __name__ == "__main__":
    main()
