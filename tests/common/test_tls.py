"""rediss:// with a CA and a client's certificate of the user's own."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.common.broker.acl import write_users
from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.config.redis_url import parse_url
from penstock.common.errors import ConfigError, NotPermitted, ServerUnavailable
from tests.common.builders import Run
from tests.common.tls_server import make_certificates, tls_server, url_of

SECRET = "s3cr3t"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("no command openssl on this machine")
    return make_certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[int]:
    with tls_server(tmp_path_factory.mktemp("server"), certificates, SECRET) as port:
        Connection(url_of(port, certificates, f":{SECRET}"), 30, 10).close()
        yield port


def test_a_run_works_over_tls_with_a_client_certificate(port: int, certificates: Path) -> None:
    run = Run(Connection(url_of(port, certificates, f":{SECRET}"), 10, 10), Keys("tls"))
    run.issue(1)
    assert len(run.actor().take(1)) == 1


def test_the_users_of_roles_have_the_tls_options_in_their_urls(
    port: int, certificates: Path, tmp_path: Path
) -> None:
    url = url_of(port, certificates, f":{SECRET}")
    users, saved = write_users(Connection(url, 10, 10), url, "tls", tmp_path / "users")
    assert not saved  # this server has no aclfile
    urls = {user.role: user.file.read_text().strip() for user in users}
    assert parse_url(urls["actor"]).tls == parse_url(url).tls
    Run(Connection(urls["learner"], 10, 10), Keys("tls"))
    with pytest.raises(NotPermitted):
        Connection(urls["actor"], 10, 10).execute("SET", Keys("tls").contract, "x")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ssl_ca_certs": "{}/other-ca.crt"}, "no TLS connection"),
        ({"ssl_ca_certs": ""}, "no TLS connection"),
        ({"ssl_certfile": "", "ssl_keyfile": ""}, "client's certificate in ssl_certfile"),
        ({"ssl_keyfile": "{}/server.key"}, "no TLS connection"),
        ({"ssl_ca_certs": "{}/server.key"}, "no TLS connection"),
        ({"ssl_ca_certs": "{}/none.crt"}, "the file of ssl_ca_certs, .*none.crt, cannot be read"),
        ({"ssl_certfile": "{}/none.crt"}, "the file of ssl_certfile, .*none.crt, cannot be read"),
    ],
    ids=str,
)
def test_what_is_wrong_with_certificates_is_a_configuration_error(
    port: int, certificates: Path, options: dict[str, str], error: str
) -> None:
    found = {name: value.format(certificates) for name, value in options.items()}
    with pytest.raises(ConfigError, match=error) as caught:
        Connection(url_of(port, certificates, f":{SECRET}", **found), 10, 10)
    assert SECRET not in str(caught.value)


# Without a server that has TLS


@pytest.fixture
def listener(certificates: Path) -> Iterator[int]:
    """The port of a server that completes the handshake and closes; its certificate is the test CA's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
                context.wrap_socket(client, server_side=True).close()
            except ssl.SSLError:
                continue
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("authority", ["", "other-ca.crt"])
def test_a_server_whose_certificate_no_known_authority_signed_gets_no_password(
    listener: int, certificates: Path, authority: str
) -> None:
    ca = str(certificates / authority) if authority else ""
    url = url_of(listener, certificates, f":{SECRET}", ssl_ca_certs=ca)
    with pytest.raises(ConfigError, match="signed by a CA in ssl_ca_certs") as caught:
        Connection(url, 10, 10)
    assert SECRET not in str(caught.value)


def test_a_server_with_a_certificate_of_another_name_is_refused(
    listener: int, certificates: Path
) -> None:
    url = url_of(listener, certificates, f":{SECRET}").replace("127.0.0.1", "localhost")
    with pytest.raises(ConfigError, match=r"no TLS connection .*certificate for the host localhost"):
        Connection(url, 10, 10)
    with pytest.raises(ServerUnavailable):  # this listener answers nothing
        Connection(f"{url}&ssl_check_hostname=false", 0.3, 10)
