"""`rewarder --check`: whether rewards can be loaded and gold answers be read, before a run starts."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.common.config.settings import RewarderSettings
from penstock.common.deadline import Deadline
from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.wire.reward_spec import RewardSpec
from penstock.rewarders.scoring_pool import ScoringPool

log = get_logger(__name__)

_CHUNK = 100
"""Gold answers per call of a sandbox process."""
_REPORT_EVERY_S = 10.0

Reading = tuple[str | None, str]
"""A gold answer as it is read, None if it cannot be; and then why not, else ""."""


def check_lines(lines: Iterable[str], settings: RewarderSettings) -> dict[str, Any]:
    """Return what is wrong with rewards and gold answers in the lines of `learner --dry-run --json`.

    The result has `rewards` (the reason why each cannot be used, "" if it can), `golds` (their number),
    `unreadable` (place, gold answer and why, of each), and `rows` (the gold answer of each row to show,
    as it is read). All is read in sandbox processes. Raise ConfigError for other lines, or as
    ScoringPool does.
    """
    contract, rows, golds = _parse(lines)
    specs = [RewardSpec(**spec) for spec in contract["rewards"]]
    with ScoringPool(settings) as pool:
        found = {spec.name: pool.check(spec) for spec in specs}
        readings = read_golds([gold for _, gold in golds], pool)
        shown = read_golds([row["columns"].get("solution") for row in rows], pool) if golds else []
    return {
        "rewards": found,
        "golds": len(golds),
        "unreadable": [
            [*gold, why] for gold, (text, why) in zip(golds, readings, strict=True) if text is None
        ],
        "rows": [text for text, _ in shown],
    }


def _parse(lines: Iterable[str]) -> tuple[dict[str, Any], list[dict[str, Any]], list[list[Any]]]:
    """Return the contract, the rows and the gold answers of the lines. Raise ConfigError if wrong."""
    found: dict[str, list[Any]] = {"contract": [], "row": [], "gold": []}
    try:
        for line in lines:
            for kind, value in json.loads(line).items():
                found[kind].append(value)
        (contract,) = found["contract"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            "--check: standard input is not what `learner --dry-run --json` prints; use `penstock check`"
        ) from error
    return contract, found["row"], found["gold"]


def read_golds(golds: Sequence[Any], pool: ScoringPool) -> list[Reading]:
    """Return the reading of each gold answer; one over the sandbox's limits cannot be read.

    Progress is logged every ten seconds.
    """
    readings: list[Reading] = []
    waited = Deadline(float("inf"))
    for start in range(0, len(golds), _CHUNK):
        readings += _read_chunk(golds[start : start + _CHUNK], pool)
        if waited.report_due(_REPORT_EVERY_S):
            log.info(f"{len(readings)} of {len(golds)} gold answers are read.")
    return readings


def _read_chunk(golds: Sequence[Any], pool: ScoringPool) -> list[Reading]:
    """Return the readings of some gold answers, one by one if reading them together fails."""
    outcome = pool.run("penstock.rewarders.rewards.accuracy:read_golds", list(golds))
    if isinstance(outcome, list) and len(outcome) == len(golds):
        return [(text, why) for text, why in outcome]
    if len(golds) == 1:
        return [(None, getattr(outcome, "reason", "the sandbox sent no reading"))]
    return [_read_chunk([gold], pool)[0] for gold in golds]
