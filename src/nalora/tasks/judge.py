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
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from nalora.errors import NALoRAError
from nalora.whole_files import json_text

Verdict = TypeVar("Verdict")

# The client waits 0.5, 1, 2, 4, 8, 8, … seconds between tries (or as long as the server says): 40 s in all.
_TRIES_OF_A_REQUEST = 9


def rating(answer: str) -> float | None:
    """The last "[[n]]" of a judge's answer, None unless it is from 1 to 10.

    The last, since the judge explains first and may quote brackets of the answer it reads.
    """
    found = re.findall(r"\[\[(\d+(?:\.\d+)?)\]\]", answer)
    return float(found[-1]) if found and 1 <= float(found[-1]) <= 10 else None


def preference(answer: str) -> str | None:
    """The last "[[A]]", "[[B]]" or "[[C]]" (a tie) of a judge's answer, as a letter."""
    found = re.findall(r"\[\[([ABC])\]\]", answer)
    return found[-1] if found else None


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
                if isinstance(row.get("key"), str) and isinstance(row.get("answer"), str):
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
        """Keep an answer, with whatever helps a reader of the file beside it."""
        with self._lock:
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


class Judge:
    """Asks one model at temperature 0; may be used by several threads.

    The key comes from OPENAI_API_KEY alone, and neither the record nor an error repeats it.

    Args:
        model: its name on the server.
        url: the server, such as http://localhost:8000/v1; OPENAI_BASE_URL, else OpenAI itself, by default.
        record: where the answers are kept.
        max_tokens: the longest answer; 2,048 as in the official MT-Bench.
        attempts: how often a question is asked until its answer can be read.
        wait: seconds before the second attempt, doubled before each further one.
    """

    def __init__(
        self,
        model: str | None,
        *,
        url: str | None = None,
        record: Judgements | None = None,
        max_tokens: int = 2048,
        attempts: int = 4,
        wait: float = 1.0,
    ) -> None:
        self.model = model or ""
        self.url = url
        self.record = record or Judgements()
        self.max_tokens = max_tokens
        self.attempts = attempts
        self.wait = wait

    def check(self) -> None:
        """Send one tiny request.

        Raises:
            NALoRAError: no judge model, no key, no server, a key the server refuses or a model it does not have.
        """
        self._request("", "Say yes.", max_tokens=1, tries=2)

    def ask(self, system: str, prompt: str, read: Callable[[str], Verdict | None]) -> Verdict:
        """What `read` finds in the judge's answer: in the kept one, else in a new one that is then kept.

        Raises:
            NALoRAError: the server refused, or no answer could be read.
        """
        key = Judgements.key(self.model, system, prompt)
        kept = self.record.answer(key)
        verdict = read(kept) if kept is not None else None
        answer = ""
        for attempt in range(self.attempts):
            if verdict is not None:
                return verdict
            if attempt:
                time.sleep(self.wait * 2 ** (attempt - 1))
            answer = self._request(system, prompt, max_tokens=self.max_tokens, tries=_TRIES_OF_A_REQUEST)
            verdict = read(answer)
            self.record.add(key, answer, judge=self.model, system=system, prompt=prompt, verdict=verdict)
        if verdict is not None:
            return verdict
        raise NALoRAError(
            f"judge {self.model!r}",
            found=f"no verdict in {self.attempts} answers, the last ending in {answer[-120:]!r}",
            expected='the "[[…]]" that its prompt asks for',
            fix="take a stronger judge, or a larger judge_tokens if the answer is cut off; all other verdicts are kept",
        )

    def _request(self, system: str, prompt: str, *, max_tokens: int, tries: int) -> str:
        client = self._client.with_options(max_retries=tries - 1)
        import openai

        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        try:
            reply = client.chat.completions.create(
                model=self.model, messages=messages, temperature=0, max_tokens=max_tokens
            )
            return (reply.choices[0].message.content if reply.choices else None) or ""
        except openai.APIError as error:
            raise self._refusal(error) from None  # the client's own error carries the request with its key

    @functools.cached_property
    def _client(self) -> Any:
        if not self.model:
            raise NALoRAError(
                "judge_model", found="none", expected="the judge's name on its server", fix="give judge_model=NAME"
            )
        try:
            import openai
        except ImportError as error:
            raise NALoRAError(
                "judge", found="no package `openai`", expected="it, to ask the judge", fix="pip install openai"
            ) from error
        if not os.environ.get("OPENAI_API_KEY"):
            raise NALoRAError(
                "OPENAI_API_KEY",
                found="nothing in the environment",
                expected="the key for the judge's server",
                fix="export OPENAI_API_KEY=…; a server of your own that needs none takes any word",
            )
        return openai.OpenAI(base_url=self.url)

    def _refusal(self, error: Any) -> NALoRAError:
        """The client's error in the form of ours."""
        server = _without_secrets(str(self._client.base_url))
        said = str(error).replace(self._client.api_key, "…").strip().partition("\n")[0][:300]
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            found, expected, fix = f"the key refused ({said})", "a key it takes", "export OPENAI_API_KEY=…"
        elif status == 404:
            found = f"no model {self.model!r} ({said})"
            expected, fix = self._known_models(), "correct judge_model, or judge_url, which mostly ends in /v1"
        elif status is None:
            found, expected = f"no answer ({said})", "an OpenAI-compatible server"
            fix = "start it, or correct judge_url (or OPENAI_BASE_URL)"
        else:
            found, expected = f"status {status} ({said})", "an answer"
            fix = "see what the server says; a repeated run asks only for what is missing"
        return NALoRAError(f"judge at {server}", found=found, expected=expected, fix=fix)

    def _known_models(self) -> str:
        import openai

        try:
            names = [each.id for each in self._client.with_options(max_retries=0, timeout=10).models.list()]
        except openai.OpenAIError:
            names = []
        return f"one of {', '.join(sorted(names)[:8])}" if names else "a model that it serves"


def _without_secrets(url: str) -> str:
    """The address without user, password and query, any of which may hold a key."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
