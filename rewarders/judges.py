"""Judges: language models behind an OpenAI-compatible address that score completions.

They run in the rewarder itself and never in the sandbox, because they need a key. Address and key are
those of OpenAI's own client, OPENAI_BASE_URL and OPENAI_API_KEY. No contract, journal or log has them.
A call that fails is retried by that client with growing waits. Then the scoring has failed and is
retried as every failed scoring is. It never becomes a reward.
"""

import asyncio
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from penstock.common.config.judge_file import JudgeFile, explain_judge
from penstock.common.config.settings import RewarderSettings
from penstock.common.text import as_text, indented, short
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.reward_process import Scores

_LONGEST_WAIT_S = 120.0
"""The longest wait before a retry that OpenAI's client makes if a server asks for one."""
_MOST_CACHED = 10_000
_LOGGERS = ("openai", "httpx", "httpcore", "httpx2", "httpcore2")
"""Those of OpenAI's client. They log each request with its address, at debug its headers too."""
_PLACE = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(
    r"[\s*\"'\[({=:]*([-+]?(?:\d++(?:\.\d++)?+|\.\d++)(?:e[-+]?\d++)?+)"
    r"(?:[*_\"')\]}]*[ \t]*(?:/|out of)[ \t]*(\d++(?:\.\d++)?+))?+"
)
"""A number, and what it is out of."""
_MORE = re.compile(
    r"[a-z_]|[.,]?\d|[*_\"')\]}]*[ \t]*(?:%|[-\u2013+/*^][ \t]*\d|(?:to|out of)[ \t]+\d|\d)"
)
"""What makes another number, a range or a sum of the number before it, in the same line."""


class JudgeFailed(Exception):
    """A judge cannot be asked, or gave no answer; the text says why, without the key."""


def longest_call_s(settings: RewarderSettings) -> float:
    """Return the seconds after which a call of a judge with all its retries is given up.

    Each try may take REWARDER_JUDGE_TIMEOUT_S, and each wait before a retry 120 s. Example: 60 s and 5
    retries give 960.
    """
    retries = settings.judge_max_retries
    return settings.judge_timeout_s * (retries + 1) + _LONGEST_WAIT_S * retries


class Judges:
    """The judges of one rewarder, which share a client, a limit of calls in flight, and a cache.

    `settings` has the timeout, the number of retries and the limit of calls in flight. `on_answer` is
    called, in the judges' thread, after each question's call, also if the call failed. The cache holds
    10,000 scores. Creating the object starts neither thread nor client.
    """

    def __init__(self, settings: RewarderSettings, on_answer: Callable[[], None]) -> None:
        self._settings = settings
        self._on_answer = on_answer
        self._free = asyncio.Semaphore(settings.judge_max_concurrency)
        self._cache: dict[bytes, float] = {}  # by `_key`
        self._caching = threading.Lock()
        self._loop_lock = threading.Lock()
        self._shared_loop: asyncio.AbstractEventLoop | None = None

    def check(self, spec: RewardSpec) -> str:
        """Return the reason why a judge cannot be used here; "" if it can. The judge is not asked.

        Reasons are wrong options in `spec`, and no OPENAI_API_KEY in the environment.
        """
        try:
            _judge_of(spec)
        except JudgeFailed as error:
            return str(error)
        if not os.environ.get("OPENAI_API_KEY"):
            return "OPENAI_API_KEY is not set: set it for this rewarder (to any text if none is needed)"
        return ""

    def score(self, spec: RewardSpec, arguments: Mapping[str, Sequence[Any]]) -> Scores:
        """Ask the judge `spec` about each completion of a group, and return the scores, in order.

        An answer without a score is None; the share of None is the metric NAME/unparsed. `arguments`
        have one value per completion. Numbers are cached by judge and question; a cached or equal
        question is not sent. Raise JudgeFailed for wrong options, an unknown {NAME} in the prompt, or,
        once the other answers are cached, a failed call.
        """
        judge, count = _judge_of(spec), len(arguments["completions"])
        questions = [_question(judge.prompt, arguments, index) for index in range(count)]
        keys = {text: _key(judge, text) for text in questions}
        with self._caching:
            found = {text: self._cache[key] for text, key in keys.items() if key in self._cache}
        new = [text for text in keys if text not in found]
        answers = asyncio.run_coroutine_threadsafe(self._ask_all(judge, new), self._loop).result()
        told = {text: one for text, one in zip(new, answers, strict=True) if isinstance(one, str)}
        scores = {text: score_in(answer, judge) for text, answer in told.items()}
        found |= {text: score for text, score in scores.items() if score is not None}
        with self._caching:
            self._cache |= {keys[text]: score for text, score in found.items()}
            while len(self._cache) > _MOST_CACHED:
                self._cache.pop(next(iter(self._cache)))
        values = tuple(found.get(text) for text in questions)
        if failed := [one for one in answers if isinstance(one, BaseException)]:
            raise failed[0]
        return Scores(values, {}, {f"{spec.name}/unparsed": values.count(None) / count})

    async def _ask_all(self, judge: JudgeFile, questions: Sequence[str]) -> list[str | BaseException]:
        """Return the judge's answers to `questions`, in order, once all calls have ended.

        All calls run side by side. In place of a failed call's answer is its error.
        """
        calls = (self._ask(judge, text) for text in questions)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(self, judge: JudgeFile, question: str) -> str:
        """Return the judge's answer to one question, "" for an answer without text or one that was cut.

        Wait first while REWARDER_JUDGE_MAX_CONCURRENCY calls are in flight. `_on_answer` is called at
        the end, also after a failure. Raise JudgeFailed if no answer comes within `longest_call_s`,
        retries included, if the server refuses the call, or if its answer has another form.
        """
        from openai import OpenAIError

        messages = [{"role": "user", "content": question}]
        limit = longest_call_s(self._settings)
        async with self._free:
            try:
                async with asyncio.timeout(limit):
                    answer = await self._client.chat.completions.create(
                        model=judge.model, messages=messages, extra_body=judge.request
                    )
                choice = answer.choices[0]
                # A cut answer may end within its number.
                return "" if choice.finish_reason == "length" else choice.message.content or ""
            except TimeoutError:
                late = f"the judge did not answer in {limit:g} s with all retries"
                raise JudgeFailed(f"{late}: raise REWARDER_JUDGE_TIMEOUT_S") from None
            except OpenAIError as error:
                where = "see OPENAI_BASE_URL, OPENAI_API_KEY and the judge's file"
                raise JudgeFailed(f"the judge failed: {_without_key(error)}; {where}") from None
            except Exception as error:  # the client's parts raise whatever an answer leads to
                wanted = "expected a chat completion as of OpenAI's API: see OPENAI_BASE_URL"
                raise JudgeFailed(
                    f"the judge's answer has another form ({_without_key(error)}), {wanted}"
                ) from None
            finally:
                self._on_answer()

    @cached_property
    def _client(self) -> Any:
        """Return OpenAI's client, the same one each time, for OPENAI_BASE_URL and OPENAI_API_KEY.

        The first access creates the client, because the import takes a second, and lets the loggers
        openai, httpx and httpcore, by old and new names, log warnings and errors only.
        """
        from openai import AsyncOpenAI

        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        return AsyncOpenAI(
            max_retries=self._settings.judge_max_retries, timeout=self._settings.judge_timeout_s
        )

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all calls, the same one each time and in each thread.

        The first access creates the loop and starts its thread, which ends with the process.
        """
        with self._loop_lock:
            if self._shared_loop is None:
                self._shared_loop = asyncio.new_event_loop()
                run = self._shared_loop.run_forever
                threading.Thread(target=run, name="judges", daemon=True).start()
            return self._shared_loop


def score_in(answer: str, judge: JudgeFile) -> float | None:
    """Return the number behind the judge's last `score_after` in `answer`, in upper or lower case.

    Only spaces, quotes, brackets and * = : may be between. Return None without a number there, if the
    number is not from the judge's `lowest` to its `highest`, or is a part of a range, sum or percentage,
    or out of another number than `highest`.
    Example:
        >>> judge = JudgeFile(model="m", prompt="{completion}")
        >>> score_in("Score: 3? No. **Score:** 8/10", judge), score_in("Score: 11", judge)
        (8.0, None)
    """
    _, mark, rest = answer.lower().rpartition(judge.score_after.lower())
    number = _NUMBER.match(rest) if mark else None
    if number is None or _MORE.match(rest, number.end()):
        return None
    if number[2] and float(number[2]) != judge.highest:
        return None
    value = float(number[1])
    return value if judge.lowest <= value <= judge.highest else None


def _judge_of(spec: RewardSpec) -> JudgeFile:
    """Return the judge that the options of `spec` describe. Raise JudgeFailed if they are wrong."""
    try:
        return JudgeFile(**spec.options)
    except ValidationError as error:
        found = f"the contract's judge is wrong: {explain_judge(error)}"
        where = "the judge's file, which LEARNER_REWARDS names"
        raise JudgeFailed(f"{found}; correct {where}, and start the learner again") from None


def _key(judge: JudgeFile, question: str) -> bytes:
    """Return the SHA-256 of a judge and a question, under which the score is cached."""
    return hashlib.sha256(f"{judge.model_dump_json()}\0{question}".encode()).digest()


def _question(template: str, arguments: Mapping[str, Sequence[Any]], index: int) -> str:
    """Return `template` with each {NAME} in it replaced by the argument NAME of completion `index`.

    `arguments` have one value per completion each. {prompt} and {completion} become texts, messages as
    "role: content" lines; other values are JSON unless they are texts. A {NAME} within a value is not
    replaced. Raise JudgeFailed if there is no argument of a name.
    """
    talks = arguments.get("transcripts")
    values = {name: rows[index] for name, rows in arguments.items()}
    values["prompt"] = _spoken(arguments["prompts"][index])
    values["completion"] = _spoken(talks[index] if talks else arguments["completions"][index])
    names = set(_PLACE.findall(template)) - values.keys()
    if names:
        raise JudgeFailed(
            f"the judge's prompt has {{{min(names)}}}, but the data has no such column: "
            f"there are {', '.join(sorted(values))}; correct the prompt in the judge's file"
        )
    return _PLACE.sub(lambda place: as_text(values[place[1]]), template)


def _spoken(value: Any) -> str:
    """Return the text of a prompt or completion, in which a list of messages is "role: content" lines.

    All lines of a message but the first are indented by two spaces. A single message of a user is its
    content alone, a message without content its tool calls as JSON. A `value` that is no list of maps
    stays a text, or becomes JSON.
    """
    if not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        return as_text(value)
    lines = [as_text(one.get("content") or one.get("tool_calls") or "") for one in value]
    if len(value) == 1 and value[0].get("role") == "user":
        return lines[0]
    said = (f"{one.get('role')}: {line}" for one, line in zip(value, lines, strict=True))
    return "\n".join(map(indented, said))  # else a message could contain lines of other speakers


def _without_key(error: Exception) -> str:
    """Return an error's class and text, cut to 200 characters, with OPENAI_API_KEY's value as `***`."""
    key = os.environ.get("OPENAI_API_KEY", "")
    text = str(error)
    return short(f"{type(error).__name__}: {text.replace(key, '***') if key else text}")
