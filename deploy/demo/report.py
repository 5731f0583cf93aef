"""What the demo shows at the end, all of it read from the files that every run writes."""

from pathlib import Path
from typing import Any

from penstock.common.broker.connection import Connection
from penstock.common.broker.local_server import LocalServer
from penstock.common.broker.monitor import read_audit
from penstock.common.files.atomic import read_json_lines
from penstock.common.files.run_folder import RunFolder
from penstock.common.queues import format_audit

SHOWN = 8


def print_report(run_folder: RunFolder) -> None:
    """Table, learning curve, answers before and after, audit, checkpoint."""
    metrics = read_json_lines(run_folder.metrics)
    answers = read_json_lines(run_folder.evaluations)
    accuracy = accuracy_by_step(answers)
    _print_table(metrics, accuracy)
    _print_answers(answers)
    draw_curve(metrics, accuracy, run_folder.learning_curve)
    _print_audit(run_folder.path)
    checkpoint = max(run_folder.checkpoints.iterdir())
    print(f"\nLearning curve   {run_folder.learning_curve}\nFinal model      {checkpoint / 'model'}")
    print(f"Metrics          {run_folder.metrics}")


def accuracy_by_step(answers: list[dict[str, Any]]) -> dict[int, float]:
    """Share of the held-out questions that each evaluated step answered right."""
    rewards: dict[int, list[float]] = {}
    for row in answers:
        (found,) = row["rewards"] or [{}]
        rewards.setdefault(row["step"], []).append(found.get("accuracy") or 0.0)
    return {step: sum(values) / len(values) for step, values in sorted(rewards.items())}


def _print_table(metrics: list[dict[str, Any]], accuracy: dict[int, float]) -> None:
    first, last = min(accuracy), max(accuracy)

    def mean(name: str, rows: list[dict[str, Any]]) -> float:
        values = [row[name] for row in rows if row.get(name) is not None]
        return sum(values) / max(len(values), 1)

    head, tail = metrics[:10], metrics[-10:]
    rows = [
        ("held-out accuracy, greedy", f"{accuracy[first]:.1%}", f"{accuracy[last]:.1%}"),
        ("reward at temperature 1", f"{mean('reward', head):.3f}", f"{mean('reward', tail):.3f}"),
        ("entropy per token", f"{mean('entropy', head):.3f}", f"{mean('entropy', tail):.3f}"),
        ("groups without spread", *(f"{mean('groups/filtered', r):.1f}" for r in (head, tail))),
        ("staleness, versions", *(f"{mean('sample/staleness_mean', r):.2f}" for r in (head, tail))),
        ("engine - trainer |logp|", *(
            f"{mean('sampling/sampling_logp_difference/mean', r):.0e}" for r in (head, tail)
        )),
    ]  # fmt: skip
    print(f"\n{'':<28}{'before':>12}{'after':>12}    (step {first} and step {last};")
    print(f"{'':<28}{'':>12}{'':>12}     below the first row: first and last 10 steps)")
    for name, before, after in rows:
        print(f"{name:<28}{before:>12}{after:>12}")
    gain = 100 * (accuracy[last] - accuracy[first])
    print(f"{'gain':<28}{'':>12}{f'{gain:+.1f} points':>12}")


def _print_answers(answers: list[dict[str, Any]]) -> None:
    first, last = min(row["step"] for row in answers), max(row["step"] for row in answers)
    before = {row["index"]: row for row in answers if row["step"] == first}
    after = {row["index"]: row for row in answers if row["step"] == last}
    print(f"\n{'right answer':>14}{'before':>10}{'after':>10}")
    for index in sorted(before)[:SHOWN]:
        gold = before[index]["columns"]["answer"]
        texts = (" ".join(rows[index]["completions"]) for rows in (before, after))
        print(f"{gold:>14}{''.join(f'{text:>10}' for text in texts)}")


def draw_curve(metrics: list[dict[str, Any]], accuracy: dict[int, float], path: Path) -> None:
    """Reward of every step and held-out accuracy of every evaluated step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = [row["step"] for row in metrics]
    axes.plot(steps, [row["reward"] for row in metrics], color="0.6", label="reward, temperature 1")
    axes.plot(list(accuracy), list(accuracy.values()), "o-", label="held-out accuracy, greedy")
    axes.set(xlabel="Updates", ylabel="share right", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _print_audit(folder: Path) -> None:
    """The ledger as the queue server holds it after the run (started again for the question)."""
    with LocalServer(folder) as server:
        connection = Connection(server.url, connect_timeout_s=10, server_timeout_s=10)
        print(f"\nqueues audit:\n{format_audit(read_audit(connection, folder.name))}")
        connection.close()
