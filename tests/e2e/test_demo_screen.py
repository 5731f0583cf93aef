"""The live screen of the demo, with the real engine, in a terminal of two sizes. Nightly: a few minutes.

NIGHTLY=1 python -m pytest tests/e2e/test_demo_screen.py
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.e2e.site import REAL_PROCFILE
from tests.e2e.terminal import TerminalSite
from tests.helpers import nightly

pytestmark = [pytest.mark.e2e, pytest.mark.engine, nightly]

LIMIT_S = 1200


def shows(site: TerminalSite, *words: str) -> bool:
    """Whether the terminal shows a frame from its first line on, with all of the words in it."""
    lines = site.shown()
    return lines[0].startswith("demo-") and all(word in " ".join(lines) for word in words)


def test_the_demos_screen_fits_and_goes_on_to_its_report(tmp_path: Path) -> None:
    site = TerminalSite(tmp_path, REAL_PROCFILE, 100, 30)
    for name in [name for name in site.variables if name.startswith(("LEARNER_", "RUN_"))]:
        del site.variables[name]  # the demo has its own
    site.process = site.launch(["demo", "--steps", "12", "--dir", str(tmp_path / "demo")])
    threading.Thread(target=site._collect, daemon=True).start()
    words = ("reward", "held-out", "the limit", "groups", "actor-", "rewarder-", "tokens/s", "Step ")
    with site:
        site.wait_for(lambda: shows(site, *words), "the screen of 100 columns", LIMIT_S)
        site.resize(80, 24)
        site.wait_for(lambda: shows(site, *words), "the screen of 80 columns", LIMIT_S)
        assert site.wait(LIMIT_S) == 0
    assert b"\x1b[?1049l" in site.written
    text = site.written.rpartition(b"\x1b[?1049l")[2].decode()
    assert "held-out" in text.lower()
    assert "Traceback" not in text
