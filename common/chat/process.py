"""The process in which a chat template runs: a template comes with a model, and may be hostile.

    python -m penstock.common.chat.process FD

Reads JSON lines from the socket FD and answers each with one: see `serve`. The process ends with its
socket or its parent. The environment of a template is that of transformers' apply_chat_template, whose
import would take a second; tests/learner/test_templates.py compares the two.

Completions are read here too, by the library `renderers`: some take its regular expressions for hours.
"""

import ctypes
import json
import resource
import signal
import socket
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.common.chat.known_format import KnownFormat, read_tokenizer

MOST_BYTES = 16 << 20
"""The longest answer, a prompt as JSON. Its tokens would fill any model's context."""

_MEMORY_BYTES = 1 << 30
"""Memory that a template may take beside what its libraries take."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}, which has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012  # as in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content as a scope; move the `parser` behind {% endgeneration %}."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@cache
def compile_template(text: str) -> Template:
    """Return the chat template `text` for jinja2's sandbox. Raise TemplateError if it is no template.

    The template can use what transformers adds: tojson, raise_exception and strftime_now.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, without the escapes of HTML that jinja2's own filter makes.

    The options are those of json.dumps. Raise TypeError for a value that JSON has no form for.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    """Raise TemplateError with `message`: a template calls this function to refuse messages."""
    raise TemplateError(message)


def render(template: Template, variables: dict[str, Any], asked: dict[str, Any]) -> str:
    """Return messages as one text by a chat template. Raise whatever the template raises.

    `asked` has `messages`, `tools` (JSON schemas, or None) and `add_generation_prompt`, the variables
    that every chat template gets. `variables` are further ones; `asked` wins where a name is in both.
    """
    return template.render(**{"documents": None, **variables, **asked})


def serve(channel: socket.socket) -> None:
    """Answer each JSON line of the socket with one until the other end closes it; close it then.

    First come the arguments of a ChatRenderer, by name; the answer is {"text": ""}.
    Each further line is the `asked` of `render`, or the arguments of KnownFormat.read, whose result is
    JSON then. The answer is {"text": ...}, or {"error": ...} for whatever that raises, cut to 300
    letters. Raise OSError if an answer cannot be sent, ValueError if the first line is no JSON.
    """
    with channel, channel.makefile("rb") as lines:
        head = json.loads(lines.readline())
        known: KnownFormat | None = None
        if name := head["known_format"]:
            known = KnownFormat(name, read_tokenizer(Path(head["folder"])), head["variables"])
        limit_process()
        _answer(channel, {"text": ""})
        for line in lines:
            try:
                answer = {"text": _text_for(json.loads(line), head, known)}
            except Exception as error:  # a template raises whatever it likes
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            _answer(channel, answer)


def _text_for(asked: dict[str, Any], head: dict[str, Any], known: KnownFormat | None) -> str:
    """Return messages as text, or as JSON what the format `known` reads. Raise whatever they raise."""
    if known and "completion_ids" in asked:
        return json.dumps(known.read(**asked))
    return render(compile_template(head["template"]), head["variables"], asked)


def _answer(channel: socket.socket, answer: dict[str, str]) -> None:
    """Send an answer as a JSON line, an {"error": ...} instead of a line over 16 MiB (MOST_BYTES).

    Raise OSError if the other end of the socket is closed.
    """
    line = json.dumps(answer).encode()
    if len(line) > MOST_BYTES:
        line = json.dumps({"error": f"its text has over {MOST_BYTES} bytes, expected fewer"}).encode()
    channel.sendall(line + b"\n")


def limit_process() -> None:
    """Let this process use 1 GiB of address space more than now, and write no file and no core dump."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    serve(socket.socket(fileno=int(sys.argv[1])))
