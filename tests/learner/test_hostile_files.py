"""Files of a run with right checksums and hostile content: each is named in an error, or left out."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from structlog.testing import capture_logs

from penstock.common.errors import ConfigError
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal import segments
from penstock.common.journal.claims import Position, read_claims
from penstock.common.journal.segments import encode_record, read_journal
from penstock.common.wire.codec import encode, pack
from penstock.common.wire.ids import TicketId, Version
from penstock.common.wire.messages import Verdict
from penstock.learner.policy.collective import Form
from penstock.learner.report.recorder import Recorder
from penstock.learner.resume import _read_batch, retrain_tail
from penstock.learner.state.checkpoint import check_loadable, newest_checkpoint, save_checkpoint
from penstock.learner.state.journal import Journal
from penstock.learner.state.ledger import Ledger
from penstock.runs import read_journal as read_run
from tests.learner.builders import claim_next, make_group, make_plan, make_settings

SETTINGS = make_settings()
TABLE = Ledger().snapshot()
DEEP = "[" * 100_000
CLAIM = {"incarnation": 1, "parent": 0, "parent_length": 0, "holder": "me"}


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        '{"a":' * 5000,
        json.dumps(CLAIM | {"parent_length": {}}),
        json.dumps(CLAIM | {"parent_length": "9"}),
        json.dumps(CLAIM | {"parent_length": True}),
        json.dumps(CLAIM | {"parent_length": -1}),
        json.dumps(CLAIM | {"holder": 7}),
        json.dumps(CLAIM | {"more": 7}),
        json.dumps(CLAIM | {"incarnation": 1.0}),
        "[]",
        "\xff",
    ],
)
def test_a_claim_of_another_form_is_named(tmp_path: Path, content: str) -> None:
    path = RunFolder(tmp_path).claim(1)
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"000001\.json: damaged.*Put the file back") as caught:
        read_claims(RunFolder(tmp_path))
    assert len(str(caught.value)) < 1000


def record_of_batch() -> dict[str, Any]:
    ticket = make_plan(SETTINGS).source.train(TicketId("train:0"), Version(1, 0))
    return {
        "kind": "batch",
        "step": 1,
        "groups": [encode(make_group(ticket))],
        "filtered": [encode(Verdict("train:1", "filtered", "no spread", {"accuracy": (0.0, 0.0)}))],
        "reward_weights": {"accuracy": 1.0},
        "settings": SETTINGS.model_dump(mode="json"),
        "metrics": {},
        "ledger": TABLE,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": {}},
        {"groups": [b"no message"]},
        {"groups": 7},
        {"filtered": [7]},
        {"reward_weights": {}},
        {"reward_weights": [1]},
        {"reward_weights": {"accuracy": "much"}},
        {"settings": [1]},
        {"settings": {"no": "setting"}},
        {"metrics": 7},
        {"ledger": None},
        {"ledger": TABLE | {"next_number": "many"}},
        {"ledger": TABLE | {"next_number": -1}},
        {"ledger": TABLE | {"open": {"train:07": "1.0"}}},
        {"ledger": TABLE | {"open": {"train:7": 1}}},
        {"ledger": TABLE | {"positions": {"train:7": "a"}}},
        {"ledger": TABLE | {"to_repeat": {}}},
        {"ledger": {name: value for name, value in TABLE.items() if name != "repeats"}},
        {"kind": "header", "machine": 7},
        {"kind": "header"},
    ],
    ids=str,
)
def test_a_record_of_another_form_ends_the_resume_with_its_place(tmp_path: Path, change: dict) -> None:
    claim_next(tmp_path)
    record = record_of_batch() | change
    fields = {name: value for name, value in record.items() if value is not None}
    Journal(LearnerFolder(tmp_path, 1)).append(**fields)
    claim = claim_next(tmp_path)
    recorder = Recorder(LearnerFolder(tmp_path, 2), [], "x")
    with pytest.raises(ConfigError, match=r"journal") as caught:
        retrain_tail(RunFolder(tmp_path), claim, None, Ledger(), recorder, None)
    assert len(str(caught.value)) < 1500


def test_the_record_itself_can_be_read() -> None:
    assert _read_batch(record_of_batch(), {}).step == 1


def test_a_message_of_another_form_is_named_by_the_library(tmp_path: Path) -> None:
    claim_next(tmp_path)
    Journal(LearnerFolder(tmp_path, 1)).append(**record_of_batch() | {"groups": [b"\x91" * 2000]})
    with pytest.raises(ConfigError, match=r"journal of incarnation 1, record that ends at byte \d+"):
        list(read_run(tmp_path))


def written(folder: Path, body: bytes) -> list[Any]:
    """What is read from a journal with one record of this compressed body."""
    path = RunFolder(folder).segment(1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(segments._PREFIX.pack(len(body), zlib.crc32(body)) + body)
    return list(read_journal(RunFolder(folder), 1))


def test_a_record_that_becomes_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_LEAST_ROOM", 1 << 20)
    assert written(tmp_path, zlib.compress(pack({"kind": "a", "b": bytes(64 << 10)})))
    assert written(tmp_path, zlib.compress(pack({"kind": "a", "b": bytes(2 << 20)}))) == []


@pytest.mark.parametrize(
    "body",
    [
        zlib.compress(pack([1])),
        zlib.compress(pack({"kind": ["batch"]})),
        zlib.compress(pack({"kind": "a"})) + b"more",
        zlib.compress(pack({"kind": "a"}))[:-3],
        zlib.compress(b"\x91" * 5000),
    ],
    ids=["a list", "no kind", "more behind", "cut", "deep"],
)
def test_a_record_that_is_no_map_is_damaged(tmp_path: Path, body: bytes) -> None:
    assert written(tmp_path, body) == []


def test_a_record_that_shrinks_much_is_stored_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_LEAST_ROOM", 1 << 20)
    record = {"kind": "batch", "groups": [bytes(2 << 20)]}
    path = RunFolder(tmp_path).segment(1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_record(record))
    assert path.stat().st_size > 2 << 20
    assert [found for _, found in read_journal(RunFolder(tmp_path), 1)] == [record]


class OneFile:
    """A policy whose model and optimizer are one file each."""

    def export(self, folder: Path, form: Form = "checkpoint") -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")

    save = export


def checkpointed(folder: Path) -> Path:
    claim_next(folder)
    return save_checkpoint(
        LearnerFolder(folder, 1), OneFile(), 1, Position(1, 0), TABLE, SETTINGS
    ).folder


def rewrite_state(folder: Path, content: str) -> None:
    """Put another state.json there, with its hash in the manifest."""
    (folder / "state.json").write_text(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = blake3(content.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


STATE = {"step": 1, "position": {"incarnation": 1, "offset": 0}, "ledger": TABLE}
STATE |= {"trained_with": {}, "machine": {}}


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        "[]",
        json.dumps(STATE | {"position": {"incarnation": "1", "offset": 0}}),
        json.dumps(STATE | {"position": {"incarnation": 1, "offset": -1}}),
        json.dumps(STATE | {"position": {"incarnation": 1}}),
        json.dumps(STATE | {"step": "1"}),
        json.dumps(STATE | {"ledger": {}}),
        json.dumps(STATE | {"ledger": TABLE | {"open": ["train:7"]}}),
        json.dumps(STATE | {"trained_with": [1]}),
        json.dumps(STATE | {"machine": "mine"}),
    ],
)
def test_a_checkpoint_with_a_state_of_another_form_is_not_used(tmp_path: Path, content: str) -> None:
    rewrite_state(checkpointed(tmp_path), content)
    with capture_logs() as logs:
        assert newest_checkpoint(LearnerFolder(tmp_path, 2), claim_next(tmp_path)) is None
    assert "unreadable" in logs[-1]["problem"]


@pytest.mark.parametrize("name", ["/dev/zero", "../../../../../../../dev/zero", "link", "model", "no"])
def test_a_manifest_that_names_what_is_no_file_of_the_checkpoint_is_damage(
    tmp_path: Path, name: str
) -> None:
    folder = checkpointed(tmp_path)
    (folder / "link").symlink_to("/dev/zero")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, name: "00" * 32}))
    assert newest_checkpoint(LearnerFolder(tmp_path, 2), claim_next(tmp_path)) is None


def test_a_checkpoint_trained_with_something_unknown_is_refused_by_name(tmp_path: Path) -> None:
    folder = checkpointed(tmp_path)
    rewrite_state(folder, json.dumps(STATE | {"trained_with": {"LEARNER_MAGIC": 7}}))
    checkpoint = newest_checkpoint(LearnerFolder(tmp_path, 2), claim_next(tmp_path))
    with pytest.raises(ConfigError, match="LEARNER_MAGIC was 7"):
        check_loadable(checkpoint, SETTINGS)


@pytest.mark.parametrize(
    "line", [DEEP, "7", "[]", "{}", '{"step": "1"}', '{"step": [1]}', '{"step": null}', '"\\ud800"']
)
def test_a_row_of_another_form_is_left_out(tmp_path: Path, line: str) -> None:
    recorder = Recorder(LearnerFolder(tmp_path, 1), [], "x")
    recorder.metrics(1, {"reward": 0.5})
    row = {"step": 0, "version": "1.0", "questions": 1}
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        rows = [json.dumps(row), line, json.dumps(row | {"step": 1}), line]
        (tmp_path / name).write_text("".join(f"{one}\n" for one in rows))
    (tmp_path / "evaluations.jsonl").open("a").write('{"step": 3, "version": [], "questions": 1}\n')
    recorder.cut_after(0)
    assert recorder.evaluated_steps() == {0, 1}
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [0]
    recorder.metrics(1, {"reward": 0.5})
    recorder.cut_after(1)
    assert [row["step"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [0, 1]
    evaluations = read_json_lines(tmp_path / "evaluations.jsonl", version=str)
    assert [row["step"] for row in evaluations] == [0, 1]
