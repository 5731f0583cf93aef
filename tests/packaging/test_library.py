"""The Python library: what importing it loads, its names, and the examples of docs/python.md."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock.common.broker.local_server import LocalServer
from tests.e2e.site import FAKE_PROCFILE, ROOT, make_model, write_questions
from tests.helpers import wait_until

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
HEAVY = {
    "torch", "vllm", "transformers", "deepspeed", "numpy", "redis", "pydantic", "math_verify",
    "structlog",
}  # fmt: skip
BETWEEN = "-- next example --"


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, penstock; print(*{name.partition('.')[0] for name in sys.modules})"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    loaded = set(answer.stdout.split())
    assert "penstock" in loaded
    assert not loaded & HEAVY


def test_reading_a_journal_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, penstock\n"
        "try: list(penstock.read_journal('.'))\n"
        "except penstock.ConfigError as error: print(error)\n"
        "print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert answer.stdout.splitlines() == [
        ".: no journal of a run there; expected journal/ and claims/",
        "False",
    ]


def test_editors_the_table_and_all_have_the_same_names() -> None:
    (block,) = [
        node
        for node in ast.parse(Path(penstock.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == penstock._MODULE_OF
    assert sorted(penstock.__all__) == sorted(seen)
    assert set(penstock.__all__) <= set(dir(penstock))
    for name in penstock.__all__:
        assert getattr(penstock, name).__doc__, name


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainer'; see penstock\.__all__"):
        _ = penstock.Trainer  # type: ignore[attr-defined]


ROW = {"question": "1+1=", "answer": "2", "level": 3, "completions": ["2", "it is 3"]}
COLUMNS = """
def own(prompts, completions, completion_ids, solution, level, log_extra):
    log_extra("seen", [prompts[0], solution[1]])
    return [level[0], completion_ids[1][0]]
"""


def test_a_reward_is_called_as_in_a_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(COLUMNS)
    row = ROW | {"completion_ids": [[1], [7, 8]], "log_extra": "a column of this name is left out"}
    (scores,) = penstock.try_reward(f"{tmp_path / 'own.py'}:own", [row])
    assert scores == penstock.Scores((3.0, 7.0), {"seen": ("1+1=", "2")}, {})


def test_settings_give_the_options_and_the_columns() -> None:
    settings = penstock.LearnerSettings(
        rewards=["accuracy"], soft_cache_length=2, soft_max_length=4, prompt_column="level"
    )
    row = ROW | {"level": "hard", "completion_ids": [[1] * 3, [1] * 9]}
    (scores,) = penstock.try_reward("soft_overlong", [row], settings)
    assert scores.values == (-0.5, -1.0)


def ends(completions: list[str]) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("reward", "row", "error", "words"),
    [
        ("acuracy", ROW, penstock.ConfigError, "did you mean accuracy"),
        ("gone.py:own", ROW, penstock.ConfigError, "there is no file"),
        (lambda a, b, c: 1.0, ROW, penstock.ConfigError, "is of no known form"),
        ("format", {"completions": ["a"]}, penstock.DataError, "row 1: none of the columns prompt"),
        ("accuracy", ROW | {"answer": None}, penstock.DataError, "answer is null"),
        ("format", {"prompt": "1+1="}, penstock.DataError, "completions is None; expected a list"),
        (lambda completions: [1.0], ROW, ValueError, "expected a list of 2 values"),
        (lambda completions: [1.0, float("nan")], ROW, ValueError, "expected finite numbers or None"),
        (ends, ROW, SystemExit, "3"),
    ],
)
def test_what_is_wrong_is_raised(reward, row, error, words) -> None:
    with pytest.raises(error, match=words):
        penstock.try_reward(reward, [row])


def prepare(folder: Path) -> None:
    """Write what the page's run needs: model, questions, and a Procfile with the tests' actor."""
    make_model(folder / "model", max_position_embeddings=1024)
    write_questions(folder / "questions.jsonl", 20)
    (folder / "Procfile").write_text(FAKE_PROCFILE)


def environment(server: str) -> dict[str, str]:
    """The variables of the page's run."""
    return os.environ | {
        "REDIS_URL": server,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "REWARDER_WORKERS": "1",
    }


@pytest.mark.e2e
def test_the_examples_of_the_page_print_what_it_shows(
    tmp_path: Path, private_server: LocalServer
) -> None:
    prepare(tmp_path)
    examples = []
    for code, printed in BLOCK.findall(PAGE):
        if name := re.match(r"# (\w+\.py)\n", code):
            (tmp_path / name.group(1)).write_text(code)
        else:
            examples.append((code, printed))
    script = f"\nprint({BETWEEN!r})\n".join(code for code, _ in examples)
    (tmp_path / "page.py").write_text(script)
    answer = subprocess.run(
        [sys.executable, "page.py"],
        capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
        env=environment(private_server.url),
    )  # fmt: skip
    log = tmp_path / "first.log"
    said = answer.stdout + answer.stderr[-3000:] + (log.read_text()[-3000:] if log.is_file() else "")
    assert answer.returncode == 0, said
    found = answer.stdout.split(f"{BETWEEN}\n")
    assert found == [printed for _, printed in examples], said
    with pytest.raises(penstock.ConfigError, match="LEARNER_LOSS_TYPE"):
        penstock.replay(tmp_path / "runs" / "first", tmp_path / "wrong", loss_type="none")
    lines = (tmp_path / "runs" / "first" / "lines.jsonl").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ['{"step": 1', '{"step": 2']


@pytest.mark.e2e
def test_ctrl_c_ends_the_run_in_order_and_is_raised(tmp_path: Path, private_server: LocalServer) -> None:
    prepare(tmp_path)
    code = (
        "import penstock, signal\n"
        # A shell that starts the tests in the background has them ignore SIGINT; a terminal does not.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    penstock.run(penstock.RunSettings(name='cut'), penstock.LearnerSettings(\n"
        "        model='model', dataset=['questions.jsonl'], max_steps=100000))\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        env=environment(private_server.url),
    )  # fmt: skip
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    try:
        wait_until(lambda: sum("-- Started" in line for line in list(lines)) >= 3, "three roles", 300)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
    reader.join(120)
    assert lines[-1] == "interrupted\n", lines
    assert sum("-- Ended" in line or "-- Killed" in line for line in lines) == 3, lines
