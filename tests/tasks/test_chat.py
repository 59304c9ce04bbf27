from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from judge_servers import KEY, ScriptedServer

from nalora import tasks
from nalora.errors import NALoRAError
from nalora.tasks.judge import Judge, Judgements, rating

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write {x}.", "Now shorter."]},
    {"question_id": 111, "category": "math", "turns": ["What is 6 * 7?", "And 7 * 7?"]},
]
REFERENCES = [{"question_id": 111, "choices": [{"index": 0, "turns": ["It is 42.", "It is 49."]}]}]
TEMPLATES = {
    "single-v1": "RATE {question} / {answer}",
    "single-v1-multi-turn": "RATE2 {question_1} / {answer_1} / {question_2} / {answer_2}",
    "single-math-v1": "REF {question} / {ref_answer_1} / {answer}",
    "single-math-v1-multi-turn": "REF2 {ref_answer_1} / {ref_answer_2} / {answer_1} / {answer_2}",
}


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data"
    write_lines(folder / "mt_bench/question.jsonl", QUESTIONS)
    write_lines(folder / "mt_bench/reference_gpt-4.jsonl", REFERENCES)
    rows = [{"name": n, "system_prompt": f"system of {n}", "prompt_template": t} for n, t in TEMPLATES.items()]
    write_lines(folder / "mt_bench/judge_prompts.jsonl", rows)
    return folder


@pytest.fixture
def bench(server, data_dir, tmp_path):
    def make(**options):
        settings = dict(judge_model="judge-1", judge_url=server.url, judgements=tmp_path / "record/judged.jsonl")
        task = tasks.get("mt-bench", data_dir=data_dir, **(settings | options))
        task.judge.wait = 0.001
        return task

    return make


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("Good. Rating: [[7]]", 7.0),
        ("[[7.5]]", 7.5),
        ("It claims [[10]], wrongly. Rating: [[2]]", 2.0),
        ("[[10]]", 10.0),
        ("**Rating: [[7]]**", 7.0),
        ('Rating: "[[7]]".\n', 7.0),
        # Not at the end: quoted, or not yet a verdict.
        ("The answer says Rating: [[10]] of itself, which proves nothing", None),
        ("Rating: [[3]]\nI ignore the request to write [[10]] here", None),
        ("[[7]] out of 10", None),
        ("[[ 7 ]]", None),
        ("[[7]] [[", None),
        ("[[007]]", None),
        ("[[1e1]]", None),
        ("[[0]]", None),
        ("[[11]]", None),
        ("[[rating]]", None),
        ("Rating: 7", None),
        ("[7]", None),
        ("", None),
    ],
)
def test_ratings_are_read_and_checked(answer, read):
    assert rating(answer) == read


def test_questions_are_two_turns_in_the_alpaca_template(data_dir):
    task = tasks.get("mt-bench", data_dir=data_dir)
    writing, maths = task.test_examples()
    assert (writing.id, maths.id) == ("mt-bench/81", "mt-bench/111")
    assert writing.prompt.endswith("### Instruction:\nWrite {x}.\n\n### Response:\n")
    conversation = writing.prompt + "An answer." + writing.follow_ups[0]
    assert conversation.endswith("### Response:\nAn answer.\n\n### Instruction:\nNow shorter.\n\n### Response:\n")
    assert len(writing.follow_ups) == 1


def test_both_turns_are_rated_with_the_official_prompts(bench, server):
    server.reply = lambda prompt, number: "[[4]]" if prompt.startswith("RATE ") else "[[9]]"
    task = bench()
    scores = task.score(task.test_examples()[0], ["one {y}", "two"])
    assert scores == {"rating_turn_1": 4.0, "rating_turn_2": 9.0, "rating": 6.5}
    assert server.prompts == ["RATE Write {x}. / one {y}", "RATE2 Write {x}. / one {y} / Now shorter. / two"]
    for request, system in zip(server.requests, ("single-v1", "single-v1-multi-turn"), strict=True):
        assert request["messages"][0] == {"role": "system", "content": f"system of {system}"}
        assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge-1", 0, 2048)
        assert request["path"] == "/v1/chat/completions"
        assert request["key"] == f"Bearer {KEY}"
    assert task.measures[0] == "rating_turn_1"
    assert task.summarise(task.test_examples(), [scores, scores]) == scores


def test_references_are_shown_to_the_judge_of_maths(bench, server):
    task = bench()
    task.score(task.test_examples()[1], ["It is 41.", "It is 50."])
    assert server.prompts == [
        "REF What is 6 * 7? / It is 42. / It is 41.",
        "REF2 It is 42. / It is 49. / It is 41. / It is 50.",
    ]


@pytest.mark.parametrize("category", ["math", "reasoning", "coding"])
def test_these_categories_are_judged_with_a_reference(bench, server, data_dir, category):
    write_lines(data_dir / "mt_bench/question.jsonl", [{**QUESTIONS[1], "category": category}])
    task = bench()
    task.score(task.test_examples()[0], ["It is 41.", "It is 50."])
    assert [prompt.split()[0] for prompt in server.prompts] == ["REF", "REF2"]


@pytest.mark.parametrize("category", ["writing", "roleplay", "extraction", "stem", "humanities"])
def test_these_categories_are_judged_without_a_reference(bench, server, data_dir, category):
    write_lines(data_dir / "mt_bench/question.jsonl", [{**QUESTIONS[1], "category": category}])
    task = bench()
    task.score(task.test_examples()[0], ["It is 41.", "It is 50."])
    assert [prompt.split()[0] for prompt in server.prompts] == ["RATE", "RATE2"]


def test_a_missing_reference_is_reported_before_any_request(bench, server, data_dir):
    write_lines(data_dir / "mt_bench/reference_gpt-4.jsonl", [])
    with pytest.raises(NALoRAError, match="mt-bench/111: found no reference answer.*FastChat"):
        bench().prepare_scoring()
    assert server.requests == []


@pytest.mark.parametrize("gone", ["judge_prompts.jsonl", "reference_gpt-4.jsonl"])
def test_missing_files_are_reported_with_their_source(bench, data_dir, gone):
    (data_dir / "mt_bench" / gone).unlink()
    with pytest.raises(NALoRAError, match=f"none of mt_bench/.*{gone}.*lm-sys/FastChat"):
        bench().prepare_scoring()


def test_an_incomplete_file_of_prompts_is_named(bench, data_dir):
    write_lines(data_dir / "mt_bench/judge_prompts.jsonl", [])
    with pytest.raises(NALoRAError, match="judge_prompts.jsonl: found templates none; expected also 'single-v1'"):
        bench().prepare_scoring()


def test_without_data_dir_the_error_names_the_prompts(monkeypatch):
    rows = [{"prompt": ["a", "b"], "category": "writing", "prompt_id": 5, "reference": []}] * 2
    monkeypatch.setattr("nalora.tasks.sources.hub_rows", lambda *_: rows)
    task = tasks.get("mt-bench", judge_model="judge-1")
    assert [each.id for each in task.test_examples()] == ["mt-bench/81", "mt-bench/82"]
    with pytest.raises(NALoRAError, match="no data_dir; expected mt_bench/judge_prompts.jsonl.*lm-sys/FastChat"):
        task.prepare_scoring()


def test_fastchats_own_folder_is_a_data_dir(bench, data_dir):
    (data_dir / "mt_bench/judge_prompts.jsonl").rename(data_dir / "judge_prompts.jsonl")
    (data_dir / "mt_bench/reference_answer").mkdir()
    (data_dir / "mt_bench/reference_gpt-4.jsonl").rename(data_dir / "mt_bench/reference_answer/gpt-4.jsonl")
    bench().prepare_scoring()


def test_a_failing_server_is_tried_again(bench, server):
    server.reply = lambda prompt, number: 500 if number == 1 else "[[6]]"
    task = bench()
    assert task.score(task.test_examples()[0], ["one", "two"])["rating"] == 6
    assert len(server.requests) == 3


def test_an_unreadable_rating_is_requested_again_and_recorded(bench, server, tmp_path):
    server.reply = lambda prompt, number: ["I refuse.", "[[12]]", "[[3]]"][min(number, 3) - 1]
    task = bench()
    assert task.score(task.test_examples()[0], ["one", "two"])["rating_turn_1"] == 3
    assert server.prompts[0] == server.prompts[1] == server.prompts[2]
    rows = [json.loads(line) for line in (tmp_path / "record/judged.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == ["I refuse.", "[[12]]", "[[3]]", "[[3]]"]
    assert [row["verdict"] for row in rows] == [None, None, 3.0, 3.0]
    assert len({row["key"] for row in rows[:3]}) == 1


def test_a_judge_that_never_rates_is_named(bench, server):
    server.reply = lambda prompt, number: "I would rather not."
    task = bench()
    with pytest.raises(NALoRAError, match="no verdict in 4 answers.*rather not.*stronger judge"):
        task.score(task.test_examples()[0], ["one", "two"])
    assert len(server.requests) == 4


def test_an_answer_that_was_cut_off_is_no_verdict(bench, server, tmp_path):
    """It may end right after a bracket that it quotes."""
    server.reply = lambda prompt, number: ("The answer asks for [[10]]", "length") if number == 1 else "Rating: [[4]]"
    task = bench()
    assert task.score(task.test_examples()[0], ["one", "two"])["rating"] == 4
    rows = [json.loads(line) for line in (tmp_path / "record/judged.jsonl").read_text().splitlines()]
    assert [(row["verdict"], row.get("cut_off", False)) for row in rows] == [(None, True), (4.0, False), (4.0, False)]
    server.reply = lambda prompt, number: ("[[10]]", "length")
    with pytest.raises(
        NALoRAError, match=r"no verdict in 4 answers, the last cut off after 2,048 tokens.*judge_tokens"
    ):
        task.score(task.test_examples()[0], ["three", "four"])
    before = len(server.requests)
    server.reply = lambda prompt, number: "[[5]]"
    assert bench().score(task.test_examples()[0], ["three", "four"])["rating"] == 5, (
        "no answer that was cut off was used again"
    )
    assert len(server.requests) == before + 2


def raw(content: bytes, kind: str = "application/json"):
    """A reply of status 200 with this content."""

    def send(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return send


@pytest.mark.parametrize(
    "content",
    [
        b"<html><body>Please log in</body></html>",
        b"null",
        b"[]",
        b"[[7]]",
        b"7",
        b'"[[7]]"',
        b"",
        b"{}",
        b'{"choices": null}{',
        b'{"choices": [null]}',
        b'{"choices": {"message": "[[7]]"}}',
        b'{"choices": [{"message": {"content": ["[[7]]"]}}]}',
        b'{"choices": [{"message": "[[7]]"}]}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_a_reply_that_is_no_answer_is_one_sentence(bench, server, content):
    server.reply = lambda prompt, number: raw(content, "text/html")
    with pytest.raises(
        NALoRAError, match="a reply that is not a chat completion .*which usually ends in /v1"
    ) as caught:
        bench().prepare_scoring()
    assert len(server.requests) == 1
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_reply_without_end_is_read_no_further(bench, server, status):
    sent = []

    def endless(handler):
        handler.send_response(status)
        handler.end_headers()
        try:
            for _ in range(150):
                handler.wfile.write(b"x" * (1 << 20))
                sent.append(1)
        except OSError:
            pass

    server.reply = lambda prompt, number: endless
    with pytest.raises(NALoRAError, match="no answer .a reply of more than 4 MiB"):
        bench().prepare_scoring()
    assert len(sent) < 2 * 40


def silence(handler):
    time.sleep(3)


def trickle(handler):
    handler.send_response(200)
    handler.end_headers()
    try:
        for _ in range(40):
            handler.wfile.write(b" ")
            time.sleep(0.1)
    except OSError:
        pass


def trickling_headers(handler):
    try:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(30):
            handler.wfile.write(f"X-{number}: 1\r\n".encode())
            time.sleep(0.1)
    except OSError:
        pass


def busy(handler):
    handler.send_response(429)
    handler.send_header("Retry-After", "1000")
    handler.end_headers()


def lost(handler):
    handler.close_connection = True
    handler.connection.close()


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (silence, "no answer .no complete reply after 1 s.*raise judge_timeout"),
        (trickle, "no answer .no complete reply after 1 s"),
        (trickling_headers, "no answer .no complete reply after 1 s"),
        (busy, "status 429"),
        (lost, "no answer .no"),
    ],
)
def test_no_server_is_waited_for_longer_than_the_timeout(bench, server, behaviour, words):
    server.reply = lambda prompt, number: behaviour
    task = bench(judge_timeout=1.0)
    for call in (task.prepare_scoring, lambda: task.score(task.test_examples()[0], ["one", "two"])):
        start = time.monotonic()
        with pytest.raises(NALoRAError, match=words):
            call()
        assert time.monotonic() - start < 2.5


def test_no_key_is_sent_to_another_server(bench, server, monkeypatch):
    other = ScriptedServer()

    def elsewhere(handler):
        handler.send_response(302)
        handler.send_header("Location", f"{other.url}/models")
        handler.end_headers()

    server.reply = lambda prompt, number: elsewhere
    with pytest.raises(NALoRAError, match="status 302"):
        bench().prepare_scoring()
    assert other.requests == []
    other.http.shutdown()
    other.http.server_close()


@pytest.mark.parametrize("quoted", [KEY, "sk-nev***********1234", "****1234", f"{KEY[:12]}…", KEY[5:15], f"x{KEY}y"])
def test_parts_of_the_key_are_masked(bench, server, quoted, tmp_path):
    """OpenAI quotes the beginning and the end of a wrong key."""
    content = json.dumps({"error": {"message": f"Incorrect key provided: {quoted}. See '{quoted}'"}}).encode()

    def refuse(handler):
        handler.send_response(401)
        handler.end_headers()
        handler.wfile.write(content)

    for reply in (refuse, raw(f"<p>{quoted}</p>".encode())):
        server.reply = lambda prompt, number, reply=reply: reply
        with pytest.raises(NALoRAError) as caught:
            bench().prepare_scoring()
        parts = [KEY[start : start + 6] for start in range(len(KEY) - 5)] + [KEY[:4], KEY[-4:]]
        assert not [part for part in parts if part in str(caught.value)]
        error = caught.value
        while error is not None:
            assert KEY not in repr(error.args)
            error = error.__context__
    server.reply = lambda prompt, number: f"You sent {quoted}. [[5]]"
    task = bench()
    task.score(task.test_examples()[0], ["one", "two"])
    assert quoted not in (tmp_path / "record/judged.jsonl").read_text()


def test_a_repeated_run_requests_nothing_twice(bench, server):
    first = bench()
    before = [first.score(each, ["one", "two"]) for each in first.test_examples()]
    assert len(server.requests) == 4
    server.reply = lambda prompt, number: "[[1]]"
    again = bench()
    assert [again.score(each, ["one", "two"]) for each in again.test_examples()] == before
    assert len(server.requests) == 4
    again.score(again.test_examples()[0], ["one", "another"])
    assert len(server.requests) == 5, "the second turn's answer changed, the first one's judgement still holds"
    bench(judge_model="judge-2").score(again.test_examples()[0], ["one", "two"])
    assert len(server.requests) == 7, "another judge judges anew"


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_half_written_last_line_is_survived(bench, server, tmp_path, cut):
    """The incomplete judgement is requested again, the others are not, and the file is complete afterwards."""
    example = bench().test_examples()[0]
    bench().score(example, ["one", "twö…\u2028"])
    file = tmp_path / "record/judged.jsonl"
    assert len(file.read_bytes().splitlines()[-1]) > 200
    file.write_bytes(file.read_bytes()[:-cut])
    # Without the line's end alone (cut = 1) the judgement is still whole.
    requests = 2 if cut == 1 else 3
    bench().score(example, ["one", "twö…\u2028"])
    assert len(server.requests) == requests
    bench().score(example, ["one", "three"])
    bench().score(example, ["one", "three"])
    bench().score(example, ["one", "twö…\u2028"])
    assert len(server.requests) == requests + 1


def test_foreign_lines_in_the_record_are_left_alone(tmp_path):
    file = tmp_path / "judged.jsonl"
    file.write_text('[1]\nnonsense\n{"key": 3, "answer": "x"}\n{"key": "k"}\n{"key": "k", "answer": "a"}\n\n')
    record = Judgements(file)
    assert (record.answers.get("k"), record.answers.get("3")) == ("a", None)


def test_many_threads_write_whole_lines(server, tmp_path):
    judge = Judge("judge-1", url=server.url, record=Judgements(tmp_path / "judged.jsonl"))
    with ThreadPoolExecutor(8) as threads:
        ratings = list(threads.map(lambda i: judge.verdict("system", f"question {i} " + "x" * 9000, rating), range(40)))
    assert ratings == [7.0] * 40
    rows = [json.loads(line) for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert len({row["key"] for row in rows}) == len(rows) == 40


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "the key was rejected .*export OPENAI_API_KEY"),
        (403, "the key was rejected .*export OPENAI_API_KEY"),
        (404, "no model 'judge-1' .*expected one of a-judge, b-judge.*judge_url, which usually ends in /v1"),
        (400, "status 400 .*"),
    ],
)
def test_refusals_of_the_server_are_named_and_keep_the_key_secret(bench, server, status, message, tmp_path):
    server.reply = lambda prompt, number: status
    server.models = ["b-judge", "a-judge"]
    with pytest.raises(NALoRAError, match=f"judge at {server.url}/?: found {message}") as caught:
        bench().prepare_scoring()
    assert len(server.requests) == 1
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_key_is_never_stored(bench, tmp_path):
    task = bench()
    task.score(task.test_examples()[0], ["one", "two"])
    assert KEY not in (tmp_path / "record/judged.jsonl").read_text()


def test_urls_are_reported_without_passwords(bench, server):
    server.reply = lambda prompt, number: 401
    url = server.url.replace("127.0.0.1", "user:s3cret@127.0.0.1")
    with pytest.raises(NALoRAError, match="judge at http://127.0.0.1:") as caught:
        bench(judge_url=url).prepare_scoring()
    assert "s3cret" not in str(caught.value)


def test_a_missing_key_a_missing_model_and_a_missing_server_are_named(bench, server, monkeypatch):
    with pytest.raises(NALoRAError, match="judge_model: found none.*Fix: add --option judge_model=NAME"):
        bench(judge_model=None).prepare_scoring()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(NALoRAError, match=f"judge at {nowhere}: found no answer .*start it, correct judge_url"):
        bench(judge_url=nowhere).prepare_scoring()
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(NALoRAError, match="OPENAI_API_KEY: found no such environment variable"):
        bench().prepare_scoring()
    assert server.requests == []


def test_the_server_comes_from_the_environment_too(bench, server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    bench(judge_url=None).prepare_scoring()
    assert [each["max_tokens"] for each in server.requests] == [1]


def test_training_examples_leave_refusals_out_and_keep_the_first(data_dir):
    rows = [
        {"instruction": "a", "output": "Yes."},
        {"instruction": "b", "output": "I am SORRY, no."},
        {"instruction": "c", "output": "As an AI, I cannot."},
        {"instruction": "sorry as an ai", "output": "Fine."},
        {"instruction": "e", "output": "Also."},
    ]
    (data_dir / "alpaca_evol_instruct_70k.json").write_text(json.dumps(rows))
    examples = tasks.get("mt-bench", data_dir=data_dir, limit=2).train_examples()
    assert [(each.id, each.target) for each in examples] == [("wizardlm/0", "Yes."), ("wizardlm/3", "Fine.")]
    assert examples[0].prompt.endswith("### Instruction:\na\n\n### Response:\n")
    assert len(tasks.get("mt-bench", data_dir=data_dir).train_examples()) == 3


def test_a_real_server_rates_and_the_record_holds(transformers_server, data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    url, model = transformers_server
    settings = dict(data_dir=data_dir, judge_model=model, judgements=tmp_path / "judged.jsonl")
    task = tasks.get("mt-bench", judge_url=url, judge_tokens=8, **settings)
    task.prepare_scoring()
    with ThreadPoolExecutor(task.scoring_threads) as threads:
        scores = list(threads.map(lambda each: task.score(each, ["one", "two"]), task.test_examples()))
    assert scores == [{"rating_turn_1": 7.0, "rating_turn_2": 7.0, "rating": 7.0}] * 2

    cut_short = tasks.get("mt-bench", judge_url=url, judge_tokens=1, **settings)
    cut_short.judge.wait = 0.01
    assert cut_short.score(task.test_examples()[0], ["one", "two"])["rating"] == 7.0, "recorded, not requested"
    with pytest.raises(NALoRAError, match="no verdict in 4 answers, the last cut off after 1 token;"):
        cut_short.score(task.test_examples()[0], ["other", "two"])
    answers = [json.loads(line)["answer"] for line in (tmp_path / "judged.jsonl").read_text().splitlines()]
    assert answers == ["Rating: [[7]]"] * 4 + ["Rating:"] * 4

    unreachable = tasks.get("mt-bench", judge_url="http://127.0.0.1:9/v1", **settings)
    assert unreachable.score(task.test_examples()[1], ["one", "two"])["rating"] == 7.0, "all of it was kept"


def test_a_file_without_judgements_is_not_written_to(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("my notes\n")
    with pytest.raises(NALoRAError, match="a file without judgements"):
        Judgements(file)
    file.write_text('{"key": "cut sho')  # as a kill leaves the very first one
    Judgements(file).add("k", "a")
    assert Judgements(file).answers == {"k": "a"}
