"""A language model as a judge, on any OpenAI-compatible server; its answers are recorded and never requested twice."""

from __future__ import annotations

import contextlib
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

from nalora.errors import NALoRAError, counted, require
from nalora.files import expanded
from nalora.files.atomic import json_text
from nalora.tasks import chat_server
from nalora.tasks.chat_server import masked

Verdict = TypeVar("Verdict")

# Waits 1, 2, 4, 8, 8, … seconds between tries of a request, or as long as the server's Retry-After.
_TRIES_OF_A_REQUEST = 9
_LONGEST_WAIT = 8.0
_TRY_AGAIN = (408, 409, 425, 429)
# After the verdict only the end of a sentence, a quotation or bold text.
_AT_THE_END = r"[\s.!*_`\"')]*\Z"


def rating(answer: str) -> float | None:
    """Return the "[[n]]" at the end of a judge's answer, or None if there is none or it is not from 1 to 10.

    Brackets before the end are not a verdict: the judge may quote the answer it reads, which may request a 10.
    """
    match = re.search(r"\[\[(\d{1,2}(?:\.\d{1,4})?)\]\]" + _AT_THE_END, answer)
    return float(match[1]) if match and 1 <= float(match[1]) <= 10 else None


class Judgements:
    """The answers of a judge by a hash of what it was sent, in a JSON-lines file, or without one in memory only.

    A line is written at once. A line that is incomplete, since the machine stopped, is ignored: a repeated run
    requests that judgement again and no other.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = expanded(file) if file is not None else None
        self._lock = threading.Lock()
        self.answers: dict[str, str] = {}
        self._incomplete_end = False
        if self.file is not None and self.file.is_file():
            text = self.file.read_text(encoding="utf-8", errors="replace")
            self._incomplete_end = bool(text) and not text.endswith("\n")
            for line in text.split("\n"):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    row = json.loads(line)
                    key, answer = row["key"], row["answer"]
                    if isinstance(key, str) and isinstance(answer, str) and not row.get("cut_off"):
                        self.answers[key] = answer
            if text.strip() and not self.answers and not text.startswith('{"key"'):
                expected, fix = "a new file, or one that nalora wrote", "choose another file for judgements="
                raise NALoRAError(str(self.file), found="a file without judgements", expected=expected, fix=fix)

    def add(self, key: str, answer: str, **notes: Any) -> None:
        """Record an answer, with notes for readers of the file; one with the note `cut_off` is not used again."""
        with self._lock:
            if not notes.get("cut_off"):
                self.answers[key] = answer
            if self.file is None:
                return
            self.file.parent.mkdir(parents=True, exist_ok=True)
            line = json_text({"key": key, **notes, "answer": answer}) + "\n"
            # One unbuffered write, so that the lines of several processes do not mix.
            with self.file.open("ab", buffering=0) as end:
                end.write(("\n" + line if self._incomplete_end else line).encode())
            self._incomplete_end = False


@dataclass
class Judge:
    """Requests verdicts of one model at temperature 0; thread-safe.

    The key comes from OPENAI_API_KEY alone, and neither the record nor an error contains it or a part of it.
    """

    model: str | None  # its name on the server
    _: KW_ONLY
    url: str | None = None  # such as http://localhost:8000/v1; by default OPENAI_BASE_URL, then OpenAI's
    record: Judgements = field(default_factory=Judgements)
    max_tokens: int = 2048  # maximum length of an answer, as in the official MT-Bench
    attempts: int = 4  # how often an answer without a verdict is requested
    wait: float = 1.0  # seconds before the second attempt, doubled before each further one
    timeout: float = 300.0  # time limit in seconds for one answer, all tries of a busy server included

    @classmethod
    def of_settings(
        cls,
        judge_model: str | None,
        judge_url: str | None,
        judge_tokens: int,
        judge_timeout: float,
        judgements: str | Path | None,
    ) -> Judge:
        """Return the judge that the settings of a task describe; raise a NALoRAError for a wrong time limit."""
        positive = isinstance(judge_timeout, (int, float)) and judge_timeout is not True and judge_timeout > 0
        require(positive, "judge_timeout", judge_timeout, "a positive number of seconds", "leave it out for 300")
        record = Judgements(judgements)
        return cls(judge_model, url=judge_url, record=record, max_tokens=judge_tokens, timeout=judge_timeout)

    def check(self) -> None:
        """Raise a NALoRAError if the server does not answer a tiny request with this key and this model."""
        self._request("", "Say yes.", max_tokens=1, tries=2)

    def verdict(self, system: str, prompt: str, read: Callable[[str], Verdict | None]) -> Verdict:
        """Return what `read` extracts from the judge's answer: the recorded one, or a new one that is then recorded.

        An answer that was cut off at `max_tokens` is not a verdict, whatever it contains. Raises a NALoRAError if the
        server refuses or no answer has a verdict.
        """
        key = hashlib.sha256(json.dumps([self.model or "", system, prompt]).encode()).hexdigest()
        recorded = self.record.answers.get(key)
        if recorded is not None and (verdict := read(recorded)) is not None:
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
            expected='the "[[…]]" that its prompt requests, at the end of a complete answer',
            fix="use a stronger judge, or a larger judge_tokens if the answer is cut off; all other verdicts are kept",
        )

    def _request(self, system: str, prompt: str, *, max_tokens: int, tries: int) -> tuple[str, bool]:
        """Return the answer and whether it was cut off."""
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
                reply = chat_server.send(self._url, "/chat/completions", self._key, body, seconds=left)
            except chat_server.NoReplyError as error:
                reply, reason = None, str(error)
                continue
            if reply.status == 200:
                return self._answer(reply.content)
            if reply.status not in _TRY_AGAIN and reply.status < 500:
                break
        self._fail_with(reply, reason)

    def _answer(self, content: bytes) -> tuple[str, bool]:
        """Return the answer in the content of a reply and whether it was cut off."""
        try:
            choices = json.loads(content)["choices"]
            choice = choices[0] if choices else {"message": {}}
            text = choice["message"].get("content")
            if not isinstance(text, (str, type(None))):
                raise TypeError
            return masked(text or "", self._key), choice.get("finish_reason") == "length"
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            start = " ".join(content[:300].decode(errors="replace").split())[:80]
            found, expected = (
                f"a reply that is not a chat completion ({start!r})",
                "JSON with choices[0].message.content",
            )
            self._fail(found, expected, "correct judge_url (or OPENAI_BASE_URL), which usually ends in /v1")

    @functools.cached_property
    def _key(self) -> str:
        if not self.model:
            expected, fix = "the judge's name on its server", "add --option judge_model=NAME to `nalora evaluate`"
            raise NALoRAError("judge_model", found="none", expected=expected, fix=fix)
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not key:
            fix = "export OPENAI_API_KEY=…; a local server that needs no key accepts any word"
            expected = "the key for the judge's server"
            raise NALoRAError("OPENAI_API_KEY", found="no such environment variable", expected=expected, fix=fix)
        return key

    @property
    def _url(self) -> str:
        return self.url or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"

    def _fail_with(self, reply: chat_server.Reply | None, reason: str) -> NoReturn:
        """Raise the error for a reply that is not an answer, or for no reply with the reason."""
        if reply is None:
            fix = "start it, correct judge_url (or OPENAI_BASE_URL), or raise judge_timeout if it is slow"
            self._fail(f"no answer ({reason})", "an OpenAI-compatible server that answers", fix)
        message = reply.error_text()
        if reply.status in (401, 403):
            self._fail(f"the key was rejected ({message})", "a key it accepts", "export OPENAI_API_KEY=…")
        if reply.status == 404:
            fix = "correct judge_model, or judge_url, which usually ends in /v1"
            self._fail(f"no model {self.model!r} ({message})", self._known_models(), fix)
        fix = "see the server's message; a repeated run requests only the missing verdicts"
        self._fail(f"status {reply.status} ({message})", "an answer", fix)

    def _fail(self, found: str, expected: str, fix: str) -> NoReturn:
        where = f"judge at {chat_server.without_secrets(self._url)}"
        found, expected = masked(found, self._key), masked(expected, self._key)
        raise NALoRAError(where, found=found, expected=expected, fix=fix) from None

    def _known_models(self) -> str:
        try:
            models = json.loads(chat_server.send(self._url, "/models", self._key, seconds=10).content)["data"]
            names = sorted(str(model["id"]) for model in models)
        except (chat_server.NoReplyError, ValueError, KeyError, TypeError, RecursionError):
            names = []
        return f"one of {', '.join(names[:8])}" if names else "a model that it serves"
