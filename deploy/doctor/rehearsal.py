"""The data and the rewards: `penstock check`, whose result becomes findings."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from penstock.common.config.command import Result
from penstock.deploy.doctor.finding import Finding

_COMMON = "Correct the data set or LEARNER_SOLUTION_COLUMN, or use another reward"


def findings_of(result: Result) -> Iterator[Finding]:
    """Yield a finding per reward that cannot be used or fails, and per data set with bad golds."""
    found: dict[str, Any] = dict(result.rows[0])
    yield from _failures(found["trials"])
    for name, reason in found["rewards"].items():
        if reason:
            what = f"the reward {name} cannot be used: {reason}"
            remedy = "do: correct the reward as stated, or take it out of LEARNER_REWARDS"
            yield Finding("rewards", "error", what, "the rewarder would end with this error", remedy)
    for name, data in found["data"].items():
        if data["level"]:
            where, gold, why = data["unreadable"][0]
            what = (
                f"{len(data['unreadable'])} of {data['golds']} gold answers of {name} cannot be read, "
                f"such as {where}: {why}: {gold}"
            )
            consequence = "no answer to these questions can be right, so nothing is learned from them"
            yield Finding("golds", data["level"], what, consequence, f"do: {_COMMON}")


def _failures(trials: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for the first failure of each reward on a gold answer or on garbage."""
    for name, trial in trials.items():
        failures = (
            (call["where"], on, reason)
            for call in trial["calls"]
            for on, reason in call["failures"].items()
        )
        for where, on, reason in islice(failures, 1):
            what = f"the reward {name} fails on {on}, {where}: {reason}"
            why = "completions like this one would have no reward"
            yield Finding("rewards", "error", what, why, "do: correct the reward at this line")


def warnings_in(said: str) -> Iterator[Finding]:
    """Yield a finding per warning in the lines `said` that learner and rewarder log."""
    for text in re.findall(r"^\S+ \[warning *\] (.+)", said, re.MULTILINE):
        why, remedy = "the run would begin all the same", "do: change what this names, or let it be"
        yield Finding("data", "warning", text, why, remedy)


def failed(code: int, said: str) -> Finding:
    """Return the finding of a role that ended with this exit code.

    `said` is its standard error. Its last error is shown: a line such as `learner: DataError: text`.
    """
    errors = re.findall(r"^\w+: \w+: .*(?:\n  .*)*", said, re.MULTILINE)
    text = errors[-1] if errors else said.strip()[-1000:]
    what = f"reading model, data and rewards fails with exit code {code}: {text}"
    return Finding("data", "error", what, "the run would end so", "do: as this error says")
