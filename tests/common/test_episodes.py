"""Episodes: what healthy tools and environments get and return, and what of a user's code is refused."""

from __future__ import annotations

import hashlib
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.common.config.settings import ActorSettings
from penstock.common.episodes import process
from penstock.common.episodes.pool import Episode, EpisodeFailed, EpisodePool
from penstock.common.errors import NEVER_RESTARTED, ConfigError
from penstock.common.sandbox.settings import SandboxFailed
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from tests.common import bad_environments
from tests.helpers import is_dead, needs_root, wait_until

SOURCE = Path(bad_environments.__file__)


def code(name: str, source: Path = SOURCE) -> OwnCode:
    return OwnCode(name, str(source), hashlib.sha256(source.read_bytes()).hexdigest())


def spec(tools: str = "", environments: str = "", source: Path = SOURCE, **changes: Any) -> EpisodeSpec:
    """The names are separated by spaces."""
    found = {
        "tools": tuple(code(name, source) for name in tools.split()),
        "environments": tuple(code(name, source) for name in environments.split()),
    }
    return EpisodeSpec(**found, **{"step_timeout_s": 60.0} | changes)


def make_pool(asked: EpisodeSpec, **settings: Any) -> EpisodePool:
    return EpisodePool(ActorSettings(**settings), asked, modules=(__name__,))


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """A stand-in for the schema of a tool."""
    return {"function": {"name": tool.__name__}}


def described(pool: EpisodePool) -> dict[str, list[str]]:
    """The names of the tools by environment."""
    found = pool.describe(f"{__name__}:schema_of")
    return {name: [schema["function"]["name"] for schema in tools] for name, tools in found.items()}


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    with closing(make_pool(spec("add later", "Counter Bare Loops Resets Rewards Bad"))) as pool:
        yield pool


def begin(pool: EpisodePool, environment: str, **row: Any) -> Episode:
    return pool.begin({"environment": environment, **row})


def test_an_environment_has_its_state_until_the_end_of_the_episode(pool: EpisodePool) -> None:
    with closing(begin(pool, "Counter", start=3)) as episode:
        assert str(episode.reset()).endswith("from 3")
        assert [episode.call("increase", {"by": by}).text for by in (1, 5)] == ["4", "9"]
        assert episode.reward() == 9.0


def test_functions_sync_and_async_are_tools_too(pool: EpisodePool) -> None:
    with closing(begin(pool, "Counter")) as episode:
        episode.reset()
        for name, arguments, expected in (
            ("add", {"a": 2, "b": 3}, "5"),
            ("add", {"a": 2}, "3"),
            ("later", {"text": "é\n"}, "é\n"),
        ):
            answer = episode.call(name, arguments)
            assert (answer.text, answer.failed) == (expected, False)


NAMES = """
import numpy as np, random

def make(kind):
    def tool(q: str) -> str:
        return kind + q
    return tool

web = make("web ")
wiki = make("wiki ")

class Drawn:
    def reset(self, **row):
        return f"{np.random.randint(1 << 30)} {random.randrange(1 << 30)}"

    def _look(self, q: str) -> str:
        return q

    look = _look
"""


def test_a_tool_is_shown_by_the_name_it_is_called_by(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NAMES)
    tmp_path.chmod(0o755)
    with closing(make_pool(spec("web wiki", "Drawn", source=tmp_path / "own.py"))) as pool:
        assert described(pool) == {"Drawn": ["web", "wiki", "look"]}
        with closing(pool.begin({})) as episode:
            for name, expected in (("web", "web x"), ("wiki", "wiki x"), ("look", "x")):
                assert episode.call(name, {"q": "x"}).text == expected


def test_each_episode_draws_numbers_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NAMES)
    tmp_path.chmod(0o755)
    with closing(make_pool(spec("", "Drawn", source=tmp_path / "own.py"))) as pool:
        drawn = []
        for _ in range(3):
            with closing(pool.begin({})) as episode:
                drawn.append(str(episode.reset()).split())
    assert all(len(set(numbers)) == 3 for numbers in zip(*drawn, strict=True))


def test_two_tools_of_one_name_are_refused() -> None:
    asked = replace(spec("add"), tools=(code("add"), code("add")))
    with closing(make_pool(asked)) as pool, pytest.raises(ConfigError, match="have one name"):
        described(pool)


def test_functions_alone_need_no_environment() -> None:
    with closing(make_pool(spec("add later"))) as pool, closing(pool.begin({"x": 1})) as episode:
        assert episode.reset() is None
        assert episode.call("add", {"a": 1}).text == "2"
        assert episode.reward() is None


def test_a_reset_gets_the_columns_that_it_asks_for(pool: EpisodePool) -> None:
    row = {"question": "1+1=", "image": b"\x89PNG", "deep": {"a": [1, 2.5, None]}}
    with closing(begin(pool, "Bare", **row)) as episode:
        assert episode.reset() is None
        assert episode.call("ask", {}).text == "1+1="
        assert episode.reward() is None
    with closing(begin(pool, "Counter", **row)) as episode:
        assert "['deep', 'image', 'question'] from 0" in str(episode.reset())
        for name, value in row.items():
            assert episode.call("column", {"name": name}).text == repr(value)


SEARCHING = """
import gc

def found() -> str:
    mark, texts = "".join(("value", " of ")), set()
    for one in gc.get_objects():
        for value in gc.get_referents(one, *gc.get_referents(one)):
            if isinstance(value, str) and value.startswith(mark):
                texts.add(value)
    return " ".join(sorted(text[len(mark):] for text in texts))

class Own:
    def reset(self, SIGNATURE):
        given = {**locals(), **locals().get("row", {})}
        return " ".join(sorted(name for name in given if str(given[name]).startswith("value of ")))
    GET_REWARD = lambda self: 1.0
"""
ROW = {name: f"value of {name}" for name in ("Answer", "level", "prompt", "solution")}


@pytest.mark.parametrize(
    ("signature", "get_reward", "expected"),
    [
        ("", False, ""),
        ("", True, ""),
        ("prompt", False, "prompt"),
        ("level, *, Answer", False, "Answer level"),
        ("level='', *, no_column=5", False, "level"),
        ("**row", False, "level prompt"),
        ("*solution, Answer, **row", False, "Answer level prompt"),
        ("**row", True, "Answer level prompt solution"),
    ],
)
def test_a_process_gets_only_the_columns_that_its_reset_asks_for(
    signature: str, get_reward: bool, expected: str, tmp_path: Path
) -> None:
    text = SEARCHING.replace("SIGNATURE", signature)
    text = text.replace("GET_REWARD", "get_reward") if get_reward else text
    asked = spec("found", "Own", write_own(tmp_path, text), gold=("answer", "solution"))
    with closing(make_pool(asked)) as pool, closing(pool.begin(ROW)) as episode:
        assert episode.call("found", {}).text == ""
        assert episode.reset() == expected


def test_a_process_of_tools_alone_gets_no_column(tmp_path: Path) -> None:
    asked = spec("found", source=write_own(tmp_path, SEARCHING.replace("SIGNATURE", "")))
    with closing(make_pool(asked)) as pool, closing(pool.begin(ROW)) as episode:
        episode.reset()
        assert episode.call("found", {}).text == ""


@pytest.mark.parametrize("wanted", ['"prompt"', '{"prompt": 1}', "null", "5"])
def test_a_class_that_forges_which_columns_it_gets_fails_the_episode(
    wanted: str, tmp_path: Path
) -> None:
    source = write_own(
        tmp_path,
        "import os\n"
        "class Own:\n"
        "    def __init__(self):\n"
        f"        frame = b'{{\"value\": {wanted}}}'\n"
        "        for number in range(3, 64):\n"
        "            try: os.write(number, len(frame).to_bytes(4, 'big') + frame)\n"
        "            except OSError: pass\n"
        "    def reset(self): pass\n",
    )
    with (
        closing(make_pool(spec("", "Own", source))) as pool,
        pytest.raises(EpisodeFailed, match=r"making the environment: .* of another form"),
    ):
        pool.begin(ROW)


def write_own(folder: Path, text: str) -> Path:
    """A file with this code, which every user can read."""
    (folder / "own.py").write_text(text)
    folder.chmod(0o755)
    return folder / "own.py"


def test_all_async_calls_of_an_episode_share_an_event_loop(pool: EpisodePool) -> None:
    with closing(begin(pool, "Loops")) as episode:
        episode.reset()
        assert episode.call("begin", {}).text == "begun"
        assert episode.call("finish", {}).text == "done"
        assert episode.reward() == 0.5


def test_two_episodes_share_nothing(pool: EpisodePool) -> None:
    with closing(begin(pool, "Counter")) as first, closing(begin(pool, "Counter")) as second:
        for episode in (first, second):
            episode.reset()
        assert first.call("remember", {"text": "a"}).text == "a"
        assert second.call("remember", {"text": "b"}).text == "b"
        assert first.call("remember", {"text": "c"}).text == "a,c"
        first.call("increase", {"by": 7})
        assert second.reward() == 0.0
    with closing(begin(pool, "Counter")) as third:
        third.reset()
        assert third.call("remember", {"text": "d"}).text == "d"


def test_64_episodes_live_at_once(pool: EpisodePool) -> None:
    with ThreadPoolExecutor(64) as threads:
        episodes = list(threads.map(lambda number: begin(pool, "Counter", start=number), range(64)))
        list(threads.map(Episode.reset, episodes))
        list(threads.map(lambda episode: episode.call("increase", {"by": 100}), episodes))
        assert list(threads.map(Episode.reward, episodes)) == [100.0 + number for number in range(64)]
        list(threads.map(Episode.close, episodes))


def test_the_wrong_call_of_a_tool_is_answered(pool: EpisodePool) -> None:
    with closing(begin(pool, "Counter")) as episode:
        episode.reset()
        for name, arguments, expected in (
            ("nosuch", {}, "nosuch"),
            ("_hidden", {}, "_hidden"),
            ("reset", {}, "reset"),
            ("get_reward", {}, "get_reward"),
            ("__init__", {}, "__init__"),
            ("add", {}, "missing"),
            ("add", {"a": 1, "c": 2}, "'c'"),
            ("add", {"a": 1, "b": "x"}, "unsupported operand"),
            ("add", {"a": 10**40}, "out of range"),
        ):
            answer = episode.call(name, arguments)
            assert answer.failed, name
            assert expected in answer.text
        assert episode.call("add", {"a": 1}).text == "2"


def test_the_step_is_named_while_it_runs(pool: EpisodePool) -> None:
    episode = begin(pool, "Bad")
    assert episode.step == ""
    episode.reset()
    assert episode.step == ""
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(episode.call, "never_ends", {})
        wait_until(lambda: episode.step == "tool never_ends", "the step")
        episode.abandon()
        with pytest.raises(EpisodeFailed):
            call.result(timeout=60)
    episode.close()
    episode.close()
    with pytest.raises(EpisodeFailed):
        episode.call("nothing", {})


def test_an_episode_outlives_its_pool_harmlessly() -> None:
    before = processes()
    pool = make_pool(spec("add"))
    first, second = pool.begin({}), pool.begin({})
    pool.close()
    pool.close()
    first.abandon()
    second.close()
    with pytest.raises(EpisodeFailed, match="tool add"):
        second.call("add", {"a": 1})
    wait_until(lambda: not processes() - before, "the processes to end")


def test_a_row_names_one_of_several_environments(pool: EpisodePool) -> None:
    for row in ({"environment": "Nosuch"}, {}, {"environment": None}):
        with pytest.raises(EpisodeFailed, match="environment"):
            pool.begin(row)


def test_a_killed_process_fails_its_episode_alone(pool: EpisodePool) -> None:
    with closing(begin(pool, "Counter")) as episode, closing(begin(pool, "Counter")) as other:
        before = processes()
        with closing(begin(pool, "Counter")) as killed:
            killed.reset()
            for process in processes() - before:
                process.kill()
            with pytest.raises(EpisodeFailed, match="tool increase"):
                killed.call("increase", {"by": 1})
        for one in (episode, other):
            one.reset()
            assert one.call("increase", {"by": 1}).text == "1"
    with closing(begin(pool, "Counter")) as later:
        later.reset()
        assert later.call("increase", {"by": 2}).text == "2"


def test_a_process_that_was_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    with closing(make_pool(spec("add"))) as pool:
        before = processes()
        with closing(pool.begin({})), closing(pool.begin({})):
            pass
        started = {process for process in processes() - before if below_nursery(process)}
        assert started
        for process in started:
            process.kill()
        for _ in range(3):
            with closing(pool.begin({})) as episode:
                assert episode.call("add", {"a": 1}).text == "2"


@pytest.mark.parametrize("keepers", [True, False])
@pytest.mark.parametrize("where", ["import", "__init__"])
def test_a_process_that_is_killed_before_its_episode_has_begun_is_replaced(
    where: str, keepers: bool, tmp_path: Path, marker: Path
) -> None:
    source = write_game(tmp_path, marker, where, "time.sleep(600 if seen == 1 else 0)")
    with closing(make_pool(game(source))) as pool, ThreadPoolExecutor(1) as thread:
        before = processes()
        begun = thread.submit(pool.begin, {})
        wait_until(lambda: letters(marker), "the code to sleep")
        started = [process for process in processes() - before if below_nursery(process)]
        for process in [one for one in started if keepers or not one.children()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with closing(begun.result(timeout=60)) as episode:
            assert episode.reset() == "begun"


def test_code_that_kills_its_process_is_tried_twice_and_told(tmp_path: Path, marker: Path) -> None:
    source = write_game(tmp_path, marker, "__init__", "os.kill(os.getpid(), 9)")
    with closing(make_pool(game(source))) as pool:
        with pytest.raises(EpisodeFailed, match=r"environment killed its process \(exit code -9\)"):
            pool.begin({})
        assert len(marker.read_text()) == 2


def test_killed_processes_are_not_taken_for_wrong_tools(tmp_path: Path, marker: Path) -> None:
    """The learner ends with an exit code after which it is started again."""
    source = write_game(tmp_path, marker, "import", "time.sleep(600)")
    with closing(make_pool(game(source))) as pool, ThreadPoolExecutor(1) as thread:
        before = processes()
        describing = thread.submit(pool.describe, f"{__name__}:schema_of")
        for killed in range(4):
            wait_until(lambda: len(letters(marker)) > killed, "the code to sleep")  # noqa: B023
            for process in [one for one in processes() - before if below_nursery(one)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        with pytest.raises(SandboxFailed, match="import of this code ended its process") as failure:
            describing.result(timeout=60)
        assert failure.value.exit_code not in NEVER_RESTARTED


def test_code_that_ends_its_process_on_import_is_tried_once(tmp_path: Path, marker: Path) -> None:
    source = write_game(tmp_path, marker, "import", "os._exit(3)")
    with closing(make_pool(game(source))) as pool:
        with pytest.raises(
            EpisodeFailed, match=r"import of this code ended its process \(exit code 3\)"
        ):
            pool.begin({})
        assert len(marker.read_text()) == 1


def test_no_process_starts_once_the_pool_is_closed(tmp_path: Path, marker: Path) -> None:
    source = write_game(tmp_path, marker, "__init__", "time.sleep(600)")
    before = processes()
    with closing(make_pool(game(source))) as pool, ThreadPoolExecutor(1) as thread:
        begun = thread.submit(pool.begin, {})
        wait_until(lambda: letters(marker), "the code to sleep")
        started = processes() - before
        pool.close()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with pytest.raises(EpisodeFailed):
            begun.result(timeout=60)
        with pytest.raises(EpisodeFailed):
            pool.begin({})
    assert len(marker.read_text()) == 1
    wait_until(lambda: processes() <= before, "all processes to end")


def write_game(folder: Path, marker: Path, where: str, line: str) -> Path:
    """An environment that adds a letter to the `marker` on import or in __init__, then runs `line`.

    The line may use `seen`, the number of letters.
    """
    path = folder / "game.py"
    path.write_text(
        "import os, time\n"
        "def act():\n"
        f"    with open({str(marker)!r}, 'a+') as file:\n"
        "        seen = file.write('x') and file.tell()\n"
        f"    {line}\n"
        "class Game:\n"
        f"    {'def __init__(self): ' if where == '__init__' else ''}act()\n"
        "    def reset(self, **row): return 'begun'\n"
    )
    return path


def letters(marker: Path) -> str:
    """What the code has written; a process that is killed before it has written counts for none."""
    return marker.read_text() if marker.exists() else ""


def game(source: Path) -> EpisodeSpec:
    return spec(environments="Game", source=source, step_timeout_s=300.0)


def below_nursery(process: psutil.Process) -> bool:
    """Whether a process is below a nursery: a keeper, or what it keeps."""
    return process.ppid() != os.getpid()


def processes() -> set[psutil.Process]:
    """All processes below this one."""
    return set(psutil.Process().children(recursive=True))


@pytest.mark.parametrize("leave", [Episode.close, Episode.abandon, None])
def test_what_an_episode_started_ends_with_it(pool: EpisodePool, leave: Any, marker: Path) -> None:
    before = processes()
    episode = begin(pool, "Bad")
    episode.reset()
    assert episode.call("fork_and_return", {"marker": str(marker)}).text == "forked"
    daemons = {process for process in processes() - before if is_daemon(process, marker)}
    assert len(daemons) == 1
    if leave is None:
        with pytest.raises(EpisodeFailed, match="exit code 0"):
            episode.call("leave", {})
    else:
        leave(episode)
    wait_until(lambda: all(is_dead(process.pid) for process in daemons), "the daemon to end")


@pytest.fixture
def marker() -> Iterator[Path]:
    """A file that any user can make."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder) / "child"


def is_daemon(process: psutil.Process, marker: Path) -> bool:
    """Whether a process wrote its number, which may be that of a namespace, to the file."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    (numbers,) = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
    return numbers[-1] == marker.read_text()


@needs_root
def test_an_episode_is_nobody(pool: EpisodePool) -> None:
    with closing(begin(pool, "Bad")) as episode:
        episode.reset()
        assert episode.call("user", {}).text == str(pwd.getpwnam("nobody").pw_uid)


WRONG = {
    "no_name": ("", "g", "", "no function or class g, it has"),
    "no_function": ("f = 5", "f", "", "no function or class f"),
    "no_class": ("def f() -> int: ...", "", "f", "the environment f is no class"),
    "no_reset": ("class F: ...", "", "F", "F has no reset"),
    "no_method": ("class F:\n    reset = 5", "", "F", "F has no reset"),
    "twice": (
        "def f() -> int: ...\nclass F:\n    def reset(self): ...\n    def f(self) -> int: ...",
        "f",
        "F",
        "F.f has the name of a tool",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_code_that_cannot_be_used_is_named(case: str, tmp_path: Path) -> None:
    text, tools, environments, expected = WRONG[case]
    path = tmp_path / "wrong.py"
    path.write_text(text)
    asked = spec(tools, environments, path)
    for one in (*asked.tools, *asked.environments):
        process.load(one.source, one.digest)
    with pytest.raises(ConfigError, match=expected):
        process.describe(asdict(asked), f"{__name__}:schema_of")


@pytest.mark.parametrize(
    ("text", "words"),
    [("raise LookupError('no such module')", "no such module"), ("import os\nos._exit(3)", "wrong.py")],
)
def test_code_that_cannot_be_imported_is_a_wrong_setting(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with closing(make_pool(spec("f", "", path))) as pool:
        with pytest.raises(ConfigError, match=words):
            described(pool)
        with pytest.raises(EpisodeFailed, match=words):
            pool.begin({})


def test_public_methods_and_functions_are_described(pool: EpisodePool) -> None:
    found = described(pool)
    assert found["Counter"] == ["add", "later", "column", "increase", "remember"]
    assert found["Loops"] == ["add", "later", "begin", "finish"]


def test_code_of_another_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "changed.py"
    path.write_text("def f() -> int:\n    '''Do.'''\n    return 5")
    asked = spec("f", source=path)
    path.write_text(path.read_text() + "\n")
    with closing(make_pool(asked)) as pool, pytest.raises(EpisodeFailed, match="hash"):
        pool.begin({})


FORKS: Mapping[str, str] = {
    "threads": "from threading import *\nThread(target=Event().wait, daemon=True).start()\n",
    "late imports": "",
}


@pytest.mark.parametrize("kind", FORKS)
def test_code_that_cannot_be_forked_gets_a_process_per_episode(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "threaded.py"
    path.write_text(
        f"{FORKS[kind]}SEEN = []\n"
        "class F:\n"
        "    def reset(self, **row): SEEN.append(1)\n"
        "    def seen(self) -> int:\n"
        "        '''Say how often.'''\n"
        "        import colorsys\n"
        "        return len(SEEN)\n"
    )
    with closing(make_pool(spec("", "F", path))) as pool:
        for _ in range(3):
            with closing(pool.begin({})) as episode:
                episode.reset()
                assert episode.call("seen", {}).text == "1"
