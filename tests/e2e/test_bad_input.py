"""What a user can get wrong: each ends at once with one clear message and its documented exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.files.lock import hold_lock
from penstock.common.files.run_folder import RunFolder
from penstock.common.phases import Phases
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import Contract
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.streams.heartbeat import Heartbeat
from penstock.learner.streams.learner_queue import LearnerQueue
from tests.e2e.forked import Forked
from tests.e2e.site import ROOT, make_model, write_questions
from tests.helpers import wait_until

GOOD_ROW = '{"question": "1+1=", "answer": "2"}'

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class Runner:
    """A folder, a server and a model; runs a role to its end."""

    def __init__(self, folder: Path, url: str, model: Path):
        self.folder = folder
        self.variables = {
            "REDIS_URL": url,
            "RUN_NAME": folder.name,
            "RUN_DIR": str(folder),
            "LEARNER_MODEL": str(model),
            "LEARNER_DATASET": str(write_questions(folder / "questions.jsonl", 8)),
            "LEARNER_MAX_STEPS": "1",
            "LEARNER_MAX_PROMPT_LENGTH": "20",
            "LEARNER_MAX_COMPLETION_LENGTH": "8",
        }

    def run(self, role: str, *arguments: str, forked: bool = True, **changes: str) -> tuple[int, str]:
        """Exit code and standard error. `forked` False: a learner too is a new Python process.

        Of a forked learner standard output is included.
        """
        if role == "learner" and forked:
            learner = Forked("penstock.learner", arguments, ROOT, os.environ | self.variables | changes)
            output = learner.read(300)
            return learner.wait(60), output
        module = {"learner": "penstock.learner", "actor": "penstock.actors"}.get(
            role, "penstock.rewarders"
        )
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | self.variables | changes, timeout=300, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    def write(self, *lines: str) -> str:
        path = self.folder / "written.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    @property
    def run_folder(self) -> Path:
        return self.folder / self.variables["RUN_NAME"]

    def lead_from(self, holder: str) -> LearnerQueue:
        """Have another process hold the run's lease."""
        self.run_folder.mkdir()
        (self.run_folder / "nonce").write_text("nonce")
        connection = Connection(self.variables["REDIS_URL"], 10, 10)
        queue = LearnerQueue(connection, Keys(self.variables["RUN_NAME"]), 1)
        queue.claim("nonce", holder, 3600.0)
        return queue

    def publish_contract(self, model: Path, tokenizer_hash: str) -> None:
        connection = Connection(self.variables["REDIS_URL"], 10, 10)
        queue = LearnerQueue(connection, Keys(self.variables["RUN_NAME"]), 1)
        queue.claim("nonce", "test")
        contract = Contract(
            str(model), tokenizer_hash, "float32", 40, (RewardSpec("accuracy"),), True, 2, 4
        )
        queue.publish_contract(encode(contract))
        connection.close()


@pytest.fixture
def runner(tmp_path, queue_server, model) -> Runner:
    return Runner(tmp_path, queue_server.url, model)


def assert_error(outcome: tuple[int, str], code: int, *words: str) -> None:
    """The process ended with this code, and its last words are one message with these words."""
    assert outcome[0] == code, outcome[1]
    assert "Traceback" not in outcome[1]
    for word in words:
        assert word in outcome[1]


def test_a_missing_column(runner):
    source = runner.write(json.dumps({"text": "1+1=", "answer": "2"}))
    assert_error(
        runner.run("learner", LEARNER_DATASET=source), 65,
        "DataError", "none of the columns prompt, question", "it has text, answer",
    )  # fmt: skip


def test_an_unreadable_line(runner):
    source = runner.write(GOOD_ROW, GOOD_ROW, '{"question": "1+')
    assert_error(runner.run("learner", LEARNER_DATASET=source), 65, "line 3: not readable as JSON")


@pytest.mark.parametrize("role", ["learner", "actor", "rewarder"])
def test_a_misspelt_variable(runner, role):
    assert_error(
        runner.run(role, forked=False, LEARNER_LERNING_RATE="1"), 78,
        "unknown variable LEARNER_LERNING_RATE: did you mean LEARNER_LEARNING_RATE?",
    )  # fmt: skip


def test_a_value_of_the_wrong_kind(runner):
    outcome = runner.run("learner", forked=False, LEARNER_MAX_STEPS="many")
    assert_error(outcome, 78, "LEARNER_MAX_STEPS", "'many'")


@pytest.mark.parametrize("value", ["handoff.after:soon", "handoff.after:0", "handoff.after:", ":3"])
def test_a_failpoint_that_names_no_passage(runner, value):
    assert_error(
        runner.run("rewarder", PENSTOCK_FAILPOINT=value), 78, f"PENSTOCK_FAILPOINT={value}: expected"
    )


def test_a_model_that_is_not_there(runner):
    assert_error(
        runner.run(
            "learner", forked=False, LEARNER_MODEL=str(runner.folder / "nothing"), HF_HUB_OFFLINE="1"
        ), 78,
        "LEARNER_MODEL", "nothing: no such file or folder", "nor is it a model that can be downloaded",
    )  # fmt: skip


def test_a_folder_that_is_no_model(runner):
    assert_error(runner.run("learner", LEARNER_MODEL=str(runner.folder)), 78, "no config.json is there")


def test_sequences_longer_than_the_model_takes(runner):
    assert_error(
        runner.run("learner", LEARNER_MAX_COMPLETION_LENGTH="1000"), 78,
        "LEARNER_MAX_COMPLETION_LENGTH (1000)", "but the model takes 128",
    )  # fmt: skip


def test_a_run_folder_that_cannot_be_made(runner):
    assert_error(
        runner.run("learner", RUN_DIR=runner.variables["LEARNER_DATASET"]), 78,
        "RUN_DIR: the folder", "cannot be made",
    )  # fmt: skip


@pytest.mark.parametrize("role", ["learner", "actor", "rewarder"])
def test_a_server_that_may_evict(runner, role, tmp_path_factory):
    with LocalServer(tmp_path_factory.mktemp("evicting")) as server:
        connection = Connection(server.url, 10, 10)
        connection.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert_error(
            runner.run(role, REDIS_URL=server.url), 78,
            "maxmemory-policy allkeys-lru lets the queue server", "set maxmemory-policy noeviction",
        )  # fmt: skip


@pytest.mark.parametrize("role", ["learner", "actor", "rewarder"])
def test_a_server_that_cannot_be_reached(runner, role):
    outcome = runner.run(role, REDIS_URL="redis://127.0.0.1:1", RUN_CONNECT_TIMEOUT_S="1")
    assert_error(outcome, 69, "redis://127.0.0.1:1 did not answer for 1 s", "set REDIS_URL")


@pytest.mark.parametrize("role", ["actor", "rewarder"])
def test_no_server_known_at_all(runner, role):
    assert_error(runner.run(role, REDIS_URL=""), 78, "no queue server is known", "penstock up")


def test_a_second_learner(runner):
    folder = RunFolder(runner.folder / runner.variables["RUN_NAME"])
    with hold_lock(folder.learner_lock, "learner"):
        assert_error(
            runner.run("learner"), 73,
            "another learner holds the run's folder", f"process {os.getpid()}",
        )  # fmt: skip


def test_a_second_learner_on_another_host(runner):
    heartbeat = Heartbeat(runner.lead_from("process 7 on elsewhere"), Phases(), 3600.0, 600.0)
    with heartbeat:
        assert_error(
            runner.run("learner"), 73,
            f"process 7 on elsewhere (incarnation 1) holds run {runner.variables['RUN_NAME']}",
            "its lease of 3600 s lives; stop it, or wait",
        )  # fmt: skip
    assert not list(runner.run_folder.glob("claims/*.json"))  # it would cut off the other one's journal


def test_a_learner_whose_predecessor_was_killed_on_this_host_takes_over_at_once(runner):
    here = f"on {socket.gethostname()}"
    runner.lead_from(f"process 7 {here}")
    starts = f"process 9 {here}\nprocess 7 {here}"  # the last one was killed before it claimed
    (runner.run_folder / "learner.lock").write_text(starts)
    assert_error(runner.run("learner", LEARNER_DATASET=runner.write("{}")), 65, "DataError")
    names = (runner.run_folder / "learner.lock").read_text().splitlines()
    assert names[1:] == starts.splitlines()


@pytest.mark.parametrize("role", ["actor", "rewarder"])
def test_a_tokenizer_that_differs_from_the_contract(runner, role, model):
    runner.publish_contract(model, tokenizer_hash="0" * 64)
    assert_error(
        runner.run(role, RUN_JOIN_TIMEOUT_S="2"), 78,  # for which it waits for another contract
        "ContractMismatch", "differs from the learner's", "000000000000",
    )  # fmt: skip


@pytest.mark.parametrize("role", ["actor", "rewarder"])
def test_a_learner_that_never_comes(runner, role):
    assert_error(
        runner.run(role, RUN_JOIN_TIMEOUT_S="0.5"), 81,
        "no learner set up the run within 0.5 s", "start `learner`",
    )  # fmt: skip


def test_a_run_of_that_name_from_another_folder(runner, model):
    runner.publish_contract(model, "")
    assert_error(runner.run("learner"), 78, "from another folder", "choose another RUN_NAME")


def test_a_server_lost_while_running_is_waited_for_with_a_named_deadline(runner, tmp_path_factory):
    with LocalServer(tmp_path_factory.mktemp("lost")) as server:
        variables = {"REDIS_URL": server.url, "RUN_SERVER_TIMEOUT_S": "2"}
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.rewarders"], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | runner.variables | variables,
        )  # fmt: skip
        try:
            connection = Connection(server.url, 10, 10)
            # Its first GET: it is past the checks of the start, whose deadline is another one.
            wait_until(lambda: "cmdstat_get" in connection.execute("INFO", "commandstats"), "it to look")
            connection.close()
            server.kill()
            _, said = process.communicate(timeout=300)
        finally:
            process.kill()
    assert "Waiting for the queue server" in said
    assert_error((process.returncode, said), 69, "did not answer for 2 s", "start it")
