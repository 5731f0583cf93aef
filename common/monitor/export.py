"""A run's state for Prometheus, which asks `queues export` over HTTP. The roles do nothing for it."""

import math
import threading
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric

from penstock.common.errors import ConfigError
from penstock.common.monitor.overview import Overview
from penstock.common.monitor.watch import PeriodicOverview
from penstock.common.text import encodable

_LABELS = {
    "tickets": ("state",),
    "stream_entries": ("stream", "held"),
    "process_busy_ratio": ("role", "process"),
    "process_rate": ("role", "process"),
    "process_seen_seconds": ("role", "process"),
}
"""The labels of the metrics that have any, beside the run's name."""

Sample = tuple[str, str, tuple[str, ...], float]
"""A metric's name without the prefix, its help, the values of its labels, and its value."""


def samples_of(now: Overview | None) -> Iterator[Sample]:
    """Yield the samples of a run, None if it cannot be read; those that are not known are left out."""
    yield "up", "1 if the run can be read", (), float(now is not None)
    if now is None:
        return
    yield "learner_heartbeat_seconds", "age of the last heartbeat", (), now.heartbeat_s
    if progress := now.progress:
        yield "step", "Updates made", (), progress.step
        yield "steps", "Updates of the whole run", (), progress.steps
        for name, values in (("reward", progress.rewards), ("heldout", progress.heldout)):
            if values and math.isfinite(values[-1]):
                yield name, "newest mean", (), values[-1]
        yield "staleness", "mean age in versions of trained tokens", (), progress.staleness
        yield "step_seconds", "mean of the newest steps", (), progress.step_s
        yield "wait_seconds", "of a step, for groups; mean of the newest steps", (), progress.wait_s
        yield "trained_tokens_per_second", "mean of the newest steps", (), progress.tokens_per_s
    for state, count in now.totals.items():
        yield "tickets", "tickets issued, and by end state", (state,), count
    for stream in now.streams.values():
        help_text = "entries of a stream, those held by a process and others"
        yield "stream_entries", help_text, (stream.name, "yes"), stream.pending
        yield "stream_entries", help_text, (stream.name, "no"), stream.undelivered
    for name, status in now.workers.items():
        labels = (status.role, name)
        yield "process_busy_ratio", "share of time outside of waits for work", labels, status.busy
        yield "process_rate", "tokens/s of an actor, groups/s of a rewarder", labels, status.rate
        yield "process_seen_seconds", "since the process told of itself", labels, now.age_s(status)


class RunCollector:
    """A collector of prometheus_client, which gets the latest look at the run named `run`."""

    def __init__(self, looks: PeriodicOverview, run: str) -> None:
        self._looks, self._run = looks, run

    def collect(self) -> list[Metric]:
        """Return the metrics of the latest look, all with the prefix penstock_ and the label run."""
        now, _ = self._looks.latest()
        families: dict[str, GaugeMetricFamily] = {}
        for name, help_text, values, value in samples_of(now):
            labels = ("run", *_LABELS.get(name, ()))
            family = families.setdefault(
                name, GaugeMetricFamily(f"penstock_{name}", help_text, labels=labels)
            )
            family.add_metric(list(map(encodable, (self._run, *values))), value)
        return list(families.values())


def serve(looks: PeriodicOverview, run: str, host: str, port: int) -> tuple[int, threading.Thread]:
    """Serve the run's metrics at http://HOST:PORT/metrics in a thread; return the port and the thread.

    Port 0 is a free one. Raise ConfigError if the address cannot be used.
    """
    registry = CollectorRegistry()
    registry.register(RunCollector(looks, run))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"--listen {host}:{port}: {error.strerror or error}; choose an address of this machine and "
            "a free port, such as 127.0.0.1:9400"
        ) from error
    return server.server_port, thread
