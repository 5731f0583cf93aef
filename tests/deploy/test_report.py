"""`penstock report` and `penstock plot`: a run as one page that fetches and executes nothing."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.common.config.command import execute_command, load
from penstock.common.errors import ConfigError
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.queues import Queues
from penstock.common.wire.messages import Version
from penstock.deploy.__main__ import Penstock
from penstock.deploy.report.command import Plot, Report
from penstock.deploy.report.curves import MOST_POINTS, thin
from penstock.deploy.report.run_data import read_run
from penstock.deploy.showing.ending import format_ending
from penstock.learner.report.completions import to_parquet
from penstock.learner.report.recorder import Recorder
from penstock.learner.report.run_record import write_start
from penstock.learner.state.journal import Journal
from penstock.learner.streams.evaluation import Answer, Evaluated
from tests.deploy.test_samples import ROW
from tests.learner.builders import claim_next, make_settings

HOSTILE = (
    "<script>alert(1)</script></svg></pre></style><img src=https://evil.example/x onerror=alert(2)>"
    "\"' onload='x' javascript:alert(3) \x1b[2J\x9b31m \u202egnp.exe &lt;script&gt; \ud800"
)
"""Markup, an attribute's end, a terminal's commands, a bidi override, an entity, a lone surrogate."""

STEP = {
    "reward": 0.5, "rewards/accuracy/mean": 0.5, "entropy": 0.7, "completions/mean_length": 20.0,
    "completions/max_length": 50, "sampling/importance_sampling_ratio/mean": 1.0,
    "sampling/importance_sampling_ratio/min": 0.5, "sampling/importance_sampling_ratio/max": 2.0,
    "sample/staleness_mean": 0.5, "sample/staleness_max": 1, "groups/filtered": 3, "groups/stale": 0,
    "groups/dead": 0, "perf/step_s": 4.0, "perf/rollout_wait_s": 1.0, "perf/update_s": 2.0,
    "perf/tokens_per_s": 1500.0, "perf/learner/waiting_for_groups_s": 1.0,
    "perf/learner/waiting_for_groups_cpu_s": 0.1, "perf/learner/running_forward_s": 3.0,
    "perf/learner/running_forward_cpu_s": 2.0, "perf/actor/generating_s": 3.5,
}  # fmt: skip
CHARTS = [
    "Reward by function", "Held-out questions", "Completion length", "Entropy", "Importance ratio",
    "Staleness", "Seconds of a step", "Tokens per second", "Groups not trained",
]  # fmt: skip


class Page(HTMLParser):
    """What a browser would find in a page: elements with attributes, and the text."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def make_run(
    folder: Path, steps: int = 3, reward: str = "accuracy", text: str = "2", **settings: Any
) -> Path:
    """A run's folder as the learner writes it: `reward` is a reward's name, `text` what was sampled."""
    folder.mkdir(parents=True)
    claim = claim_next(folder)
    home = LearnerFolder(folder, claim.incarnation)
    recorder, journal = Recorder(home, [], "x"), Journal(home)
    journal.append("header", step=0, machine={}, ends={}, ledger={"next_number": 0})
    for step in range(1, steps + 1):
        recorder.metrics(step, STEP | {"reward": step / 10, f"rewards/{reward}/mean": step / 10})
        ends = {f"train:{step}": ("trained", 0)}
        journal.append("batch", step=step, groups=[], ends=ends, ledger={"next_number": step + 1})
    rewards = ({reward: 1.0},)
    for step, right in ((0, 0.25), (steps, 0.75)):
        rewards = ({reward: float(right > 0.5)}, {reward: 0.5}, {reward: None})
        answer = Answer(
            0, (text,) * 3, (text,) * 3, rewards, (1,) * 3, ("stop",) * 3, "", ("", "", "hung")
        )
        recorder.evaluation(Evaluated(Version(1, step), (answer,)), [{"prompt": text}], {})
    row = {(reward if name == "accuracy" else name): value for name, value in ROW.items()}
    made = row | {"prompt": text, "completion": f"{text} good", "solution": text}
    bad = made | {"ticket": "train:1", "completion": f"{text} bad", "reward": 0.0, reward: 0.0}
    recorder.completions(1, lambda: [made, bad])
    start = {"machine": {"device": text}, "model": {"name": text}, "versions": {"torch": "2"}}
    write_start(home, start | {"settings": make_settings(**settings).model_dump(mode="json")})
    return folder


def report(*arguments: object) -> str:
    """The page that `penstock report` writes into the first folder."""
    assert load(Report, "penstock report", list(map(str, arguments))).execute() == 0
    return RunFolder(Path(str(arguments[0]))).report.read_text(encoding="utf-8")


def assert_harmless(page: str) -> Page:
    """No element of `page` executes or fetches anything; return the page."""
    found = Page(page)
    assert found.open == []
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "img", "iframe", "object", "embed", "base", "form", "link", "image"}
    for tag, attributes in found.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src", "srcset", "action", "data", "poster"):
                assert (value or "").startswith("#"), (tag, name, value)
            assert "url(" not in (value or "").replace("url(#", ""), (tag, name, value)
    policy = next(one for tag, one in found.elements if tag == "meta" and "http-equiv" in one)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert not any(not letter.isprintable() and letter not in "\n" for letter in page)
    assert "@import" not in page
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


def test_the_page_has_every_part_of_the_run(run: Path, capsys) -> None:
    page = assert_harmless(report(run))
    assert capsys.readouterr().out.startswith(f"Report  {run}/report.html  (0.")
    assert page.count("svg") == len(CHARTS)
    for part in (*CHARTS, "2 good", "2 bad", "waiting for groups", "generating", "0.25 to 0.75",
                 "Faults: none found", "LEARNER_MODEL", "machine device"):  # fmt: skip
        assert part in page.text, part
    assert "Not in this report" not in page.text


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_that_a_run_holds_is_executed_or_fetched(tmp_path: Path, count: int) -> None:
    text = HOSTILE.replace("\ud800", "")  # no learner can write a lone surrogate
    runs = [
        make_run(
            tmp_path / f"{number}<script>x<", reward=text, text=text, system_prompt=text, seed=number
        )
        for number in range(count)
    ]
    page = assert_harmless(report(*runs))
    assert page.text.count("<script>alert(1)</script></svg></pre>") > 10
    assert "\\x1b[2J\\x9b31m \\u202egnp.exe &lt;script&gt;" in page.text
    assert "0<script>x<" in page.text


def test_hostile_rows_that_no_learner_writes_are_shown_or_named(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": HOSTILE}) + "\n")
        file.write('{"step": 9, "reward": "<script>", "rewards/<script>/mean": 1, "entropy": [1]}\n')
    (run / "run.json").write_text(json.dumps({"<script>": {"onload=": [HOSTILE[:-1]]}}))
    (run / "settings.env").write_text(f"LEARNER_X='{HOSTILE[:-1]}'\n# LEARNER_Y=<script>\n<script>")
    page = assert_harmless(report(run))
    assert "metrics.jsonl: 1 damaged lines are left out" in page.text
    assert "LEARNER_Y" in page.text
    assert "<script> onload=" in page.text


def test_passwords_are_not_shown(run: Path) -> None:
    with (run / "settings.env").open("a") as file:
        file.write("LEARNER_FILES_URL=http://me:secret1@host/\nLEARNER_HF_TOKEN=secret2\n")
    (run / "run.json").write_text(json.dumps({"dataset": {"name": "https://u:secret3@host/x"}}))
    page = report(run)
    assert "secret" not in page
    assert "http://***@host/" in page


def test_two_runs_are_side_by_side(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "second", steps=5, reward="short", learning_rate=0.5)
    page = assert_harmless(report(run, other))
    assert page.count("svg") == len(CHARTS)
    for part in ("entropy (first)", "entropy (second)", "accuracy (first)", "short (second)",
                 "s per step (second)", "≠ LEARNER_LEARNING_RATE"):  # fmt: skip
        assert part in page.text, part
    assert "≠ LEARNER_SEED" not in page.text
    assert "stroke-dasharray" in (run / "report.html").read_text()
    assert not (other / "report.html").exists()


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run", steps=1) for parent in ("a", "b")]
    page = report(*runs)
    assert f"entropy ({runs[0]})" in page
    assert f"entropy ({runs[1]})" in page


PARTS = {
    "metrics.jsonl": "curves", "evaluations.jsonl": "held-out questions", "completions": "samples",
    "journal": "audit", "settings.env": "settings", "run.json": "machine",
}  # fmt: skip


def damage(run: Path, part: str, content: bytes | None) -> None:
    """Replace the content of a file, or of all files of a folder; None: delete them."""
    path = run / part
    for file in [path] if path.is_file() else list(path.iterdir()):
        file.unlink()
        if content is not None:
            file.write_bytes(content)


@pytest.mark.parametrize("content", [None, b"", bytes(range(256))])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_missing_or_damaged_is_named(run, part, content) -> None:
    damage(run, part, content)
    data = read_run(run, "x")
    named = {line.partition(": ")[0] for line in data.missing}
    assert named - {f"{run}/{part}"} == {PARTS[part]}
    assert bool(data.rows) == (part != "metrics.jsonl")
    assert bool(data.heldout) == (part != "evaluations.jsonl")
    assert bool(data.best and data.worst) == (part != "completions")
    assert bool(data.audit) == (part != "journal")
    assert bool(data.set_values) == (part != "settings.env")
    assert bool(data.record) == (part != "run.json")


def test_a_page_of_almost_nothing_says_what_is_missing(run: Path) -> None:
    for part in PARTS:
        damage(run, part, None)
    page = assert_harmless(report(run))
    for part in PARTS.values():
        assert f"first: {part}: " in page.text
    for told in ("No step has a value to draw.", "No step has a profile.", "There is no journal"):
        assert told in page.text
    assert page.text.count("No trained completion with a reward.") == 2


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch])
@pytest.mark.parametrize("command", [Report, Plot])
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, make, command) -> None:
    make(tmp_path / "x")
    with pytest.raises(ConfigError, match="x is no run's folder: expected"):
        load(command, "penstock", [str(tmp_path / "x")]).execute()


def test_a_file_that_cannot_be_written_is_named(run: Path, tmp_path: Path) -> None:
    for command in (Report, Plot):
        with pytest.raises(ConfigError, match="no/such cannot be written"):
            load(command, "penstock", [str(run), "--out", str(tmp_path / "no" / "such")]).execute()


def test_a_run_of_one_step_has_all_curves(tmp_path: Path) -> None:
    page = assert_harmless(report(make_run(tmp_path / "one", steps=1)))
    assert page.count("svg") == len(CHARTS)
    assert "nan" not in page.text


def test_values_that_are_no_finite_number_are_left_out(run: Path) -> None:
    odd: tuple[Any, ...] = (None, math.nan, math.inf, -math.inf, 1e308, -1e308, True, "x", [1], 1e30)
    recorder = Recorder(LearnerFolder(run, 1), [], "x")
    for step, value in enumerate(odd, 10):
        recorder.metrics(step, dict.fromkeys(STEP, value))
    recorder.metrics(2**62, STEP)
    page = assert_harmless(report(run))
    assert page.count("svg") == len(CHARTS)
    found = read_run(run, "x").points("entropy")
    assert found == {1: 0.7, 2: 0.7, 3: 0.7, 19: 1e30, 2**62: 0.7}
    assert "nan" not in page.text


def lots(steps: int) -> Iterator[str]:
    for step in range(1, steps + 1):
        yield json.dumps({"step": step} | STEP | {"perf/tokens_per_s": step * 7919 % 997}) + "\n"


def test_ten_thousand_steps_are_thinned_in_bounded_memory(run: Path) -> None:
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(lots(10_000))
    tracemalloc.start()
    assert len(read_run(run, "x", ["curves"]).rows) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    page = assert_harmless(report(run))
    assert page.count("svg") == len(CHARTS)
    lengths = [(attributes["d"] or "").count("L ") for tag, attributes in page.elements if tag == "path"]
    assert max(lengths) <= 2 * MOST_POINTS + 2  # a band goes along its upper edge and back
    assert peak < 32 << 20


def test_a_thinned_curve_has_the_mean_and_the_extremes_of_all_its_steps() -> None:
    points = {step: float(step % 2) for step in range(1, 10_001)}
    found = thin(points)
    assert len(found) == MOST_POINTS
    assert {(low, high) for _, _, low, high in found} == {(0.0, 1.0)}
    assert sum(mean for _, mean, _, _ in found) / len(found) == pytest.approx(0.5)
    assert thin({}) == []
    assert all(len(thin(dict.fromkeys(range(n), 1.0))) <= MOST_POINTS for n in (399, 400, 401, 801))


def test_the_audit_counts_from_the_journal_alone(run: Path) -> None:
    home = LearnerFolder(run, claim_next(run).incarnation)
    journal = Journal(home)
    ledger = {"next_number": 9}
    journal.append("header", step=3, machine={}, ends={}, ledger=ledger)
    ends = {"train:1": ("trained", 0), "train:5": ("filtered", 0)}
    journal.append("batch", step=5, groups=[], ends=ends, ledger=ledger)
    journal.append("evaluation", version="2.4", questions=2, ends={}, ledger=ledger)
    journal.append("end", ends={"train:6": ("unused", 0)}, ledger=ledger)
    page = report(run)
    for part in ("1 groups were trained twice", "step 5 is out of order", "6 tickets have no end"):
        assert part in page, part
    audit = read_run(run, "x", ["audit"]).audit
    assert audit is not None
    assert (audit.issued, audit.open, audit.starts, audit.steps) == (11, 6, 2, 4)
    assert audit.ended == {"trained": 4, "filtered": 1, "unused": 1}


def test_queues_audit_asks_the_journal_when_the_server_is_gone(run: Path, monkeypatch, capsys) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("RUN_DIR", str(run.parent))
    audit = ["audit", "--run.name", run.name]
    assert execute_command(Queues, "queues", audit) == 0
    text = capsys.readouterr().out
    assert "No queue server tells (no queue server is known: REDIS_URL is not set and" in text
    assert "does not exist). The journal in" in text
    assert "4 tickets issued, 3 steps" in text
    assert "balances: 4 = 3 ended + 1 open" in text
    assert execute_command(Queues, "queues", [*audit, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == {"trained": 3}
    Journal(LearnerFolder(run, claim_next(run).incarnation)).append(
        "header", step=3, machine={}, ends={"train:1": ("trained", 0)}, ledger={"next_number": 4}
    )
    assert execute_command(Queues, "queues", audit) == 1
    assert "1 groups were trained twice" in capsys.readouterr().out
    assert execute_command(Queues, "queues", ["audit", "--run.name", "another"]) == 78


def test_the_end_of_a_run_has_the_audit_of_its_journal(run: Path) -> None:
    counts = "Audit: 4 tickets issued, 3 ended, 1 open; "
    assert counts + "none lost, none trained twice." in format_ending(RunFolder(run))
    journal = Journal(LearnerFolder(run, claim_next(run).incarnation))
    ends = {"train:1": ("trained", 0)}
    journal.append("header", step=3, machine={}, ends=ends, ledger={"next_number": 4})
    assert "1 groups were trained twice" in format_ending(RunFolder(run))


def test_groups_that_died_are_told_by_the_journal_when_the_server_is_gone(
    run: Path, monkeypatch, capsys
) -> None:
    """As after a run that ended because its reward failed: it has no completions, and no server."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    monkeypatch.setenv("RUN_DIR", str(run.parent))
    dead = ["dead", "--run.name", run.name]
    assert execute_command(Queues, "queues", dead) == 0
    assert capsys.readouterr().out.endswith("says:\nnone\n")
    reason = "reward own: ValueError: no number\x1b[2J"
    ends = {f"train:{number}": ("dead", reason) for number in (7, 8)}
    journal = Journal(LearnerFolder(run, claim_next(run).incarnation))
    journal.append("no signal", ends=ends, ledger={"next_number": 9})
    assert execute_command(Queues, "queues", dead) == 0
    told = "    2  train:8, train:7: reward own: ValueError: no number\\x1b[2J\n"
    assert capsys.readouterr().out.endswith(told)
    assert execute_command(Queues, "queues", [*dead, "--drop"]) == 78
    assert "leave --drop out" in capsys.readouterr().err
    failed = ["samples", str(run), "--failed"]
    for path in (run / "completions").glob("*"):
        path.unlink()
    assert execute_command(Penstock, "penstock", failed) == 0
    assert capsys.readouterr().out == f"Whole groups died, and have no completions here:\n{told}"
    assert execute_command(Penstock, "penstock", [*failed, "--json"]) == 0
    (first, _) = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {"ticket": "train:8", "reason": reason}


def test_the_best_and_worst_are_one_of_a_group_and_of_the_newest_steps(run: Path) -> None:
    rows = [ROW | {"step": 2, "ticket": f"train:{n // 2}", "reward": float(n), "completion": f"n{n}"}
            for n in range(20)]  # fmt: skip
    RunFolder(run).completion_table(2).write_bytes(to_parquet(rows))
    data = read_run(run, "x", ["samples"])
    assert [row["completion"] for row in data.best] == ["n19", "n17", "n15", "n13"]
    assert data.worst[0]["completion"] == "n0"
    assert len({row["ticket"] for row in data.worst}) == len(data.worst) == 4


def plot(run: Path) -> bytes:
    """The picture that `penstock plot` draws."""
    assert load(Plot, "penstock plot", [str(run)]).execute() == 0
    return RunFolder(run).learning_curve.read_bytes()


def axes_of(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The axes that `penstock plot` fills for a run."""
    from matplotlib.figure import Figure

    made: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (made.append(self), save(self, *a, **k))
    )
    assert plot(run).startswith(b"\x89PNG")
    return made[-1].axes


def test_a_plot_of_shares_has_one_axis_from_0_to_1(run: Path, monkeypatch) -> None:
    (axes,) = axes_of(run, monkeypatch)
    assert axes.get_ylim() == (0, 1)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "reward, as sampled", "held-out accuracy",
    ]  # fmt: skip
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.1, 0.2, 0.3], [0.25, 0.75]]


def test_a_plot_of_another_scale_shows_both_curves_whole(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path / "x", steps=3, reward="$x_{$")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward": -250.0}\n')
    above, below = axes_of(run, monkeypatch)
    assert above.get_ylim()[0] < -250
    assert below.get_ylim()[1] > 0.75
    assert below.get_legend().get_texts()[0].get_text() == "held-out $x_{$"


@pytest.mark.parametrize(("asked", "shown"), [("short", "short"), ("gone", "accuracy")])
def test_a_plot_shows_the_reward_that_chooses_the_best_model(run, monkeypatch, asked, shown) -> None:
    row = {"step": 0, "version": "1.0", "rewards": [{"accuracy": 0.0, "short": 0.5}]}
    (run / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    with (run / "settings.env").open("a") as file:
        file.write(f"LEARNER_METRIC_FOR_BEST_MODEL={asked}\n")
    (axes,) = axes_of(run, monkeypatch)
    assert axes.lines[1].get_label() == f"held-out {shown}"


def test_a_plot_without_an_evaluation_has_the_reward_alone(run: Path, monkeypatch) -> None:
    (run / "evaluations.jsonl").unlink()
    (axes,) = axes_of(run, monkeypatch)
    assert len(axes.lines) == 1


def test_a_plot_of_a_run_without_a_step_says_so(run: Path) -> None:
    (run / "evaluations.jsonl").unlink()
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no step yet: wait for the first one"):
        plot(run)
