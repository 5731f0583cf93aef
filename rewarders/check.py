"""`rewarder --check`: whether rewards can be loaded and gold answers be read, before a run starts."""

import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ConfigError
from penstock.common.progress import with_progress
from penstock.common.wire.reward_spec import NEED_GOLD, RewardSpec
from penstock.rewarders.adapt import columns_of
from penstock.rewarders.scoring_pool import ScoringPool

_CHUNK = 50
"""Gold answers per call of a sandbox process."""

Reading = tuple[str | None, str]
"""A gold answer as it is read, None if it cannot be; and then why not, else ""."""


def check_lines(lines: Iterable[str], settings: RewarderSettings) -> dict[str, Any]:
    """Return what is wrong with rewards and gold answers in the lines of `learner --dry-run --json`.

    `rewards` has by name the reason why each cannot be used, "" if it can. `data` has per data set the
    number of `golds`, and [place, gold answer, reason] of each of the `unreadable`. `rows` has, for each
    row to show, the `columns` that rewards get, the gold answer as it is `read` (None if it cannot be),
    and `why` not (else ""). Gold answers are read only if a built-in reward needs them; otherwise `data`
    is {}, `read` None and `why` "". The work runs in sandbox processes with the limits of `settings`;
    they have ended when this function returns. Reward models are loaded, judges are not asked. Raise
    ConfigError for other lines, SandboxFailed or ConfigError if no sandbox process can be started.
    """
    contract, rows, golds = _parse(lines)
    specs = [RewardSpec(**spec) for spec in contract["rewards"]]
    needed = NEED_GOLD & {spec.name for spec in specs if not spec.source}
    shown = [row["columns"] for row in rows]
    asked = [columns.get("solution") for columns in shown] + [gold for _, gold in golds]
    with ScoringPool(settings) as pool:
        found = {spec.name: pool.check(spec) for spec in specs}
        readings = list(_read(asked, pool, settings.workers, needed)) if needed else []
    return {
        "rewards": found,
        "data": _by_data(golds, readings[len(rows) :]) if needed else {},
        "rows": [
            {"columns": columns_of(columns.get("prompt"), columns), "read": read, "why": why}
            for columns, (read, why) in zip(shown, readings or [(None, "")] * len(rows), strict=False)
        ],
    }


def _parse(lines: Iterable[str]) -> tuple[dict[str, Any], list[dict[str, Any]], list[list[Any]]]:
    """Return the contract, the rows and the gold answers in `lines`, rows and golds in their order.

    The line {"gold": pair} has a pair [place, answer]. Lines that do not begin with {" are skipped.
    Raise ConfigError for no contract or two, a damaged line, or a key but contract, row and gold.
    """
    found: dict[str, list[Any]] = {"contract": [], "row": [], "gold": []}
    try:
        for line in lines:
            for kind, value in json.loads(line).items() if line.startswith('{"') else ():
                found[kind].append(value)
        (contract,) = found["contract"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            "--check: standard input is not what `learner --dry-run --json` prints, a contract, rows "
            "and gold answers as JSON; use `penstock check`, which joins the two commands"
        ) from error
    return contract, found["row"], found["gold"]


def _read(
    golds: Sequence[Any], pool: ScoringPool, threads: int, needed: frozenset[str]
) -> Iterator[Reading]:
    """Yield for each of `golds`, in order, ("number 72", ""), or (None, the reason) if it is unreadable.

    `needed` are the names of the rewards that need gold answers: if it is `correctness` alone, answers
    are read as texts, else as values. At most `threads` calls of the pool run at a time. The progress is
    logged every 10 s. Raise SandboxFailed or ConfigError if no sandbox process can be started.
    """
    chunks = [golds[start : start + _CHUNK] for start in range(0, len(golds), _CHUNK)]
    with ThreadPoolExecutor(threads) as executor:
        found = executor.map(lambda chunk: _read_chunk(chunk, needed == {"correctness"}, pool), chunks)
        readings = (reading for chunk in found for reading in chunk)
        yield from with_progress(readings, "gold answers read by the rewards", len(golds))


def _read_chunk(golds: Sequence[Any], as_text: bool, pool: ScoringPool) -> list[Reading]:
    """Return for each of `golds`, in order, ("number 72", ""), or (None, the reason) if unreadable.

    `as_text`: answers are compared as texts, not as values. All are read in one call of the pool, or in
    one call each if that fails. An answer whose own call hangs or crashes is unreadable. Raise
    SandboxFailed or ConfigError if no sandbox process can be started.
    """
    outcome = pool.run("penstock.rewarders.rewards.golds:describe_golds", list(golds), as_text)
    if isinstance(outcome, list) and len(outcome) == len(golds):
        return [(text, why) for text, why in outcome]
    if len(golds) == 1:
        return [(None, getattr(outcome, "reason", "the sandbox sent no reading"))]
    return [_read_chunk([gold], as_text, pool)[0] for gold in golds]


def _by_data(golds: Sequence[Sequence[Any]], readings: Sequence[Reading]) -> dict[str, dict[str, Any]]:
    """Return, per data set, the number of gold answers, and place, answer and reason of unreadable ones.

    `golds` are pairs of place and answer; the part of a place before ", row " names the data set.
    `readings` has for each the answer as it is read, None if it is unreadable, and the reason.
    Example: {"gsm8k.jsonl": {"golds": 7473, "unreadable": [["gsm8k.jsonl, row 3", "?", "a sentence"]]}}.
    """
    found: dict[str, dict[str, Any]] = {}
    for (where, gold), (text, why) in zip(golds, readings, strict=True):
        one = found.setdefault(where.rpartition(", row ")[0], {"golds": 0, "unreadable": []})
        one["golds"] += 1
        if text is None:
            one["unreadable"].append([where, gold, why])
    return found
