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
from penstock.common.sandbox import frames
from penstock.common.sandbox.frames import BrokenFrame, FrameReader
from penstock.common.sandbox.user import environment
from penstock.common.wire.limits import HIGHEST_REWARD
from penstock.common.wire.reward_spec import RewardSpec

_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HF_", "HUGGINGFACE_", "TORCH_", "PYTORCH_", "OMP_")
"""Beginnings of variables of devices and downloads. HF_TOKEN is one: a model may be private."""
_PIECE = 2**16


class ModelFailed(Exception):
    """A reward model could not be loaded, or gave no numbers; the text says why."""


def conversations_of(arguments: Mapping[str, Sequence[Any]]) -> list[list[dict[str, Any]]]:
    """Return the messages that a reward model reads: of the prompt, then of each completion."""
    talks = arguments.get("transcripts")
    found = []
    for index, text in enumerate(arguments["completions"]):
        prompt = arguments["prompts"][index]
        given = prompt if isinstance(prompt, list) else [{"role": "user", "content": str(prompt)}]
        said = talks[index] if talks else [{"role": "assistant", "content": text}]
        found.append([*given, *said])
    return found


class ModelProcess:
    """The process of one reward model, started at the first call. Calls wait for one another."""

    def __init__(self, spec: RewardSpec, settings: RewarderSettings) -> None:
        self._spec = spec
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(self) -> None:
        """Load the model, unless that has been done. Raise ModelFailed, with the reason."""
        with self._lock:
            self._ready()

    def score(self, talks: Sequence[Any]) -> list[float]:
        """Return a finite number per conversation. Raise ModelFailed after the deadline or a crash."""
        with self._lock:
            self._ready()
            found = self._ask({"talks": list(talks)})
        if not isinstance(found, list) or len(found) != len(talks):
            raise ModelFailed("the model's process sent another number of values")
        for value in found:
            if not isinstance(value, float) or not abs(value) <= HIGHEST_REWARD:
                shown = value if isinstance(value, float) and math.isfinite(value) else "no number"
                raise ModelFailed(f"the model gave {shown}, expected a number within 1e9 of 0")
        return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None

    def _ready(self) -> None:
        """Start the process and load the model, if that has not been done. Raise ModelFailed."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.rewarders.model_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment(),
            )  # fmt: skip
        settings = self._settings
        asked = self._spec.options | {"digest": self._spec.digest}
        asked |= {"device": settings.reward_model_device, "batch_size": settings.reward_model_batch_size}
        try:
            self._ask(asked)
        except ModelFailed:
            self.close()
            raise

    def _ask(self, request: Mapping[str, Any]) -> Any:
        """Return the value that the process answers.

        Raise ModelFailed for a mistake, and, after the process is ended, for none or a broken answer.
        """
        assert self._channel is not None
        try:
            answer = self._exchange(frames.pack_request(dict(request)))
        except TimeoutError:
            self.close()
            limit = f"{self._settings.reward_model_timeout_s:g} s (REWARDER_REWARD_MODEL_TIMEOUT_S)"
            raise ModelFailed(f"the model took more than {limit}") from None
        except (OSError, EOFError, BrokenFrame) as error:
            self.close()
            raise ModelFailed(f"the model's process ended: {error or 'it closed its socket'}") from error
        if "mistake" in answer:
            raise ModelFailed(frames.short(answer["mistake"]))
        return answer.get("value")

    def _exchange(self, request: bytes) -> dict[str, Any]:
        """Send a request and return the answer's frame. Raise TimeoutError, OSError, EOFError."""
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
    """Return the variables of a sandbox process, and those of devices and downloads."""
    return environment(tuple(name for name in os.environ if name.startswith(_PREFIXES)))
