"""An OpenEnv server of a small environment: `python openenv_echo.py PORT`, with openenv-core."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    """A message."""

    message: str


class Heard(Observation):
    """What the environment heard."""

    echo: str = ""


class Echo(Environment):
    """Answers with the message. The steps' rewards differ from session to session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
        self._steps = 0
        return Heard(echo="say", reward=0.0, done=False)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
        self._steps += 1
        return Heard(echo=action.message, reward=float(id(self) % 97), done=False)

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
