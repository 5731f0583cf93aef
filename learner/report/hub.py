"""Upload of checkpoints' models to a hub, in the background. A failed upload never ends the training.

Waits for: the last upload, at the run's end, up to LEARNER_HUB_TIMEOUT_S.
Unblocked by: the hub. Produces: the model's folder as the newest commit of a repository.
Ends when: the upload ended or failed, or the time is over.
"""

import os
import shutil
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.text import hide_passwords, short
from penstock.learner.state.best_model import link_or_copy

log = get_logger(__name__)


class HubApi(Protocol):
    """The calls of huggingface_hub's HfApi that are used."""

    def whoami(self) -> Any:
        """Return who the token belongs to. Raise HfHubHTTPError for a wrong token."""

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
        """Create the repository unless it exists."""

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        """Commit the folder's files."""


class Hub:
    """The repository of a run. Creating a Hub checks the token, and creates the repository.

    Raise ConfigError if the hub refuses one of the two. A hub that cannot be reached is logged.
    """

    def __init__(self, settings: LearnerSettings, aside: Path, api: HubApi) -> None:
        self._settings, self._aside, self._api = settings, aside, api
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        try:
            api.whoami()
            api.create_repo(settings.hub_model_id, private=settings.hub_private_repo, exist_ok=True)
        except (HfHubHTTPError, HFValidationError) as error:
            if _may_pass(error):
                log.warning("The hub does not answer yet.", error=_told(error))
                return
            raise ConfigError(
                f"LEARNER_PUSH_TO_HUB: the hub refuses HF_TOKEN or LEARNER_HUB_MODEL_ID="
                f"{settings.hub_model_id}: {_told(error)}. Set a token that may write there"
            ) from error
        except Exception as error:  # of the network, or of the cache's files
            log.warning("The hub cannot be reached yet.", error=_told(error))

    def saved(self, model: Path, step: int, last: bool) -> None:
        """Upload a checkpoint's model in the background if LEARNER_HUB_STRATEGY asks for it.

        While an upload runs, a model is left out, unless it is the `last`: that one waits for its turn.
        """
        if self._settings.hub_strategy == "end" and not last:
            return
        before = self._thread
        if before is not None and before.is_alive() and not last:
            running = "hung" if time.monotonic() > self._deadline else "still running"
            log.warning(f"The model of step {step} is not uploaded: an upload is {running}.")
            return
        self._deadline = time.monotonic() + self._settings.hub_timeout_s
        self._thread = threading.Thread(target=self._upload, args=(model, step, before), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for a running upload, up to LEARNER_HUB_TIMEOUT_S after its start; log a late one."""
        if self._thread is not None and self._thread.is_alive():
            log.info("Waiting for the upload to the hub.")
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread is not None and self._thread.is_alive():
            log.error("The upload to the hub took too long (LEARNER_HUB_TIMEOUT_S) and is given up.")

    def _upload(self, model: Path, step: int, before: threading.Thread | None) -> None:
        """Upload a model, after the upload `before` has ended or its time is over. Log what came of it.

        The files are links beside the checkpoint, which may be deleted meanwhile.
        """
        if before is not None:
            before.join(max(0.0, self._deadline - time.monotonic()))
        links = self._aside / f"{step:08d}"
        repository = self._settings.hub_model_id
        try:
            shutil.rmtree(links, ignore_errors=True)
            shutil.copytree(model, links, copy_function=link_or_copy)
            self._api.create_repo(repository, private=self._settings.hub_private_repo, exist_ok=True)
            self._api.upload_folder(
                repo_id=repository, folder_path=links, commit_message=f"Model of step {step}"
            )
            log.info(f"The model of step {step} was uploaded to {repository}.")
        except Exception as error:  # huggingface_hub raises whatever its parts raise
            log.error(f"The model of step {step} was not uploaded; the next is.", error=_told(error))
        finally:
            shutil.rmtree(links, ignore_errors=True)


def make_hub(settings: LearnerSettings, aside: Path) -> Hub | None:
    """Return the hub of LEARNER_PUSH_TO_HUB, None without it. Raise ConfigError without HF_TOKEN.

    `aside` is a folder on the checkpoints' disk, for links to what is being uploaded.
    """
    if not settings.push_to_hub:
        return None
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise ConfigError("LEARNER_PUSH_TO_HUB needs HF_TOKEN: a token of the hub that may write")
    return Hub(settings, aside, HfApi(token=token))


def _may_pass(error: Exception) -> bool:
    """Return whether an error is the hub's own or one of load, which a later call may not have."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS


def _told(error: Exception) -> str:
    """Return an error's type and text without passwords and without the token."""
    text = hide_passwords(f"{type(error).__name__}: {error}")
    token = os.environ.get("HF_TOKEN")
    return short(text.replace(token, "***") if token else text)
