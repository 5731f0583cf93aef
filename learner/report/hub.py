"""Upload of checkpoints' models to a hub, in the background. A failed upload never ends the training.

Waits for: the last upload, at the run's end, up to LEARNER_HUB_TIMEOUT_S.
Unblocked by: the hub. Produces: the model's folder as the newest commit of a repository.
Ends when: the upload ended or failed, or the time is over.
"""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.text import hide_passwords, short
from penstock.common.transfer.hub import outage_of
from penstock.learner.state.best_model import link_or_copy

log = get_logger(__name__)


class HubApi(Protocol):
    """The calls of huggingface_hub's HfApi that are used."""

    def whoami(self) -> Any:
        """Return the account that the token belongs to. Raise HfHubHTTPError for a wrong token."""

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
        """Create the model repository `repo_id`, and return its URL.

        With `exist_ok` a repository that exists is no error, and stays as it is. `private` says whether
        only its owner sees a new one; None: as the account's settings say. Raise HfHubHTTPError if the
        hub refuses, HFValidationError for a malformed `repo_id`.
        """

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        """Commit the files of the folder `folder_path` to `repo_id`; return the commit once it is made.

        `commit_message` is the commit's title. Raise HfHubHTTPError if the hub refuses.
        """


class Hub:
    """The repository LEARNER_HUB_MODEL_ID on a hub, to which a run's models are uploaded.

    Creating a Hub checks the token of `api` and creates the repository unless it exists. Raise
    ConfigError if the hub refuses one of the two, or the repository's name is malformed. A hub that
    cannot be reached, or is overloaded (HTTP 429, or 500 and above), is logged only: each upload tries
    again. `settings` give hub_model_id, hub_private_repo, hub_strategy and hub_timeout_s. `aside` is a
    folder on the checkpoints' disk, for links to what is being uploaded.
    """

    def __init__(self, settings: LearnerSettings, aside: Path, api: HubApi) -> None:
        self._settings, self._aside, self._api = settings, aside, api
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        try:
            api.whoami()
            api.create_repo(settings.hub_model_id, private=settings.hub_private_repo, exist_ok=True)
        except (HfHubHTTPError, HFValidationError) as error:
            if outage_of(error, ""):
                log.warning("The hub does not answer yet.", error=_told(error))
                return
            raise ConfigError(
                f"LEARNER_PUSH_TO_HUB: the hub refuses HF_TOKEN or LEARNER_HUB_MODEL_ID="
                f"{settings.hub_model_id}: {_told(error)}. Set HF_TOKEN to a token that may write "
                "there, or correct LEARNER_HUB_MODEL_ID (OWNER/NAME)"
            ) from error
        except Exception as error:  # of the network, or of the cache's files
            log.warning("The hub cannot be reached yet.", error=_told(error))

    def saved(self, model: Path, step: int, last: bool) -> None:
        """Start the upload of a checkpoint's model in the background, as LEARNER_HUB_STRATEGY asks.

        `model` is the checkpoint's folder of the model, `step` the number of Updates in it, and `last`
        says that the run ends with it. With the strategy `end` only the last model is uploaded. While
        another upload runs, a model is left out with a warning, but the last one waits, in the
        background, until that has ended. LEARNER_HUB_TIMEOUT_S counts from this call. Return at once.
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
        """Wait for a running upload, up to LEARNER_HUB_TIMEOUT_S after its start.

        If the upload is still running then, log an error and return: it ends with this process.
        """
        if self._thread is not None and self._thread.is_alive():
            log.info("Waiting for the upload to the hub.")
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread is not None and self._thread.is_alive():
            log.error("The upload to the hub took too long (LEARNER_HUB_TIMEOUT_S) and is given up.")

    def _upload(self, model: Path, step: int, before: threading.Thread | None) -> None:
        """Upload the folder `model` as the commit "Model of step `step`". Log a success or the error.

        First wait until the upload in the thread `before` has ended, LEARNER_HUB_TIMEOUT_S at most, and
        go on if it has not; None: there is none. The uploaded files are links in the folder `aside`,
        deleted at the end: the checkpoint may be deleted meanwhile. The repository is created if it is
        not there. No error of the upload is raised.
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
    """Return the Hub of a run, None unless LEARNER_PUSH_TO_HUB is on. This calls the hub, as Hub does.

    `aside` is a folder on the checkpoints' disk, for links to what is being uploaded. Raise ConfigError
    if the environment has no HF_TOKEN, or the hub refuses the token or the repository.
    """
    if not settings.push_to_hub:
        return None
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise ConfigError(
            "LEARNER_PUSH_TO_HUB needs HF_TOKEN, and this environment variable is not set: set it to a "
            "token of the hub that may write, or set LEARNER_PUSH_TO_HUB=false"
        )
    return Hub(settings, aside, HfApi(token=token))


def _told(error: Exception) -> str:
    """Return an error's class and text, cut to 200 characters, with passwords and HF_TOKEN as `***`."""
    text = hide_passwords(f"{type(error).__name__}: {error}")
    token = os.environ.get("HF_TOKEN")
    return short(text.replace(token, "***") if token else text)
