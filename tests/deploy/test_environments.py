"""The examples of docs/environments.md do what they say."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers.utils import get_json_schema

from penstock.deploy.environments.calculator import calculate
from penstock.deploy.environments.interpreter import Interpreter
from penstock.deploy.environments.retry import Guess
from penstock.deploy.environments.text_game import House


@pytest.mark.parametrize(
    ("kind", "tools"), [(Guess, {"guess"}), (House, {"look", "go", "take"}), (Interpreter, {"run"})]
)
def test_every_public_method_has_a_schema(kind: type, tools: set[str]) -> None:
    methods = dict(inspect.getmembers(kind, inspect.isfunction))
    found = {name for name in methods if not name.startswith("_")} - {"reset", "get_reward"}
    assert found == tools
    for name in tools:
        assert get_json_schema(methods[name])["function"]["description"]


def test_the_calculator_computes_and_refuses_the_rest() -> None:
    assert get_json_schema(calculate)["function"]["description"] == (
        "Compute an expression such as 12*(3+4)."
    )
    assert (calculate("12*(3+4)"), calculate("7 / 2")) == ("84", "3.5")
    for expression in ("9**9**9", "exit()", "a"):
        with pytest.raises(ValueError, match="only numbers"):
            calculate(expression)


@pytest.mark.parametrize("answer", [42, "42", "It is 6 times 7.\n#### 42"])
def test_a_guess_gets_a_hint_and_the_last_one_counts(answer: Any) -> None:
    game = Guess()
    game.reset(answer=answer, question="6*7=")
    assert game.get_reward() == 0.0
    assert [game.guess(number) for number in (7, 100, 42)] == ["too low", "too high", "right"]
    assert game.get_reward() == 1.0
    game.guess(5)
    assert game.get_reward() == 0.0


def test_the_game_is_won_with_the_key() -> None:
    game = House()
    assert game.reset(question="") == "Find the treasure. You are in the hall. Ways: north, east."
    game.go("east")
    assert game.go("down") == "The door is locked."
    for way in ("west", "north"):
        game.go(way)
    assert "There is a key here" in game.look()
    assert (game.take("key"), game.get_reward()) == ("You have the key.", 0.2)
    for way in ("south", "east", "down"):
        game.go(way)
    game.take("treasure")
    assert game.get_reward() == 1.0
    with pytest.raises(ValueError, match="There is no way north"):
        game.go("north")
    with pytest.raises(ValueError, match="There is no key here"):
        game.take("key")
    with pytest.raises(ValueError, match="attic"):
        game.reset(start="attic")


def test_the_interpreter_keeps_names_and_shows_errors() -> None:
    python = Interpreter()
    python.reset()
    assert python.run("x = 6 * 7") == "Nothing was printed."
    assert python.run("print(x)") == "42\n"
    assert python.run("print(x)\n1 / 0") == "42\nZeroDivisionError: division by zero"
    assert len(python.run("print('a' * 10000)")) == 2000
