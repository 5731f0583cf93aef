"""penstock.openenv makes an environment class of a server that speaks OpenEnv's protocol."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.utils import get_json_schema

from penstock.openenv import OpenEnv, OpenEnvError
from tests.helpers import wait_until
from tests.packaging.openenv_server import Adding, Guessing, openenv_server

ROW = {"answer": 7, "question": "a number"}


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    with openenv_server(Guessing) as address:
        yield address


@pytest.fixture(scope="module")
def adding() -> Iterator[str]:
    with openenv_server(Adding) as address:
        yield address


def tools_of(kind: type) -> dict[str, Any]:
    """The schemas by name, read as for any other environment."""
    names = [
        name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")
    ]
    return {
        name: get_json_schema(getattr(kind, name))["function"]
        for name in names
        if name not in ("reset", "get_reward")
    }


def test_the_fields_of_a_servers_action_are_the_arguments_of_one_tool(guessing: str) -> None:
    (schema,) = tools_of(OpenEnv(guessing)).values()
    assert (schema["name"], schema["description"]) == ("step", "Guess a number.")
    assert schema["parameters"]["required"] == ["number"]
    fields = schema["parameters"]["properties"]
    assert fields["number"] == {"type": "integer", "description": "Number"}
    assert fields["mood"]["enum"] == ["calm", "bold"]
    assert fields["parts"]["items"] == {"type": ["number", "string"]}
    assert set(fields) == {"number", "mood", "parts"}


def test_a_servers_tools_are_tools_with_their_descriptions(adding: str) -> None:
    (schema,) = tools_of(OpenEnv(adding)).values()
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second."}


def test_a_session_is_played_to_its_end_and_its_rewards_are_added_up(guessing: str) -> None:
    session = OpenEnv(guessing.replace("ws:", "http:") + "/")()
    assert session.reset(**ROW, image=b"no JSON") == "Guess: a number"
    assert session.get_reward() is None
    assert session.step(number=3) == '{"hint": "too low", "action": {"number": 3}}'
    assert "bold" in session.step(number=7, mood="bold")
    assert session.get_reward() == 0.75
    with pytest.raises(OpenEnvError, match="The episode is over"):
        session.step(number=7)
    assert session.reset(**ROW) == "Guess: a number"
    assert session.get_reward() is None


def test_the_reward_may_be_that_of_the_last_step(guessing: str) -> None:
    session = OpenEnv(guessing, reward="last")()
    session.reset(**ROW)
    session.step(number=3)
    session.step(number=7)
    assert session.get_reward() == 1.0


def test_two_sessions_are_apart(guessing: str) -> None:
    kind = OpenEnv(guessing)
    first, second = kind(), kind()
    first.reset(**ROW)
    second.reset(**ROW | {"answer": 3})
    assert "too low" in first.step(number=3)
    assert "right" in second.step(number=3)


def test_what_the_server_refuses_is_an_exception_that_answers_the_policy(guessing: str) -> None:
    session = OpenEnv(guessing)()
    session.reset(**ROW)
    with pytest.raises(OpenEnvError, match="no negative numbers"):
        session.step(number=-1)
    with pytest.raises(TypeError, match="number"):
        session.step(count=1)


def test_the_result_of_a_tool_is_its_value_and_its_error_an_exception(adding: str) -> None:
    session = OpenEnv(adding)()
    assert session.reset() is None
    assert session.add(a=3, b=4) == "7"
    with pytest.raises(OpenEnvError, match="too large"):
        session.add(a=99, b=4)


def test_a_lost_server_is_no_answer_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    with openenv_server(Guessing) as address:
        session = OpenEnv(address)()
        session.reset(**ROW)
        monkeypatch.setattr(Guessing, "step", lambda self, action: ("error", {"code": "SESSION_ERROR"}))
        with pytest.raises(SystemExit, match="serve more sessions, or see its log"):
            session.step(number=1)
    with pytest.raises(SystemExit, match="did not answer step"):
        session.step(number=1)
    with pytest.raises(ConnectionError, match="does not answer"):
        OpenEnv(address)


def test_a_server_without_a_free_session_says_so() -> None:
    with openenv_server(Guessing, sessions=1) as address:
        kind = OpenEnv(address)
        first = wait_until(lambda: begun(kind), "the session that asked for the tools to end")
        with pytest.raises(ConnectionError, match="at capacity: serve more sessions"):
            kind().reset(**ROW)
        with pytest.raises(ConnectionError, match="at capacity"):
            OpenEnv(address)  # not a class with other tools than the server's
        assert "right" in first.step(number=7)


def begun(kind: type) -> Any:
    """A session, None if the server has none free."""
    session = kind()
    try:
        session.reset(**ROW)
    except ConnectionError:
        return None
    return session


@pytest.mark.parametrize("name", ["_hidden", "reset", "two words"])
def test_a_tool_that_python_cannot_call_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = {"result": {"tools": [{"name": name, "inputSchema": {}}]}}
    monkeypatch.setattr(Adding, "tools", lambda self: tools)
    with openenv_server(Adding) as address, pytest.raises(ValueError, match=name):
        OpenEnv(address)
