"""The paths of a run: fixed, because a run of an older version is resumed from them."""

from __future__ import annotations

from pathlib import Path

from penstock.common.files.run_folder import RunFolder

PATHS = {
    "learner_lock": "learner.lock",
    "up_lock": "up.lock",
    "nonce": "nonce",
    "claims": "claims",
    "journal": "journal",
    "checkpoints": "checkpoints",
    "versions": "versions",
    "best": "best",
    "not_finite": "not_finite",
    "metrics": "metrics.jsonl",
    "evaluations": "evaluations.jsonl",
    "completions": "completions",
    "tensorboard": "tensorboard",
    "learning_curve": "learning_curve.png",
    "log": "log.txt",
    "replay": "replay",
    "server": "queue",
    "server_url": "queue/url",
    "server_configuration": "queue/server.conf",
    "server_log": "queue/server.log",
}


def test_every_path_is_where_earlier_versions_put_it() -> None:
    folder = RunFolder(Path("run"))
    found = {name: str(path) for name, path in vars(folder).items() if name != "path"}
    assert found == {name: f"run/{path}" for name, path in PATHS.items()}


def test_numbered_paths_are_where_earlier_versions_put_them() -> None:
    folder = RunFolder(Path("run"))
    assert [
        str(path)
        for path in (
            folder.claim(2), folder.segment(2, 900), folder.checkpoint(2, 40), folder.best_model(40),
            folder.completion_table(40), folder.results("eval"),
        )
    ] == [
        "run/claims/000002.json", "run/journal/000002-000000000900.journal",
        "run/checkpoints/000002-00000040", "run/best/00000040",
        "run/completions/completions_00040.parquet", "run/eval_results.json",
    ]  # fmt: skip
    assert folder.version(2, 40) == Path("run/versions/000002-00000040").absolute()


def test_the_newest_incarnation_is_read_from_the_names_of_the_claims(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest_incarnation() == 0
    folder.claims.mkdir()
    for name in ("000001.json", "000012.json", "000013.4711"):
        (folder.claims / name).touch()
    assert folder.newest_incarnation() == 12
