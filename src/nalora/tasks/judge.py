"""A language model as a judge, behind any OpenAI-compatible server; what it said is kept and never asked twice."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from nalora.errors import NALoRAError, counted
from nalora.files.atomic import json_text
from nalora.tasks import chat_server
from nalora.tasks.chat_server import masked

Verdict = TypeVar("Verdict")

# Between tries of a request it waits 1, 2, 4, 8, 8, … seconds, or as long as the server says.
_TRIES_OF_A_REQUEST = 9
_LONGEST_WAIT = 8.0
_TRY_AGAIN = (408, 409, 425, 429)
# After the verdict only what closes a sentence, a quotation or bold print.
_AT_THE_END = r"[\s.!*_`\"')]*\Z"


def rating(answer: str) -> float | None:
    """The "[[n]]" that ends a judge's answer, None where there is none or it is not from 1 to 10.

    Brackets before the end are no verdict: the judge may quote those of the answer it reads, which may ask for a 10.
    """
    found = re.search(r"\[\[(\d{1,2}(?:\.\d{1,4})?)\]\]" + _AT_THE_END, answer)
    return float(found[1]) if found and 1 <= float(found[1]) <= 10 else None


class Judgements:
    """Every answer of a judge, one JSON object a line in the order they came, found again by what was asked.

    A line is written at once and whole or, where the machine stopped in the middle, not counted: a repeated run asks
    for that judgement again and for nothing else.

    Args:
        file: where they are kept; None keeps them for this process only.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = Path(file).expanduser() if file is not None else None
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        self._broken_end = False
        if self.file is not None and self.file.is_file():
            text = self.file.read_text(encoding="utf-8", errors="replace")
            self._broken_end = bool(text) and not text.endswith("\n")
            for line in text.split("\n"):
                row = _object(line)
                if isinstance(row.get("key"), str) and isinstance(row.get("answer"), str) and not row.get("cut_off"):
                    self._answers[row["key"]] = row["answer"]
            if text.strip() and not self._answers and not text.startswith('{"key"'):
                raise NALoRAError(
                    str(self.file),
                    found="a file without judgements",
                    expected="a new file, or one that nalora wrote",
                    fix="give another judgements=",
                )

    @staticmethod
    def key(model: str, system: str, prompt: str) -> str:
        """What names a judgement: a hash over all that the judge was given."""
        return hashlib.sha256(json.dumps([model, system, prompt]).encode()).hexdigest()

    def answer(self, key: str) -> str | None:
        """The latest answer to this question."""
        return self._answers.get(key)

    def add(self, key: str, answer: str, **beside: Any) -> None:
        """Keep an answer, and whatever helps a reader of the file; one with `cut_off` is not found again."""
        with self._lock:
            if not beside.get("cut_off"):
                self._answers[key] = answer
            if self.file is None:
                return
            self.file.parent.mkdir(parents=True, exist_ok=True)
            line = json_text({"key": key, **beside, "answer": answer}) + "\n"
            # One unbuffered write, so that lines of several processes do not mix.
            with self.file.open("ab", buffering=0) as end:
                end.write(f"{chr(10) if self._broken_end else ''}{line}".encode())
            self._broken_end = False


def _object(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return row if isinstance(row, dict) else {}


@dataclass
class Judge:
    """Asks one model at temperature 0; may be used by several threads.

    The key comes from OPENAI_API_KEY alone, and neither the record nor an error repeats it or a part of it.

    Args:
        model: its name on the server.
        url: the server, such as http://localhost:8000/v1; OPENAI_BASE_URL, else OpenAI itself, by default.
        record: where the answers are kept.
        max_tokens: the longest answer; 2,048 as in the official MT-Bench.
        attempts: how often a question is asked until its answer can be read.
        wait: seconds before the second attempt, doubled before each further one.
        timeout: the longest time in seconds for one answer, all tries of a busy server together.
    """

    model: str | None
    _: KW_ONLY
    url: str | None = None
    record: Judgements = field(default_factory=Judgements)
    max_tokens: int = 2048
    attempts: int = 4
    wait: float = 1.0
    timeout: float = 300.0

    def check(self) -> None:
        """Send one tiny request.

        Raises:
            NALoRAError: no judge model, no key, no server, a key the server refuses or a model it does not have.
        """
        self._request("", "Say yes.", max_tokens=1, tries=2)

    def ask(self, system: str, prompt: str, read: Callable[[str], Verdict | None]) -> Verdict:
        """What `read` finds in the judge's answer: in the kept one, else in a new one that is then kept.

        An answer that was cut off at `max_tokens` is no verdict, whatever it contains.

        Raises:
            NALoRAError: the server refused, or no answer could be read.
        """
        key = Judgements.key(self.model or "", system, prompt)
        kept = self.record.answer(key)
        if kept is not None and (verdict := read(kept)) is not None:
            return verdict
        answer, cut_off = "", False
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.wait * 2 ** (attempt - 1))
            answer, cut_off = self._request(system, prompt, max_tokens=self.max_tokens, tries=_TRIES_OF_A_REQUEST)
            verdict = None if cut_off else read(answer)
            notes: dict[str, Any] = {"cut_off": True} if cut_off else {}
            self.record.add(key, answer, judge=self.model, system=system, prompt=prompt, verdict=verdict, **notes)
            if verdict is not None:
                return verdict
        end = f"cut off after {counted(self.max_tokens, 'token')}" if cut_off else f"ending in {answer[-120:]!r}"
        raise NALoRAError(
            f"judge {self.model!r}",
            found=f"no verdict in {counted(self.attempts, 'answer')}, the last {end}",
            expected='the "[[…]]" that its prompt asks for, at the end of a whole answer',
            fix="use a stronger judge, or a larger judge_tokens if the answer is cut off; all other verdicts are kept",
        )

    def _request(self, system: str, prompt: str, *, max_tokens: int, tries: int) -> tuple[str, bool]:
        """(the answer, whether it was cut off)."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}
        deadline = time.monotonic() + self.timeout
        reply: chat_server.Reply | None = None
        reason = ""
        for attempt in range(tries):
            wait = min(self.wait * 2 ** (attempt - 1), _LONGEST_WAIT) if attempt else 0.0
            if reply is not None and reply.retry_after is not None:
                wait = reply.retry_after
            left = deadline - time.monotonic() - wait
            if attempt and left <= 0:
                break
            time.sleep(wait)
            try:
                reply = chat_server.send(self._address, "/chat/completions", self._key, body, seconds=left)
            except chat_server.NoReplyError as error:
                reply, reason = None, str(error)
                continue
            if reply.status == 200:
                return self._answer(reply.content)
            if reply.status not in _TRY_AGAIN and reply.status < 500:
                break
        if reply is not None:
            self._refuse(reply)
        self._fail(
            f"no answer ({reason})",
            "an OpenAI-compatible server that answers",
            "start it, correct judge_url (or OPENAI_BASE_URL), or raise judge_timeout if it is only slow",
        )

    def _answer(self, content: bytes) -> tuple[str, bool]:
        """What the judge said, from a reply that may be anything."""
        try:
            choices = json.loads(content)["choices"]
            choice = choices[0] if choices else {"message": {}}
            text = choice["message"].get("content")
            if not isinstance(text, (str, type(None))):
                raise TypeError
            return masked(text or "", self._key), choice.get("finish_reason") == "length"
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            start = " ".join(content[:300].decode(errors="replace").split())[:80]
            self._fail(
                f"a reply that is no chat completion ({start!r})",
                "JSON with choices[0].message.content",
                "correct judge_url (or OPENAI_BASE_URL), which mostly ends in /v1",
            )

    @functools.cached_property
    def _key(self) -> str:
        if not self.model:
            raise NALoRAError(
                "judge_model",
                found="none",
                expected="the judge's name on its server",
                fix="add --option judge_model=NAME to `nalora evaluate`",
            )
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not key:
            raise NALoRAError(
                "OPENAI_API_KEY",
                found="nothing in the environment",
                expected="the key for the judge's server",
                fix="export OPENAI_API_KEY=…; a server of your own that needs none takes any word",
            )
        return key

    @property
    def _address(self) -> str:
        return self.url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"

    def _refuse(self, reply: chat_server.Reply) -> NoReturn:
        said, status = reply.error_text(), reply.status
        if status in (401, 403):
            self._fail(f"the key refused ({said})", "a key it takes", "export OPENAI_API_KEY=…")
        if status == 404:
            fix = "correct judge_model, or judge_url, which mostly ends in /v1"
            self._fail(f"no model {self.model!r} ({said})", self._known_models(), fix)
        fix = "see what the server says; a repeated run asks only for what is missing"
        self._fail(f"status {status} ({said})", "an answer", fix)

    def _fail(self, found: str, expected: str, fix: str) -> NoReturn:
        where = f"judge at {chat_server.without_secrets(self._address)}"
        raise NALoRAError(
            where, found=masked(found, self._key), expected=masked(expected, self._key), fix=fix
        ) from None

    def _known_models(self) -> str:
        try:
            models = json.loads(chat_server.send(self._address, "/models", self._key, seconds=10).content)["data"]
            names = sorted(str(model["id"]) for model in models)
        except (chat_server.NoReplyError, ValueError, KeyError, TypeError, RecursionError):
            names = []
        return f"one of {', '.join(names[:8])}" if names else "a model that it serves"
