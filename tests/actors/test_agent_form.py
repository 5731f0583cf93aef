"""OpenAI's form of a call: what is read, what is refused and why, and what an answer looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from penstock.actors.agents.form import (
    CallRefused,
    answer,
    assistant_message,
    key_of,
    read_messages,
    read_request,
)
from penstock.actors.tool_calls import read_calls
from penstock.common.wire.messages import Sampling
from tests.actors.agent_site import TOOL
from tests.actors.talking import call_of

SAMPLING = Sampling(1.0, 1.0, 0, 0.0, 1000, 7, stop=("END",))
USER = {"role": "user", "content": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(**asked: Any) -> Any:
    return read_request(json.dumps({"messages": [USER]} | asked).encode(), SAMPLING)


def test_what_changes_nothing_is_taken() -> None:
    found = read(
        model="any", temperature=1, top_p=1.0, n=1, stream=False, tools=[TOOL], tool_choice="auto",
        max_tokens=9, max_completion_tokens=7, stop="END", user="me", logprobs=None, seed=None,
    )  # fmt: skip
    assert (found.max_tokens, found.tools) == (7, [TOOL])
    assert read().max_tokens == 0


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"temperature": 0.5}, "temperature is 0.5, and this rollout samples with 1"),
        ({"top_p": 0.9}, "importance ratios"),
        ({"top_k": 5}, "samples with 0"),
        ({"seed": 1}, "'seed' is not served"),
        ({"stop": ["\n"]}, "stop is"),
        ({"n": 2}, "n is 2, and only 1 is served"),
        ({"stream": True}, "only False is served"),
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"x" * 10**5: 1}, "is not served"),
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": True}, "at least 1"),
        ({"max_tokens": 10**400}, "at most 64|integer"),
        ({"tools": [{"type": "web_search"}]}, "a tool is"),
        ({"tools": 5}, "a tool is 5"),
        ({"messages": []}, "a list of 1 to 10000"),
        ({"messages": [{"role": "user", "content": ""}] * 10_001}, "a list of 1 to 10000"),
        ({"messages": "hello"}, "expected a list"),
        ({"messages": None}, "expected a list"),
        ({"messages": [5]}, r"messages\[0\]: found 5"),
        ({"messages": [{"role": "critic", "content": ""}]}, "a role of system"),
        ({"messages": [{"role": ["user"], "content": ""}]}, "a role of system"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, r"messages\[1\]: content has 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of the type text"),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": 1}}]}, "'audio' is not served"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "tool_call_id is None"),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "name is 5"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls has 5"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "arguments is"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "add", "arguments": "[1]"}}]}]}, "JSON text of an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "add", "arguments": '{"a":' + "[" * 20 + "]" * 20 + "}"}}
        ]}]}, "at most 16 levels"),
    ],
    ids=lambda one: str(one)[:40],
)  # fmt: skip
def test_what_is_wrong_is_said(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(CallRefused, match=reason) as found:
        read(**asked)
    error = found.value.body["error"]
    assert (found.value.status, error["type"]) == (400, "invalid_request_error")
    assert 10 < len(error["message"]) < 500


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[]", b"null", b"[" * 10**5, b'{"messages": ' + b"[" * 50 + b"]" * 50 + b"}",
     b'{"n": 1, "n": 1}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}'],
)  # fmt: skip
def test_bytes_of_any_kind_are_refused(body: bytes) -> None:
    with pytest.raises(CallRefused):
        read_request(body, SAMPLING)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
_NAMES = st.sampled_from(
    ["role", "content", "name", "tool_calls", "tool_call_id", "id", "function", "arguments", "type"]
)
_ROLES = st.sampled_from(["user", "tool", "assistant", "system"])


@given(st.lists(st.dictionaries(_NAMES, _JSON | _ROLES, max_size=5) | _JSON, max_size=3) | _JSON)
def test_no_messages_raise_another_error(messages: Any) -> None:
    try:
        found = read_messages(messages)
    except CallRefused:
        return
    assert read_messages(json.loads(json.dumps(messages))) == found


def test_messages_have_one_canonical_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    found = read_messages([
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "3", "tool_call_id": "other"},
    ])  # fmt: skip
    assert found == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [
            CALL | {"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "3", "tool_call_id": "other"},
    ]  # fmt: skip
    assert key_of({"a": 1}) != key_of({"a": True}) != key_of({"a": 1.0})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is 3.", "It is 3.", []),
        (f"So: {call_of(a=1)}{call_of('mul', b='é')}", "So:", ["add", "mul"]),
        (call_of(a=1), None, ["add"]),
        (f"{call_of(a=1)}<tool_call>[</tool_call>", f"{call_of(a=1)}<tool_call>[</tool_call>", []),
    ],
    ids=["text", "two", "alone", "one cannot be read"],
)
def test_an_answer_comes_back_as_it_went(text: str, content: str | None, calls: list[str]) -> None:
    """The official client's types read it, and what the client sends back has the same key."""
    message = assistant_message(text, *read_calls(text), 3)
    sent = answer(message, "stop", 5, 7, "0.3")
    found = ChatCompletion.model_validate(json.loads(json.dumps(sent)), strict=True)
    choice = found.choices[0]
    assert choice.message.content == content
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert [call.function.name for call in choice.message.tool_calls or ()] == calls
    assert found.usage is not None
    assert found.usage.total_tokens == 12
    for back in (choice.message.model_dump(), choice.message.model_dump(exclude_unset=True)):
        assert [key_of(one) for one in read_messages([back])] == [key_of(message)]


def test_without_tools_no_call_is_read() -> None:
    assert assistant_message(call_of(a=1), call_of(a=1), [], 0)["content"] == call_of(a=1)
    assert assistant_message("as sampled", "as read", [], 0)["content"] == "as read"
