"""Chat templates, rendered in a process of their own with limits of time, memory and output."""

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.chat.process import MOST_BYTES
from penstock.common.files.reading import parse_json

_START_S = 120.0
"""Seconds in which the process starts. It takes a fraction of one, and more on a busy machine."""

_LIMIT_S = 10.0
"""Seconds that one prompt may take."""

_PER_PROMPT_S = 1.0
"""Seconds of the limit that each prompt gives back: ten thousand slow prompts would take a day."""

_SIMPLIFY = "simplify the file of LEARNER_PROMPT_TEMPLATE, or the model's own template"

_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Variables that the process sees. Passwords are in others."""


class RendererFailed(ValueError):
    """The process of a template ended, or took too long: the next attempt may succeed."""


class ChatRenderer:
    """Renders messages by one chat template, a jinja2 text, in a process that the first `render` starts.

    `variables` are the template's own, such as bos_token. The KnownFormat named `known_format` reads
    completions with the tokenizer.json in `folder`; "" for none. The process ends with this object.
    """

    def __init__(
        self, template: str, variables: Mapping[str, Any], known_format: str = "", folder: str = ""
    ) -> None:
        self._head = {
            "template": template, "variables": dict(variables), "known_format": known_format,
            "folder": folder,
        }  # fmt: skip
        self._left_s = _LIMIT_S
        self._channel: socket.socket | None = None
        self._stop: Any = None
        self._unread = b""
        self.pid = 0  # of the process, once it runs

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the messages as one text. Raise ValueError, with the reason, if the template fails.

        `tools` are the JSON schemas that the template shows to the model; None or [] shows none. With
        `add_generation_prompt` the text ends with the beginning of the assistant's turn. The first call
        starts the process, in up to 120 s. A text may take 10 s, less after slow ones. The error is a
        RendererFailed if the process takes longer or ends, as over its limit of memory: the next call
        starts another process.
        """
        if self._channel is None:
            self._start()
        began = time.monotonic()
        self._left_s = min(_LIMIT_S, self._left_s + _PER_PROMPT_S)
        asked = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        late = f"took over {_LIMIT_S:g} s for a prompt, or for slow ones together: {_SIMPLIFY}"
        text = self._ask(asked, self._left_s, late)
        self._left_s -= time.monotonic() - began
        return text

    def read(self, **asked: Any) -> Any:
        """Return the text of a completion and its calls, as KnownFormat.read does for arguments `asked`.

        Raise ValueError if the format cannot read it; that is a RendererFailed, as of `render`, if the
        process ends, or takes over 10 s: some texts take the format for hours.
        """
        if self._channel is None:
            self._start()
        late = f"has a format that took over {_LIMIT_S:g} s to read a completion: it is left out"
        return parse_json(self._ask(asked, _LIMIT_S, late))

    def _start(self) -> None:
        """Start the process and send it the template.

        `pid` is its process id then, and its time for prompts is full again. Raise RendererFailed if the
        system has no room for the process, or without an answer in 120 s.
        """
        try:
            process, channel = _begin()
        except OSError as error:
            raise RendererFailed(
                f"the chat template's process could not be started ({error}): raise the limits of "
                "processes, open files or memory, or try again"
            ) from error
        self._channel, self._unread, self._left_s, self.pid = channel, b"", _LIMIT_S, process.pid
        self._stop = weakref.finalize(self, _end, process, channel)
        late = f"has a process that did not start in {_START_S:g} s: try again on a less busy machine"
        self._ask(self._head, _START_S, late)

    def _ask(self, question: Any, limit_s: float, late: str) -> str:
        """Send a value as a JSON line and return the text in the answer, within `limit_s` seconds.

        Raise RendererFailed, and end the process, if no readable answer comes in time; `late` is what
        the error says of the template then. Raise ValueError, with the template's error, for an answer
        without a text: the process goes on.
        """
        assert self._channel is not None
        deadline = time.monotonic() + limit_s
        try:
            self._channel.settimeout(max(limit_s, 1e-3))
            self._channel.sendall(json.dumps(question, default=str).encode() + b"\n")
            answer = parse_json(self._read_line(deadline))
        except TimeoutError as error:
            self._close()
            raise RendererFailed(f"the chat template {late}") from error
        except (OSError, ValueError) as error:
            self._close()
            raise RendererFailed(
                f"the chat template gave no text ({error}): let it use less than 1 GiB of memory, or "
                "try again"
            ) from error
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            reason = answer.get("error") if isinstance(answer, dict) else None
            wrong = "the process of the chat template answered without a text: simplify the template"
            raise ValueError(reason if isinstance(reason, str) else wrong)
        return str(answer["text"])

    def _read_line(self, deadline: float) -> bytes:
        """Return the next line from the process without its line end; keep the bytes after it.

        Raise TimeoutError at `deadline`, a time of time.monotonic, ConnectionError if the process ends
        before, ValueError for over 16 MiB without a line end.
        """
        assert self._channel is not None
        while b"\n" not in self._unread:
            if len(self._unread) > MOST_BYTES + 1:
                raise ValueError(
                    f"over {MOST_BYTES} bytes from a chat template, expected a shorter text"
                )
            self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            found = self._channel.recv(1 << 20)
            if not found:
                raise ConnectionError("the process of a chat template ended before it answered")
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _close(self) -> None:
        """End the process and wait for its end. The next prompt starts another one."""
        self._stop()
        self._channel = None


def _begin() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process of a template; return it and our end of its socket. Raise OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.common.chat.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
    return process, ours


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """Close our end of the process's socket, kill the process, and wait until it has ended."""
    channel.close()
    process.kill()
    process.wait()
