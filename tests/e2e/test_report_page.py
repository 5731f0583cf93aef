"""The page of `penstock report` in a real browser: nothing is fetched, and no text of a sample runs."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.test_report import make_run, report
from tests.helpers import NIGHTLY

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None or not NIGHTLY, reason="at night, with chromium installed"),
]


@pytest.fixture
def fetched() -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and the paths that somebody fetched from it."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", paths
    server.shutdown()


def browse(tmp_path: Path, *arguments: str) -> str:
    """What chromium prints."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}", *arguments,
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return found.stdout


def hostile(address: str) -> str:
    """Text that would fetch from `address` or rename the page, if it were more than text."""
    return (
        f"</pre></svg></style><img src={address}/image onerror=\"document.title='RAN'\">"
        f"<script>document.title='RAN';fetch('{address}/script')</script>"
        f"<link rel=stylesheet href={address}/style><style>@import url({address}/import)</style>"
        f"<meta http-equiv=refresh content='0;url={address}/refresh'>"
        f"<svg onload=\"document.title='RAN'\"></svg><iframe src={address}/frame></iframe>"
        "\x1b[31m\x1b[2J"
    )


def test_the_page_fetches_nothing_and_runs_nothing(
    tmp_path: Path, fetched: tuple[str, list[str]]
) -> None:
    address, paths = fetched
    text = hostile(address)
    bad = tmp_path / "bad.html"  # this browser does fetch and run what may be
    bad.write_text(f"<title>x</title>{text.replace('=refresh', '=none')}")  # stays on this page
    assert "<title>RAN" in browse(tmp_path, "--dump-dom", "--virtual-time-budget=3000", bad.as_uri())
    assert {"/image", "/script", "/style"} & set(paths)
    paths.clear()
    run, other = make_run(tmp_path / "run", text=text), make_run(tmp_path / "other", text=text)
    assert "&lt;script" in report(run, other)
    page = (run / "report.html").as_uri()
    dom = browse(tmp_path, "--dump-dom", "--virtual-time-budget=3000", page)
    assert "<title>RAN" not in dom
    assert "<title>Penstock" in dom
    assert paths == []


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_is_drawn_at_both_widths(tmp_path: Path, width: int) -> None:
    run = make_run(tmp_path / "run", steps=30)
    report(run)
    picture = tmp_path / "page.png"
    size = f"--window-size={width},2000"
    browse(tmp_path, size, f"--screenshot={picture}", (run / "report.html").as_uri())
    assert picture.stat().st_size > 20_000
