from __future__ import annotations

from pathlib import Path

import pytest

from penstock.common.errors import ConfigError
from penstock.deploy.procfile import SHIPPED, parse, read_procfile

ROOT = Path(__file__).parents[2]


def test_commands_come_by_name_in_their_order() -> None:
    text = "# a run\n\nlearner: learner --x\n  actor :A=1 actor # two\n"
    assert parse(text, "Procfile") == {"learner": "learner --x", "actor": "A=1 actor # two"}
    assert list(parse("b: 1\na: 2\n", "Procfile")) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learner: learner\nactor\n", "P, line 2: found 'actor', write `name: command`"),
        ("learner:\n", "line 1"),
        ("a b: c\n", "line 1"),
        ("a: 1\na: 2\n", "line 2: a is there twice"),
        ("# nothing\n", "names no process"),
    ],
)
def test_a_mistake_names_its_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text, "P")


def test_the_working_directorys_procfile_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(read_procfile(None)) == {"learner", "actor", "rewarder"}
    (tmp_path / "Procfile").write_text("\ufefflearner: mine\n")  # as Windows writes it
    assert read_procfile(None) == {"learner": "mine"}


def test_a_missing_procfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_procfile(tmp_path / "absent")


def test_a_procfile_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "P").write_bytes("learner: learner --café\n".encode("latin-1"))
    with pytest.raises(
        ConfigError, match=r"--procfile .*P: cannot be read: .*0xe9.*UTF-8 text: correct"
    ):
        read_procfile(tmp_path / "P")


def test_the_shipped_procfile_is_the_top_level_one() -> None:
    assert SHIPPED.read_text() == (ROOT / "Procfile").read_text()
