"""`rewarder --check`: whether rewards work and gold answers can be read, before a run starts."""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.common.config.settings import RewarderSettings
from penstock.common.errors import ConfigError
from penstock.common.progress import with_progress
from penstock.common.sandbox.handle import TOO_LONG
from penstock.common.text import as_text, from_line
from penstock.common.wire.reward_spec import NEED_GOLD, RewardSpec
from penstock.rewarders.adapt import columns_of
from penstock.rewarders.scoring_pool import ScoringFailed, ScoringPool

_CHUNK = 50
"""Gold answers per call of a sandbox process."""
_TRIED_ROWS = 3
GARBAGE = "qwx zzk vvv"
"""A completion that answers no question."""
_FORMS = {
    "acc": r"\boxed{%s}",
    "correctness": "<answer>%s</answer>",
    **dict.fromkeys(("base_acc", "format", "strict_format"), "<think>so</think><answer>%s</answer>"),
    "xml_tags": "<reasoning>so</reasoning><answer>%s</answer>",
}
"""The form in which a built-in reward expects the gold answer as a completion, if it expects one."""

Reading = tuple[str | None, str]
"""A gold answer as it is read, None if it cannot be; and then why not, else ""."""


def check_lines(lines: Iterable[str], settings: RewarderSettings) -> dict[str, Any]:
    """Return what is wrong with rewards and gold answers in the lines of `learner --dry-run --json`.

    `rewards` has by name the reason why each cannot be used, "" if it can, and `trials` for each that
    can the `calls` that `_try_reward` returns, and `load_s`, the seconds until it was loaded. `data` has
    per data set the number of `golds`, and [place, gold answer, reason] of each of the `unreadable`.
    `rows` has, for each row to show, the `columns` that rewards get, the gold answer as it is `read`
    (None if it cannot be), and `why` not (else ""). Gold answers are read only if a built-in reward
    needs them; otherwise `data` is {}, `read` None and `why` "". The work runs in sandbox processes with
    the limits of `settings`; they have ended when this function returns. Judges are asked, reward models
    loaded. Raise ConfigError for other lines, SandboxFailed or ConfigError if no sandbox process can be
    started.
    """
    contract, rows, golds = _parse(lines)
    specs = [RewardSpec(**spec) for spec in contract["rewards"]]
    needed = NEED_GOLD & {spec.name for spec in specs if not spec.source}
    shown = [row["columns"] for row in rows]
    asked = [columns.get("solution") for columns in shown] + [gold for _, gold in golds]
    with ScoringPool(settings) as pool:
        found, trials = _try_all(specs, rows[:_TRIED_ROWS], pool, bool(contract.get("episodes")))
        readings = list(_read(asked, pool, settings.workers, needed)) if needed else []
    return {
        "rewards": found,
        "trials": trials,
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
            for kind, value in from_line(line).items() if line.startswith('{"') else ():
                found[kind].append(value)
        (contract,) = found["contract"]
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            "--check: standard input is not what `learner --dry-run --json` prints, a contract, rows "
            "and gold answers as JSON; use `penstock check`, which joins the two commands"
        ) from error
    return contract, found["row"], found["gold"]


def _try_all(
    specs: Sequence[RewardSpec], rows: Sequence[dict[str, Any]], pool: ScoringPool, episodes: bool
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return by name why each reward cannot be used ("" if it can), and the trials of those that can.

    Raise SandboxFailed or ConfigError if no sandbox process can be started.
    """
    reasons, trials = {}, {}
    for spec in specs:
        started = time.monotonic()
        reasons[spec.name] = pool.check(spec)
        load_s = time.monotonic() - started
        if not reasons[spec.name]:
            calls = _try_reward(spec, rows, pool, episodes)
            trials[spec.name] = {"load_s": load_s, "calls": calls}
    return reasons, trials


def _try_reward(
    spec: RewardSpec, rows: Sequence[dict[str, Any]], pool: ScoringPool, episodes: bool
) -> list[dict[str, Any]]:
    """Return what a reward gives for the gold answer and for garbage, as one group for each of `rows`.

    A result has the row's place `where`, the `seconds` of the group's call, and by answer, "gold" and
    "garbage", the `values`, None where the reward does not apply, and `failures`, with file and line. A
    row without a gold answer has garbage alone. After a failure no further row is tried. With `episodes`
    the completions are conversations too. The built-in `environment`, which repeats what an environment
    returned, is not tried. Raise SandboxFailed or ConfigError if no sandbox process can be started.
    """
    results: list[dict[str, Any]] = []
    for row in rows if spec.source or spec.kind or spec.name != "environment" else ():
        results.append({"where": row["where"], **_try_row(spec, row["columns"], pool, episodes)})
        if results[-1]["failures"]:
            break
    return results


def _try_row(
    spec: RewardSpec, columns: dict[str, Any], pool: ScoringPool, episodes: bool
) -> dict[str, Any]:
    """Return `values`, `failures` and `seconds` of a reward for one row, as `_try_reward` describes.

    If the group fails, unless by its time, each answer is tried alone. If none fails alone, the group's
    failure is that of "both". Raise SandboxFailed or ConfigError if no sandbox process can be started.
    """
    answers = {"garbage": GARBAGE}
    if columns.get("solution") is not None:
        form = "%s" if spec.source or spec.kind else _FORMS.get(spec.name, "%s")
        gold = as_text(columns["solution"])
        gold = gold if form == "%s" else gold.rpartition("####")[2].strip()
        answers = {"gold": form.replace("%s", gold), **answers}
    started = time.monotonic()
    values, failure = _score(spec, columns, answers, pool, episodes)
    seconds = time.monotonic() - started
    failures = {"both": failure} if failure else {}
    if failure and TOO_LONG not in failure:
        alone = {}
        for name, text in answers.items():
            value, alone[name] = _score(spec, columns, {name: text}, pool, episodes)
            values |= value
        failures = {name: text for name, text in alone.items() if text} or failures
    return {"values": values, "failures": failures, "seconds": seconds}


def _score(
    spec: RewardSpec, columns: dict[str, Any], answers: dict[str, str], pool: ScoringPool, episodes: bool
) -> tuple[dict[str, float | None], str]:
    """Return by answer the values of a reward for one group, and "", or none and why the call failed.

    Raise SandboxFailed or ConfigError if no sandbox process can be started.
    """
    try:
        found = pool.score(spec, _arguments(spec, columns, list(answers.values()), episodes))
    except ScoringFailed as error:
        return {}, str(error)
    return dict(zip(answers, found.values, strict=True)), ""


def _arguments(
    spec: RewardSpec, columns: dict[str, Any], texts: list[str], episodes: bool
) -> dict[str, list[Any]]:
    """Return what a reward gets of a row and of completions `texts`: by name, a value per completion.

    There is no tokenizer here: `completion_ids` has an id per byte. With `episodes` there are
    `transcripts` of one message, and an `environment_reward` of 0. A user's reward gets `trainer_state`.
    """
    given = columns_of(columns.get("prompt"), columns)
    if spec.source:
        steps = {"global_step": 0, "max_steps": spec.options.get("max_steps", 0)}
        given["trainer_state"] = steps
    found = {name: [value] * len(texts) for name, value in given.items()} | {
        "completions": texts,
        "completion_ids": [list(text.encode()) for text in texts],
    }
    if episodes:
        found["transcripts"] = [[{"role": "assistant", "content": text}] for text in texts]
        found["environment_reward"] = [0.0] * len(texts)
    return found


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
