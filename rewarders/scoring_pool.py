"""The sandbox processes that compute rewards."""

import os
import re
import stat
from dataclasses import asdict

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import PenstockError
from penstock.common.sandbox.frames import short
from penstock.common.sandbox.handle import TOO_LONG, Mistake
from penstock.common.sandbox.pool import SandboxPool
from penstock.common.sandbox.settings import Code, SandboxSettings
from penstock.common.wire.reward_spec import JUDGE, MODEL, RewardSpec
from penstock.rewarders.judges import JudgeFailed, Judges
from penstock.rewarders.reward_models import ModelFailed, ModelProcess, conversations_of
from penstock.rewarders.reward_process import Arguments, Scores, scores_of, shared_once

_CALLS = "penstock.rewarders.reward_process"
_CHECKS = 3
"""Tries to check a reward whose process is killed: a machine without memory kills too."""


_LONGEST_SOURCE = 2**24
_SLOW = "REWARDER_TIMEOUT_S: make the reward faster, or raise this setting"


class ScoringFailed(PenstockError):
    """A reward could not be computed: it hung, crashed, ran out of memory or returned nonsense.

    Such a call is retried, and its ticket is dead after the last attempt; it never becomes a reward.
    """


class ScoringPool(SandboxPool):
    """A SandboxPool of REWARDER_WORKERS processes, a process per reward model, and the judges.

    `settings` are the REWARDER_* settings; `timeout_s` is one of them. Creating the pool starts the
    sandbox processes; a reward model's process and the judges' thread start at their first use. Raise
    ConfigError if the user REWARDER_USER does not exist or the memory limit is too low, SandboxFailed if
    one of the sandbox processes does not start.
    """

    def __init__(self, settings: RewarderSettings) -> None:
        self._rewarder_settings = settings
        self.timeout_s = settings.timeout_s
        self._models: dict[tuple[str, str], ModelProcess] = {}
        self._judges = Judges(settings, self._count_call)
        super().__init__(
            SandboxSettings(
                settings.workers, settings.timeout_s, settings.memory_gib, settings.user,
                environment=tuple(settings.environment),
                modules=(_CALLS,),
                built_in=f"{_CALLS}:import_built_in",
                load="penstock.rewarders.load:run_module",
                section="REWARDER",
            )
        )  # fmt: skip

    def check(self, spec: RewardSpec) -> str:
        """Return the reason why a reward cannot be used here; "" if it can.

        A reward model is loaded by its own process, which stays for later calls. A built-in or a user's
        reward is loaded in a sandbox process. Of a judge its options and the key are checked. Raise
        SandboxFailed or ConfigError if no sandbox process can be started.
        """
        if spec.kind == MODEL:
            try:
                self._model_of(spec).start()
            except ModelFailed as error:
                return str(error)
            return ""
        if spec.kind == JUDGE:
            return self._judges.check(spec)
        for _ in range(_CHECKS):
            outcome = self.run(f"{_CALLS}:check_reward", asdict(spec), code=_code_of(spec))
            if not (isinstance(outcome, Mistake) and outcome.killed):
                break
        if isinstance(outcome, Mistake):
            return f"{outcome.reason}{_file_of(spec, outcome)}"
        return short(outcome) if isinstance(outcome, str) else "its check returned no text"

    def score(self, spec: RewardSpec, arguments: Arguments, timeout_s: float = 0.0) -> Scores:
        """Return what a reward gives for one group: G values, and the columns and metrics it logged.

        The kind of `spec` decides whether a sandbox process, a reward model or a judge is asked.
        `arguments`, by name, have G values each. A call in a sandbox process may take `timeout_s`
        seconds, by default REWARDER_TIMEOUT_S. Raise ScoringFailed if the call fails, takes too long
        or gives wrong values, SandboxFailed or ConfigError if no sandbox process can be started.
        """
        if spec.kind == MODEL:
            return self._score_by_model(spec, arguments)
        if spec.kind == JUDGE:
            return self._score_by_judge(spec, arguments)
        size = len(arguments["completions"])
        given = (asdict(spec), shared_once(arguments), size)
        outcome = self.run(f"{_CALLS}:call_reward", *given, code=_code_of(spec), timeout_s=timeout_s)
        if isinstance(outcome, Mistake):
            remedy = f" ({_SLOW})" if outcome.reason.startswith(TOO_LONG) else ""
            raise ScoringFailed(f"reward {spec.name}: {outcome.reason}{remedy}{_file_of(spec, outcome)}")
        try:
            return scores_of(outcome, size)
        except (ValueError, OverflowError, RecursionError, TypeError) as error:
            raise ScoringFailed(f"reward {spec.name}: {short(error)}") from error

    def close(self) -> None:
        """Kill the reward models' processes, then the idle sandbox processes. Do not `run` later.

        A sandbox process with a call in progress is not killed here.
        """
        for model in self._models.values():
            model.close()
        super().close()

    def _score_by_model(self, spec: RewardSpec, arguments: Arguments) -> Scores:
        """Return a reward model's scores of one group; add 1 to `finished`, also if that fails.

        `arguments` have one value per completion each. Raise ScoringFailed if the model cannot be
        loaded, takes too long, ends, or gives anything but numbers within 1e9 of 0.
        """
        try:
            return Scores(tuple(self._model_of(spec).score(conversations_of(arguments))))
        except ModelFailed as error:
            raise ScoringFailed(f"reward {spec.name}: {error}") from error
        finally:
            self._count_call()

    def _score_by_judge(self, spec: RewardSpec, arguments: Arguments) -> Scores:
        """Return a judge's scores of one group: None for an answer without a score.

        The share of None is logged as the metric NAME/unparsed. `arguments` have one value per
        completion each. `finished` grows with each call of the judge. Raise ScoringFailed if the judge
        cannot be asked, or a call failed after all retries.
        """
        try:
            return self._judges.score(spec, arguments)
        except JudgeFailed as error:
            raise ScoringFailed(f"reward {spec.name}: {error}") from error

    def _count_call(self) -> None:
        """Add 1 to `finished`: while that number grows, the leases of the groups are renewed."""
        with self._lock:
            self.finished += 1

    def _model_of(self, spec: RewardSpec) -> ModelProcess:
        """Return the process of the reward model `spec`; equal options and digests share a process.

        The first call for a model creates its process object, which starts nothing.
        """
        key = (str(spec.options), spec.digest)
        with self._lock:
            return self._models.setdefault(key, ModelProcess(spec, self._rewarder_settings))


def _code_of(spec: RewardSpec) -> Code | None:
    """Return where the user's code of a reward is, and its digest; None for a built-in reward."""
    return Code(spec.source, spec.digest) if spec.source else None


def _file_of(spec: RewardSpec, mistake: Mistake) -> str:
    """Return ", in FILE, line N" for a user's reward of which the mistake names no place, else "".

    The line is that of the reward's definition; it is left out if it is not found.
    """
    if not spec.source or ", line " in mistake.reason:
        return ""
    text = _text_of(spec.source)
    defined = re.search(rf"^(?:(?:async )?def |class )?{re.escape(spec.name)}\b", text, re.MULTILINE)
    line = f", line {text.count(chr(10), 0, defined.start()) + 1}" if defined else ""
    return f", in {os.path.basename(spec.source)}{line}"


def _text_of(source: str) -> str:
    """Return the first 2^24 characters of a reward's file; "" for a module's name, and for no file."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # the user may change it into a pipe
    except (OSError, ValueError):
        return ""
    with open(descriptor, errors="replace") as file:
        return file.read(_LONGEST_SOURCE) if stat.S_ISREG(os.fstat(descriptor).st_mode) else ""
