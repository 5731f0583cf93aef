"""The reward models of a contract, each in a process of its own with a deadline.

A model that hangs or crashes is started again at the next call. Its call fails, and is retried as every
failed scoring is; it never becomes a reward.
"""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ServerUnavailable
from penstock.common.sandbox import frames
from penstock.common.sandbox.frames import BrokenFrame, FrameReader
from penstock.common.sandbox.user import environment
from penstock.common.text import as_text
from penstock.common.wire.limits import HIGHEST_REWARD
from penstock.common.wire.reward_spec import RewardSpec

_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HF_", "HUGGINGFACE_", "TORCH_", "PYTORCH_", "OMP_")
"""Beginnings of variables of devices and downloads. HF_TOKEN is one: a model may be private."""
_PIECE = 2**16


class ModelFailed(Exception):
    """A reward model could not be loaded, or gave no numbers; the text says why."""


def conversations_of(arguments: Mapping[str, Sequence[Any]]) -> list[list[dict[str, Any]]]:
    """Return for each completion the messages that a reward model reads: prompt, then completion.

    `arguments` are a reward's arguments, each with one value per completion. A prompt that is no list of
    messages becomes a user's message with its text, a completion an assistant's message. `transcripts`,
    lists of messages, replace the completions if they are given. A user's message that begins one, from
    an environment's `reset`, is appended to a user's message that ends the prompt, as for the policy.
    """
    talks = arguments.get("transcripts")
    found = []
    for index, text in enumerate(arguments["completions"]):
        prompt = arguments["prompts"][index]
        is_talk = isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt)
        given = prompt if is_talk else [{"role": "user", "content": as_text(prompt)}]
        said = talks[index] if talks else [{"role": "assistant", "content": text}]
        if given and said and given[-1].get("role") == said[0].get("role") == "user":
            parts = [as_text(one.get("content") or "") for one in (given[-1], said[0])]
            given, said = [*given[:-1], {**given[-1], "content": "".join(parts)}], said[1:]
        found.append([*given, *said])
    return found


class ModelProcess:
    """The process of the reward model `spec`, started at the first call. Calls wait for one another.

    `settings` has the model's device and batch size, and the seconds that a call or the start may take.
    """

    def __init__(self, spec: RewardSpec, settings: RewarderSettings) -> None:
        self._spec = spec
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(self) -> None:
        """Start the process and wait until the model is loaded; do nothing if the process runs.

        Raise ModelFailed, with the reason, if loading fails or takes longer than
        REWARDER_REWARD_MODEL_TIMEOUT_S, ServerUnavailable if its hub is away. The process is killed.
        """
        with self._lock:
            self._ready()

    def score(self, talks: Sequence[Any]) -> list[float]:
        """Return the model's number for each of `talks`, lists of messages, in order.

        The process is started first if it does not run. Raise ModelFailed if that fails, if the answer
        takes over REWARDER_REWARD_MODEL_TIMEOUT_S, if the process ends or reports a mistake, or for a
        number that is not within 1e9 of 0.
        """
        with self._lock:
            self._ready()
            found = self._ask({"talks": list(talks)})
        if not isinstance(found, list) or len(found) != len(talks):
            numbers = f"{len(talks)} numbers, one for each completion: start the rewarder again"
            raise ModelFailed(f"the reward model's process sent no list of {numbers}")
        for value in found:
            if not isinstance(value, float) or not abs(value) <= HIGHEST_REWARD:
                shown = value if isinstance(value, float) and math.isfinite(value) else "no number"
                wanted = "expected a number within 1e9 of 0: name another in LEARNER_REWARDS"
                raise ModelFailed(f"the reward model gave {shown}, {wanted}")
        return found

    def close(self) -> None:
        """Kill the process, if one was started, wait for its end, and close the socket to it.

        The next call starts a new process. A call in progress in another thread fails.
        """
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None

    def _ready(self) -> None:
        """Start the process and load the model, unless the process runs; the caller holds the lock.

        Raise ModelFailed or ServerUnavailable, after its end, if the model cannot be loaded in time.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.rewarders.model_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment(),
            )  # fmt: skip
        asked = {"batch_size": self._settings.reward_model_batch_size, "digest": self._spec.digest}
        try:
            self._ask(self._spec.options | asked | {"device": self._settings.reward_model_device})
        except (ModelFailed, ServerUnavailable):
            self.close()
            raise

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """Send `request` to the running process and return the `value` of its answer, None without one.

        Raise ModelFailed if the request is too large or no plain data, or with the text of a mistake
        that is the answer. Raise it too, after the process is killed, if no answer comes in time, the
        process ends, or the answer is broken. Raise ServerUnavailable if the model's hub is away.
        """
        assert self._channel is not None
        try:
            packed = frames.pack_request(dict(request))
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelFailed(f"the group cannot be sent to the reward model: {error}") from error
        try:
            answer = self._exchange(packed)
        except TimeoutError:
            self.close()
            limit = f"{self._settings.reward_model_timeout_s:g} s (REWARDER_REWARD_MODEL_TIMEOUT_S)"
            raise ModelFailed(f"the reward model took more than {limit}: raise that limit") from None
        except (OSError, EOFError, BrokenFrame) as error:
            self.close()
            cause = f"the reward model's process ended: {error or 'it closed its socket'}"
            raise ModelFailed(f"{cause}; see the rewarder's standard error") from error
        if answer.get("ends"):  # a call before its end would fail with it
            self.close()
        if "mistake" in answer:
            failed = ServerUnavailable if answer.get("outage") else ModelFailed
            raise failed(frames.short(answer["mistake"]))
        return answer.get("value")

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """Send the bytes of a packed request, and return the answer to it, an object of JSON.

        Raise TimeoutError if that takes over REWARDER_REWARD_MODEL_TIMEOUT_S, EOFError if the process
        closes its socket, OSError if the socket is reset or closed here, BrokenFrame for an answer that
        is no object or over 4 MiB.
        """
        channel, reader = self._channel, FrameReader()
        assert channel is not None
        end = time.monotonic() + self._settings.reward_model_timeout_s
        channel.settimeout(self._settings.reward_model_timeout_s)
        channel.sendall(request)
        while (answer := reader.take()) is None:
            channel.settimeout(max(end - time.monotonic(), 1e-3))
            piece = channel.recv(_PIECE)
            if not piece:
                raise EOFError
            reader.feed(piece)
        return answer


def _environment() -> dict[str, str]:
    """Return the environment variables, by name, that a reward model's process gets.

    They are this process's variables of sandbox processes, such as PATH, and of devices and downloads,
    such as CUDA_VISIBLE_DEVICES and HF_TOKEN. OMP_NUM_THREADS and the like are "1" unless set.
    """
    return environment(tuple(name for name in os.environ if name.startswith(_PREFIXES)))
