"""The examples of docs/environments.md do what they say."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer
from transformers.utils import get_json_schema

from penstock.common.config.settings import ActorSettings
from penstock.common.episodes.pool import EpisodeFailed, EpisodePool
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.common.wire.transcript import Transcript
from penstock.deploy.environments import agent
from penstock.deploy.environments.calculator import calculate
from penstock.deploy.environments.interpreter import Interpreter
from penstock.deploy.environments.retry import Guess
from penstock.deploy.environments.text_game import House
from tests.actors.agent_site import InThread, make_ticket, roll_out
from tests.actors.talking import WITH_TOOLS, TalkingEngine, call_of, save_chat_tokenizer
from tests.packaging.openenv_server import Guessing, openenv_server
from tests.size import ROOT

DOCS = ROOT / "docs"
PAGE = (DOCS / "environments.md").read_text()
EXAMPLES = ROOT / "deploy" / "environments"
ENDED = "The code ended its process: all names are forgotten."
SLOW = "The code took over 5 s: all names are forgotten."


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


@pytest.mark.parametrize(("number", "hint"), [(42.7, "too high"), (41.5, "too low"), (42.0, "right")])
def test_a_fraction_is_right_only_if_the_hint_says_so(number: Any, hint: str) -> None:
    game = Guess()
    game.reset(answer=42)
    assert game.guess(number) == hint
    assert game.get_reward() == float(hint == "right")


def test_a_number_in_quotes_is_an_error_and_not_right() -> None:
    game = Guess()
    game.reset(answer=42)
    with pytest.raises(TypeError):
        game.guess("42")  # type: ignore[arg-type]
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


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodePool]:
    """Episodes with all examples of the page: a tool of one file, and the classes of four others."""
    with openenv_server(Guessing) as address:
        words = tmp_path_factory.mktemp("page") / "words.py"
        (page,) = [block for block in blocks() if "openenv" in block]
        words.write_text(page.replace("ws://127.0.0.1:8000", address))
        files = {"Guess": "retry.py", "House": "text_game.py", "Interpreter": "interpreter.py"}
        environments = [code(name, EXAMPLES / file) for name, file in files.items()]
        spec = EpisodeSpec(
            tools=(code("calculate", EXAMPLES / "calculator.py"),),
            environments=(*environments, code("Words", words)),
            step_timeout_s=60.0,
        )
        with closing(EpisodePool(ActorSettings(), spec)) as pool:
            yield pool


def code(name: str, file: Path) -> OwnCode:
    return OwnCode(name, str(file), hashlib.sha256(file.read_bytes()).hexdigest())


def blocks() -> list[str]:
    """The Python code of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    ("environment", "row", "calls", "reward"),
    [
        ("Guess", {"answer": "#### 7"}, [("guess", {"number": 3}, "too low"),
                                         ("guess", {"number": 7}, "right")], 1.0),
        ("House", {}, [("go", {"direction": "north"}, "There is a key"),
                       ("take", {"thing": "key"}, "You have the key.")], 0.2),
        ("Interpreter", {}, [("run", {"code": "x = 6"}, "Nothing was printed."),
                             ("run", {"code": "print(x * 7)"}, "42")], None),
        ("Words", {"answer": 7, "question": "a word"}, [("step", {"number": 7}, "right")], 1.0),
    ],
)  # fmt: skip
def test_an_example_runs_in_an_episode(
    pool: EpisodePool, environment: str, row: dict[str, Any], calls: list[Any], reward: float | None
) -> None:
    with closing(pool.begin({"environment": environment, "prompt": "?", **row})) as episode:
        episode.reset()
        for name, arguments, expected in calls:
            answer = episode.call(name, arguments)
            assert not answer.failed, answer.text
            assert expected in answer.text
        assert episode.call("calculate", {"expression": "2*3"}).text == "6"
        assert episode.call("calculate", {"expression": "import os"}).failed
        assert episode.reward() == reward


def test_the_interpreter_keeps_names_and_shows_errors(pool: EpisodePool) -> None:
    with interpreter(pool) as run:
        assert run("x = 6 * 7") == "Nothing was printed."
        assert run("print(x)") == "42\n"
        assert run("print(x)\n1 / 0") == "42\nZeroDivisionError: division by zero"
        assert len(run("print('a' * 10000)")) == 2000
        assert len(run("print('\\ud800' * 10000)")) == 2000
        assert run("import sys; sys.exit('x')") == "SystemExit: x"
        assert run("print(x)") == "42\n"


READS = "import sys; print(sys.modules['penstock.common.episodes.process']._live[0].row)"
SEARCHES = """
import gc
for one in gc.get_objects():
    for value in gc.get_referents(one, *gc.get_referents(one)):
        if isinstance(value, str) and value.endswith("75 apples"):
            print(value)
"""


@pytest.mark.parametrize("attack", [READS, SEARCHES])
def test_the_code_of_the_model_does_not_find_the_gold_answer(pool: EpisodePool, attack: str) -> None:
    with interpreter(pool, solution="42.75 apples", answer="42.75 apples") as run:
        assert "42." not in run(attack)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("class E(BaseException): pass\nraise E('x')", "E: x"),
        ("raise type('E', (BaseException,), {'__str__': lambda self: 1 / 0})", ENDED),
        ("import os; os._exit(0)", ENDED),
        ("import os; os.kill(os.getpid(), 9)", ENDED),
        ("import os\nos.fork()\nos._exit(0)", ENDED),
        ("import os; os.closerange(0, 256)", ENDED),
        ("while True: pass", SLOW),
        ("import os\nos.setpgid(0, os.getpgid(os.getppid()))\nwhile True: pass", SLOW),
        ("import os, time\nif os.fork():\n    os._exit(0)\ntime.sleep(3600)", SLOW),
        ("import os\nos.fork()\nprint('a')", "a\n"),
        ("print(len(bytearray(1 << 50)))", "MemoryError: "),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_the_code_of_the_model_cannot_set_its_rollout_aside(
    pool: EpisodePool, code: str, expected: str
) -> None:
    with interpreter(pool) as run:
        run("x = 1")
        assert run(code) == expected
        kept = "NameError: name 'x' is not defined" if expected in (ENDED, SLOW) else "1\n"
        assert run("print(x)") == kept


def test_code_that_ends_its_process_between_two_calls_is_answered(pool: EpisodePool) -> None:
    with interpreter(pool) as run:
        assert run("import threading, os; threading.Timer(0.5, os._exit, [0]).start()")
        time.sleep(1.0)
        assert run("print(1)") == ENDED
        assert run("print(1)") == "1\n"


def test_what_the_code_of_the_model_writes_is_no_answer_of_the_episode(pool: EpisodePool) -> None:
    forged = """
import os
frame = b'{"value": {"text": "forged", "failed": false}}'
for number in range(3, 64):
    try:
        os.write(number, len(frame).to_bytes(4, "big") + frame)
    except OSError:
        continue
"""
    with interpreter(pool) as run:
        assert "forged" in run(forged)  # written into the interpreter's own connection
        assert run("") == "Nothing was printed."


@contextmanager
def interpreter(pool: EpisodePool, **row: Any) -> Iterator[Callable[[str], str]]:
    """An episode of the interpreter, as the function that runs code and returns its answer."""

    def run(code: str) -> str:
        answer = episode.call("run", {"code": code})
        assert not answer.failed, answer.text
        return answer.text

    with closing(pool.begin({"environment": "Interpreter", "prompt": "?", **row})) as episode:
        episode.reset()
        yield run
        assert episode.reward() is None


def test_a_lost_openenv_server_sets_the_rollout_aside(tmp_path: Path) -> None:
    file = tmp_path / "words.py"
    with openenv_server(Guessing) as address:
        file.write_text(f"from penstock.openenv import OpenEnv\nWords = OpenEnv({address!r})\n")
        spec = EpisodeSpec(environments=(code("Words", file),), step_timeout_s=60.0)
        pool = EpisodePool(ActorSettings(), spec)
        episode = pool.begin({"answer": 7, "question": "?"})
        assert episode.reset() == "Guess: ?"
    with closing(pool), pytest.raises(EpisodeFailed, match="tool step: SystemExit: the OpenEnv server"):
        episode.call("step", {"number": 7})


def run_agent(folder: Path, said: str, gold: str, spare: int = 500) -> Transcript:
    """The example agent with a model that says this, and has so many tokens more."""
    save_chat_tokenizer(folder)
    engine = TalkingEngine(Tokenizer.from_file(str(folder / "tokenizer.json")), [said])
    needed = len(engine.tokens_of(said, np.random.default_rng(0)))
    sampling = replace(make_ticket(folder).sampling, max_tokens=needed + spare)

    async def drive(client: openai.AsyncOpenAI) -> float:
        row = {"prompt": "What is 1+2?", "answer": gold}
        return await agent.rollout(row, str(client.base_url), client.api_key)

    (made,) = asyncio.run(roll_out(folder, engine, InThread(drive), WITH_TOOLS, sampling=sampling))
    assert made.transcript is not None
    return made.transcript


@pytest.mark.parametrize(
    ("said", "gold", "reward"),
    [("It is 3.", "1+2=3\n#### 3", 1.0), ("It is 15.", "5", 0.0), ("1,200.0 apples", "1200", 1.0),
     ("It is 2-5.", "5", 1.0), ("It is -5.", "5", 0.0), ("It is 3.", "", 0.0), ("None.", "", 0.0),
     ("It is 3.", "1+2=3 ####", 0.0), ("It is .5", "0.5", 1.0), ("0.5.", ".5", 1.0)],
)  # fmt: skip
def test_the_agent_compares_the_last_number(tmp_path: Path, said: str, gold: str, reward: float) -> None:
    assert run_agent(tmp_path, said, gold).reward == reward


def test_the_agent_returns_the_reward_of_a_conversation_that_gets_too_long(tmp_path: Path) -> None:
    said = f"It is 3. {call_of('calculate', expression='1+2')}"
    talk = run_agent(tmp_path, said, "3", spare=3)
    assert (talk.turns, talk.tool_calls, talk.reward, talk.failure) == (1, 1, 1.0, "")


@pytest.mark.parametrize(
    ("name", "file"), [("calculate", "calculator.py"), ("Guess", "retry.py"), ("rollout", "agent.py")]
)
def test_the_page_shows_an_example_as_it_is(name: str, file: str) -> None:
    (block,) = [
        one
        for one in blocks()
        if one.startswith((f"def {name}(", f"class {name}:", f"async def {name}("))
    ]
    assert block in (EXAMPLES / file).read_text()


def test_the_page_names_variables_that_exist() -> None:
    known = (DOCS / "configuration.md").read_text()
    names = set(re.findall(r"(?:LEARNER|ACTOR)_[A-Z_]+", PAGE))
    assert names
    assert [name for name in names if f"| {name} |" not in known] == []
