"""Measure how busy tools that wait leave the engine, with a real actor and queue server.

    python -m benchmarks.tool_waits [--rounds 5] [--seconds 15] [--wait-s 0.5]

The engine is a stand-in that works on a fixed number of completions at a time, each of which takes a
fixed time. Each rollout calls a tool in its first two completions. Rounds in which the tool waits
alternate with rounds in which the tool answers at once. The engine is busy to the share of its places
that are in use, on average. The result is the share with waits divided by the share without; the goal
is 0.85. Episodes run in the product's sandbox processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from blake3 import blake3
from tokenizers import Tokenizer

from benchmarks.pipeline_roles import StandIn
from benchmarks.talk_model import CHAT_TEMPLATE, make_tokenizer
from penstock.actors.loop import run
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.local_server import LocalServer
from penstock.common.config.role_command import ActorCommand
from penstock.common.config.settings import ActorSettings, RunSettings
from penstock.common.deadline import Deadline
from penstock.common.files.run_folder import RunFolder
from penstock.common.guard import guard_children
from penstock.common.own_code import digest_of, find_code
from penstock.common.wire.codec import encode
from penstock.common.wire.contract import ChatSpec, Contract, hash_tokenizer
from penstock.common.wire.episode_spec import EpisodeSpec, OwnCode
from penstock.common.wire.messages import Int32s, Rollout, Sampling, Span, Ticket, Version, Weights
from penstock.common.wire.reward_spec import RewardSpec
from penstock.learner.streams.learner_queue import LearnerQueue

GOAL = 0.85
PLACES = 16
"""Completions that the engine works on at a time."""
COMPLETION_S = 0.5
"""Seconds that a completion takes."""
EPISODES = 64
"""Live rollouts of the actor: the default of ACTOR_EPISODE_WORKERS."""
_GROUP = 8
_STEADY_S = 4.0
"""Seconds after the first completion that do not count: rollouts begin together, and spread out."""
_START_TIMEOUT_S = 60.0
_TOOL = '''
import time

def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    time.sleep({wait_s})
    return "7"
'''
_CALL = '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>'


class PacedEngine(StandIn):
    """An engine with PLACES places; a completion holds one for COMPLETION_S, later ones wait for one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = [self._tokens(tokenizer, text) for text in (_CALL, _CALL, "7")]
        self._free = asyncio.Semaphore(PLACES)
        self._asked = self._tokens_sampled = 0
        self.spans_s: list[tuple[float, float]] = []
        """Begin and end of each completion's work, on the clock of time.monotonic."""

    @staticmethod
    def _tokens(tokenizer: Tokenizer, text: str) -> Int32s:
        """Return the tokens of a completion, with its end token."""
        return np.array(tokenizer.encode(text + "<eos>", add_special_tokens=False).ids, dtype="<i4")

    async def generate(
        self, request_id: str, prompt_ids: Int32s, sampling: Sampling, num_generations: int,
        since: Version | None = None,
    ) -> tuple[Rollout, ...]:  # fmt: skip
        assert self._weights is not None
        self._asked += 1
        try:
            async with self._free:
                began = time.monotonic()
                await asyncio.sleep(COMPLETION_S)
                self.spans_s.append((began, time.monotonic()))
        finally:
            self._asked -= 1
        ids = self._texts[int(request_id.rpartition(".")[2])]
        self._tokens_sampled += len(ids)
        rollout = Rollout(
            token_ids=ids,
            logprobs=np.full(len(ids), -1.0, dtype="<f4"),
            mask=np.ones(len(ids), dtype=bool),
            spans=(Span(self._weights.version, 0, len(ids), self._weights.hash),),
            finish_reason="stop",
        )
        return (rollout,)

    def room(self) -> int:
        return PLACES - self._asked

    def tokens_generated(self) -> int:
        return self._tokens_sampled


def busy_share(spans_s: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the mean share of the engine's places that were in use between two times."""
    used = sum(max(0.0, min(last, end) - max(first, begin)) for first, last in spans_s)
    return used / (PLACES * (end - begin))


def set_up(
    folder: Path, connection: Connection, name: str, wait_s: float, groups: int
) -> tuple[Contract, RunFolder]:
    """Begin a run as a learner does: contract, weights and the tickets of so many groups."""
    tool = folder / f"tool_{name}.py"
    tool.write_text(_TOOL.format(wait_s=wait_s))
    tool.chmod(0o644)
    code = OwnCode("look_up", str(tool), digest_of(find_code(str(tool), "the benchmark")))
    model = folder / "model"
    contract = Contract(
        str(model), hash_tokenizer(model), "float32", 256, (RewardSpec("accuracy"),), True,
        groups_per_step=groups, credit=groups,
        episodes=EpisodeSpec((code,), (), {"": [{"type": "function"}]}, 0, 60.0),
        chat=ChatSpec(CHAT_TEMPLATE),
    )  # fmt: skip
    queue = LearnerQueue(connection, Keys(name), 1)
    queue.claim("nonce", "benchmark")
    queue.set_state("running")
    queue.publish_contract(encode(contract))
    run_folder = RunFolder(folder / name)
    version = run_folder.version(1, 0)
    version.mkdir(parents=True)
    (version / "model.safetensors").write_bytes(b"weights")
    digest = blake3(b"weights").hexdigest()
    queue.announce(Weights(Version(1, 0), str(version), digest, ""))
    for number in range(groups):
        ticket = Ticket(
            f"train:{number}", "train", np.array([30, 31], dtype="<i4"), _GROUP,
            Sampling(1.0, 1.0, 0, 0.0, 200, 7), Version(1, 0), 0, contract.hash, {"prompt": "3"},
        )  # fmt: skip
        queue.issue("train", [(ticket.id, ticket.version, encode(ticket))])
    return contract, run_folder


def measure(server: LocalServer, folder: Path, name: str, wait_s: float, seconds: float) -> float:
    """Return how busy the engine was for `seconds` of a run whose tool waits for `wait_s`."""
    connection = Connection(server.url, 10, 10)
    groups = int(2 * PLACES * (seconds + _STEADY_S + 10) / COMPLETION_S / _GROUP)
    set_up(folder, connection, name, wait_s, groups)
    engine = PacedEngine(Tokenizer.from_file(str(folder / "model/tokenizer.json")))
    stopping = threading.Event()
    settings = ActorCommand(
        redis_url=server.url,
        run=RunSettings(name=name, dir=folder),
        actor=ActorSettings(episode_workers=EPISODES),
    )
    actor = threading.Thread(target=run, args=(settings, stopping, lambda *_: engine))
    actor.start()
    try:
        deadline = Deadline(_START_TIMEOUT_S)
        while not engine.spans_s:
            assert actor.is_alive(), "the actor ended before its first completion; see its log"
            assert not deadline.expired(), "the actor completed nothing within a minute"
            time.sleep(0.1)
        begin = time.monotonic() + _STEADY_S
        end = begin + seconds
        time.sleep(max(0.0, end + COMPLETION_S - time.monotonic()))
        return busy_share(list(engine.spans_s), begin, end)
    finally:
        stopping.set()
        actor.join()
        connection.close()


def main() -> int:
    """Print each round's shares and their ratio; return 1 if the median ratio misses the goal."""
    parser = argparse.ArgumentParser(prog="benchmarks.tool_waits", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="measured time of each run")
    parser.add_argument("--wait-s", type=float, default=0.5, help="seconds that each tool call waits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    guard_children()
    rows = []
    with tempfile.TemporaryDirectory() as made, LocalServer(Path(made) / "server") as server:
        folder = Path(made)
        folder.chmod(0o755)
        make_tokenizer().save_pretrained(folder / "model")
        for number in range(options.rounds):
            waits = {"with": options.wait_s, "without": 0.0}
            order = sorted(waits, reverse=bool(number % 2))
            shares = {
                kind: measure(server, folder, f"{kind}-{number}", waits[kind], options.seconds)
                for kind in order
            }
            rows.append({**shares, "ratio": shares["with"] / shares["without"]})
            if not options.json:
                print(
                    f"round {number + 1}: busy {shares['with']:.1%} with waits, "
                    f"{shares['without']:.1%} without; ratio {rows[-1]['ratio']:.3f}",
                    flush=True,
                )
    ratios = [row["ratio"] for row in rows]
    median = statistics.median(ratios)
    if options.json:
        print(json.dumps({"rounds": rows, "median": median, "goal": GOAL}))
    else:
        print(f"median {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); the goal is {GOAL}")
    return int(median < GOAL)


if __name__ == "__main__":
    sys.exit(main())
