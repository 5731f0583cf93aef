"""REDIS_URL: the address of the queue server, its login and its TLS files. Parsed here and nowhere else.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]
    rediss://...[?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE&ssl_check_hostname=true]
    unix://[[USER]:PASSWORD@]/SOCKET[?db=DATABASE&owner=UID]

No error of this module contains a part of the URL: an unencoded letter may put the password anywhere.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from penstock.common.errors import ConfigError

LONGEST_SOCKET_PATH = 107
"""Bytes that the path of a unix socket may have on Linux."""

_DEFAULT_PORT = 6379
_OPTIONS = {
    "redis": frozenset[str](),
    "rediss": frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}),
    "unix": frozenset({"db", "owner"}),
}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE | re.ASCII)
_LETTERS = (
    "expected USER:PASSWORD or :PASSWORD before the `@`, found another form; percent-encode "
    "these characters of a password: `%` as %25, `@` as %40, `:` as %3A, `/` as %2F, `?` as %3F"
)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A parsed REDIS_URL. `owner` is the user id of a unix socket's server; None: any user's.

    Example: parse_url("redis://:secret@[::1]:7000/2") has host "::1", port 7000, database 2.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    owner: int | None = None
    tls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        """Return the address for people, without user, password and options: `redis://***@host:6379/2`.

        `***@` stands for a login, and is left out without a password. `/2` is the database, and is left
        out if it is 0. The address of a socket never has a database: `unix:///run/q.sock`.
        """
        login = "***@" if self.password is not None else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        place = self.path if self.scheme == "unix" else f"{host}:{self.port}"
        database = f"/{self.database}" if self.database and self.scheme != "unix" else ""
        return f"{self.scheme}://{login}{place}{database}"


def parse_url(url: str) -> ServerAddress:
    """Return the parts of `url`, which has a form of REDIS_URL: redis://, rediss:// or unix://.

    Without them, the port is 6379, the database 0, and user, password and owner are None. A unix socket
    has a path, host "" and port 0; the others have the path "". Percent-encoded parts are decoded. `tls`
    has the options of rediss:// as texts. Raise ConfigError, with no part of the URL, if malformed.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _OPTIONS:
        _refuse("expected redis://, rediss:// or unix:// at the start, found none of them")
    if not url.isascii() or re.search(r"[\s\x00-\x1f\x7f#]", url):
        _refuse("found a space, a `#` or a letter beyond ASCII, expected it percent-encoded (# is %23)")
    try:
        parts = urlsplit(f"http://{rest}")  # a scheme for which urlsplit knows no special case
    except ValueError:
        _refuse("expected brackets around the IPv6 address of the host alone; in a password `[` is %5B")
    if "@" in parts.path and scheme != "unix":
        _refuse(_LETTERS)
    login, _, place = parts.netloc.rpartition("@")
    username, password = _login(login) if "@" in parts.netloc else (None, None)
    options = _options(parts.query, scheme)
    if scheme == "unix":
        return _unix_address(place, parts.path, username, password, options)
    host, port = parse_host(place)
    database = _number(parts.path[1:] or "0", "the database after the last `/`")
    _check_tls(options)
    return ServerAddress(
        scheme, host, port, "", database, username, password, None, MappingProxyType(options)
    )


def parse_host(place: str, source: str = "REDIS_URL") -> tuple[str, int]:
    """Return host and port of `place`, by default 6379: "::1" and 7000 of "[::1]:7000".

    Raise ConfigError, which begins with the setting `source`, for another form, a host with a dot first,
    two dots together or a part over 63 characters, a port not 1 to 65535, or no IPv6 address in [].
    """
    found = _HOST.fullmatch(place)
    if not found:
        _refuse("expected HOST:PORT, such as localhost:6379 or [::1]:6379, found another form", source)
    host, port = found[1] or found[2], int(found[3] or _DEFAULT_PORT)
    if not found[1] and re.search(r"^\.|\.\.|[^.]{64}", host):
        _refuse("expected 1 to 63 characters between the dots of the host, found another number", source)
    if not 0 < port < 1 << 16:
        _refuse(f"expected a port of 1 to {(1 << 16) - 1}, found another number", source)
    if found[1]:
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            _refuse("found brackets around a text that is no IPv6 address", source)
    return host, port


def unix_url(path: str, password: str, owner: int) -> str:
    """Return `unix://:PASSWORD@PATH?owner=OWNER` for the unix socket at `path`, percent-encoded.

    `owner` is the user id of the server's process.
    """
    return f"unix://:{quote(password, safe='')}@{quote(path)}?owner={owner}"


def with_login(url: str, username: str, password: str) -> str:
    """Return `url`, which is well-formed, with this user and password, which are percent-encoded here.

    Any login that `url` has is replaced. Example: redis://host:6379/2 gives
    redis://me:secret@host:6379/2.
    """
    scheme, _, rest = url.partition("://")
    place = rest[len(urlsplit(f"http://{rest}").netloc.rpartition("@")[0]) :].removeprefix("@")
    return f"{scheme}://{quote(username, safe='')}:{quote(password, safe='')}@{place}"


def _login(login: str) -> tuple[str | None, str]:
    """Return user and password of `login`, the text before the `@` of a URL, percent-decoded.

    The user is None in ":PASSWORD". Raise ConfigError unless there is one `:`, a password after it, no
    other `@` and right percent-encoding.
    """
    if "@" in login or login.count(":") != 1:
        _refuse(_LETTERS)
    username, password = (_decoded(part) for part in login.split(":"))
    if not password:
        _refuse("found an empty password before the `@`, expected USER:PASSWORD or :PASSWORD")
    return username or None, password


def _options(query: str, scheme: str) -> dict[str, str]:
    """Return the options in `query`, the text after `?` of a URL, by name, percent-decoded; {} for "".

    A `+` stays a `+`. Raise ConfigError for an option that has no `=`, is empty, is there twice, or is
    not one of `scheme`, such as "rediss".
    """
    try:
        plain = query.replace("+", "%2B")  # parse_qsl would read a space
        pairs = parse_qsl(plain, strict_parsing=True, keep_blank_values=True) if query else []
    except ValueError:
        pairs = [("", "")]
    options = dict(pairs)
    if len(options) < len(pairs) or not options.keys() <= _OPTIONS[scheme] or "" in options.values():
        known = ", ".join(sorted(_OPTIONS[scheme])) or "none"
        _refuse(
            f"found an unknown, empty or repeated option after `?`. Options of {scheme}://: {known}; "
            "the login stands before the `@`"
        )
    return options


def _unix_address(
    place: str, path: str, username: str | None, password: str | None, options: Mapping[str, str]
) -> ServerAddress:
    """Return the address of the unix socket at `path`, which is percent-decoded here.

    `place` is the host of the URL. Of `options`, db is the database, by default 0, and owner the
    server's user id, by default None. Raise ConfigError for any host, a path that is not absolute, has a
    NUL or over 107 bytes, or is "/" alone, and for db or owner that is no whole number.
    """
    path = _decoded(path)
    if place or not path.startswith("/") or len(path) < 2 or "\0" in path:
        _refuse("expected the absolute path of a socket, such as unix:///run/queue.sock")
    if len(path.encode()) > LONGEST_SOCKET_PATH:
        _refuse(f"expected a socket's path of at most {LONGEST_SOCKET_PATH} bytes, found a longer one")
    database = _number(options.get("db", "0"), "db")
    owner = _number(options["owner"], "owner") if "owner" in options else None
    return ServerAddress("unix", "", 0, path, database, username, password, owner)


def _check_tls(options: Mapping[str, str]) -> None:
    """Raise ConfigError if `options` of a URL have ssl_keyfile without ssl_certfile, or a wrong value.

    ssl_check_hostname may be "true", "false" or left out. The files are not looked for.
    """
    if "ssl_keyfile" in options and "ssl_certfile" not in options:
        _refuse("found ssl_keyfile without ssl_certfile, expected both")
    if options.get("ssl_check_hostname", "true") not in ("true", "false"):
        _refuse("expected ssl_check_hostname=true or ssl_check_hostname=false, found another value")


def _decoded(text: str) -> str:
    """Return a text with its percent-encoded characters decoded: "a%40b" gives "a@b".

    Raise ConfigError for a `%` without two hexadecimal digits, or bytes that are no UTF-8.
    """
    try:
        if re.search("%(?![0-9a-fA-F]{2})", text):
            raise ValueError
        return unquote(text, errors="strict")
    except ValueError:
        _refuse("found a `%` that begins no percent-encoded letter of UTF-8, expected %25 for a `%`")


def _number(text: str, name: str) -> int:
    """Return the whole number that `text` is, of at most 10 digits, without sign and leading zeros.

    Raise ConfigError, which calls the number `name`, for any other text.
    """
    if not _NUMBER.fullmatch(text):
        _refuse(f"{name}: expected a whole number such as 0, found another text")
    return int(text)


def _refuse(fault: str, source: str = "REDIS_URL") -> NoReturn:
    """Raise ConfigError with "SOURCE: FAULT" and what to do, for REDIS_URL also with the URL's form."""
    form = ": redis://USER:PASSWORD@HOST:PORT/DATABASE or unix:///SOCKET" * (source == "REDIS_URL")
    raise ConfigError(f"{source}: {fault}; correct the address{form}") from None
