"""Checks of a queue server and its URL: certificates, and whether everybody is let in."""

import contextlib
import ipaddress
import socket
import ssl
from pathlib import Path

from penstock.common.config.redis_url import ServerAddress
from penstock.common.errors import ConfigError

_TIMEOUT_S = 10.0
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def check_files(address: ServerAddress) -> None:
    """Raise ConfigError if a file of the URL's TLS options (CA, certificate, key) cannot be read."""
    for name in _FILES:
        path = address.tls.get(name)
        if path is None:
            continue
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(
                f"REDIS_URL {address}: the file of {name}, {path}, cannot be read ({error.strerror}): "
                "correct its path in REDIS_URL, or let this user read it"
            ) from None


def check_handshake(error: BaseException, address: ServerAddress) -> None:
    """Raise ConfigError if `error`, of a connection to `address`, comes from TLS: no retry would help.

    This is so if the error, or one that caused it, is an ssl.SSLError. A connection that was cut in the
    handshake is left out: the server may be about to start.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if found is None or isinstance(found, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return
    reason = getattr(found, "verify_message", "") or found.reason or "no common protocol"
    raise ConfigError(
        f"queue server {address}: no TLS connection ({reason}). Expected a certificate for the host "
        f"{address.host}, signed by a CA in ssl_ca_certs of REDIS_URL or of the system, and a client's "
        "certificate in ssl_certfile and ssl_keyfile if the server asks for one. Set them in REDIS_URL"
    ) from error


def check_not_open(address: ServerAddress) -> None:
    """Raise ConfigError if a server beyond this machine answers a client without login.

    The question is a PING on a connection of its own, without password and without the client's
    certificate, for up to 10 s. A server on a unix socket or on loopback is not asked. A server that
    cannot be reached, or does not answer, passes.
    """
    if address.scheme == "unix" or is_loopback(address.host):
        return
    with contextlib.suppress(OSError), _connected(address) as client:
        if is_loopback(client.getpeername()[0]):
            return
        client.sendall(b"PING\r\n")
        if client.recv(5) == b"+PONG":
            raise ConfigError(
                f"the queue server {address} lets in everybody who reaches it, without a password. Set "
                "`requirepass` or users on the server and put the login into REDIS_URL, or set "
                "RUN_ALLOW_OPEN_SERVER=true if everybody in that network may control the run"
            )


def _connected(address: ServerAddress) -> socket.socket:
    """Return a connection to the address's host, with TLS for rediss://. Raise OSError if that fails.

    The server's certificate is not checked: send nothing secret. Each step may take 10 s.
    """
    client = socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
    if address.scheme == "redis":
        return client
    context = ssl._create_unverified_context()
    try:
        return context.wrap_socket(client, server_hostname=address.host)
    except OSError:
        client.close()
        raise


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or an address of loopback. Other names are not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
