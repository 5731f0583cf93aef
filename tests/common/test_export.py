"""A run as Prometheus reads it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from dataclasses import replace

import pytest

from penstock.common.broker.local_server import LocalServer
from penstock.common.errors import ConfigError
from penstock.common.monitor.export import RunCollector, serve
from penstock.common.monitor.overview import Overview
from penstock.common.monitor.watch import PeriodicOverview
from tests.common.builders import Run
from tests.common.test_connection import closed_port
from tests.common.test_limit import PROGRESS, RUNNING, worker
from tests.common.test_terminals import EVERYTHING
from tests.helpers import wait_until


class Fixed(PeriodicOverview):
    """Looks whose latest is what they are given."""

    def __init__(self, now: Overview | None) -> None:
        self._now = now

    def latest(self) -> tuple[Overview | None, str]:
        return self._now, ""


def page(now: Overview | None) -> str:
    """What Prometheus gets."""
    port, _ = serve(Fixed(now), "demo", "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()


def test_the_figures_are_those_of_the_screen() -> None:
    text = page(RUNNING)
    for line in (
        'penstock_up{run="demo"} 1.0', 'penstock_step{run="demo"} 37.0',
        'penstock_reward{run="demo"} 0.58',
        'penstock_heldout{run="demo"} 0.61', 'penstock_tickets{run="demo",state="trained"} 2368.0',
        'penstock_stream_entries{held="yes",run="demo",stream="tickets"} 64.0',
        'penstock_process_busy_ratio{process="actor-1",role="actor",run="demo"} 0.98',
    ):  # fmt: skip
        assert line in text


def test_what_is_not_known_is_left_out() -> None:
    assert "penstock_up" in page(None)
    assert "penstock_step" not in page(None)
    text = page(
        replace(RUNNING, progress=replace(PROGRESS, rewards=(float("nan"),), evaluated=(), heldout=()))
    )
    assert "penstock_reward" not in text
    assert "penstock_heldout" not in text


def test_hostile_names_stay_inside_of_their_labels() -> None:
    name = f'x"}} 1\npenstock_step{{run="other"}} 5\n{EVERYTHING}\ud800'
    text = page(replace(RUNNING, workers={name: worker()}))
    assert 'penstock_step{run="other"}' not in [line.split("} ")[0] + "}" for line in text.splitlines()]
    lines = [line for line in re.split("\n", text) if line and not line.startswith("#")]
    assert all(re.fullmatch(r"penstock_\w+\{.*\} [0-9.e+-]+", line, re.DOTALL) for line in lines)


def test_an_address_that_is_taken_is_refused() -> None:
    port, _ = serve(Fixed(None), "demo", "127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:[0-9]+: .*choose an address"):
        serve(Fixed(None), "demo", "127.0.0.1", port)


def test_the_command_serves_until_it_is_told_to_stop(
    run: Run, run_name: str, queue_server: LocalServer
) -> None:
    place = f"127.0.0.1:{closed_port()}"
    command = [sys.executable, "-m", "penstock.common.queues", "export", "--listen", place]
    variables = os.environ | {"REDIS_URL": queue_server.url, "RUN_NAME": run_name}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as exporter:
        try:
            assert exporter.stdout is not None
            assert f"{place}/metrics" in exporter.stdout.readline()

            def is_up() -> bool:
                """Whether the first look has been served."""
                with urllib.request.urlopen(f"http://{place}/metrics", timeout=60) as answer:
                    return f'penstock_up{{run="{run_name}"}} 1.0' in answer.read().decode()

            wait_until(is_up, "the first look")
            exporter.send_signal(signal.SIGTERM)
            assert exporter.wait(60) == 0
        finally:
            exporter.kill()


def test_metrics_have_the_prefix() -> None:
    names = [family.name for family in RunCollector(Fixed(RUNNING), "demo").collect()]
    assert all(name.startswith("penstock_") for name in names)
    assert len(names) == len(set(names))
