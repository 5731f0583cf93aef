"""Frames between processes: four bytes of length, then JSON. Nothing from a child is unpickled.

The parent process reads frames of processes that run foreign code, so each length, type and number is
checked before use. The child processes read frames of the parent process only. The request of a call is
msgpack and not JSON, because the columns of a data set may hold bytes.
"""

import json
import socket
from typing import Any, NoReturn

from penstock.common.text import printable
from penstock.common.wire.raw import pack_raw, unpack_raw

LONGEST_ANSWER = 4 * 2**20
"""Most bytes that the parent process reads of one frame from a child process."""
LONGEST_REQUEST = 2**29
_HEAD = 4
LONGEST_MISTAKE = 500

FOREIGN = "remove from your function what writes into file descriptors that it did not open"
"""What to do about a frame that Penstock's part of a process does not send."""


class BrokenFrame(ValueError):
    """Bytes that are no frame: too long, no JSON, or a number that JSON does not have."""


def pack(value: Any) -> bytes:
    """Return a value as a frame: the length in four bytes, then the value as JSON.

    NaN and infinity are packed too. Raise TypeError, ValueError or RecursionError for another value that
    is no JSON, ValueError also for over 512 MiB.
    """
    return _framed(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def pack_request(value: Any) -> bytes:
    """Return the request of a call as a frame: the length in four bytes, then `value` as msgpack.

    `receive_request` reads the frame; tuples become lists. Raise TypeError, ValueError or OverflowError
    for a value that msgpack has no form for, ValueError also for over 512 MiB.
    """
    return _framed(pack_raw(value, "surrogatepass"))


def _framed(body: bytes) -> bytes:
    """Return the length of `body` in four bytes, big-endian, and then `body`.

    Raise ValueError if `body` is over LONGEST_REQUEST, 512 MiB.
    """
    if len(body) > LONGEST_REQUEST:
        remedy = "use shorter completions, fewer or shorter columns, or let your function return less"
        found = f"a message has {len(body)} bytes, expected at most {LONGEST_REQUEST}"
        raise ValueError(f"{found}: {remedy}")
    return len(body).to_bytes(_HEAD, "big") + body


class FrameReader:
    """Collects bytes that have come from a process, and splits them into frames. It begins empty."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def partial(self) -> bool:
        """Return True if any bytes have come that `take` has not taken, of a part or a whole frame."""
        return bool(self._bytes)

    @property
    def whole(self) -> bool:
        """Return True if all bytes of a next frame have come, so that `take` does not return None."""
        return len(self._bytes) >= _HEAD + self._length()

    def feed(self, data: bytes) -> None:
        """Add `data` to the bytes that have come.

        Raise BrokenFrame if the next frame is over LONGEST_ANSWER, 4 MiB. The bytes are stored also
        then.
        """
        self._bytes += data
        if len(self._bytes) >= _HEAD and self._length() > LONGEST_ANSWER:
            raise BrokenFrame(
                f"an answer of {self._length()} bytes, expected at most {LONGEST_ANSWER}: "
                "let your function return less"
            )

    def take(self) -> dict[str, Any] | None:
        """Remove the next whole frame and return its JSON object; None if no whole frame has come.

        Raise BrokenFrame if the frame, removed all the same, is no JSON object or has NaN or infinity.
        """
        if not self.whole:
            return None
        end = _HEAD + self._length()
        text = bytes(self._bytes[_HEAD:end])
        del self._bytes[:end]
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise BrokenFrame(
                f"an answer that is no JSON ({type(error).__name__}: {error}): {FOREIGN}"
            ) from error
        if not isinstance(value, dict):
            raise BrokenFrame(f"an answer of type {type(value).__name__}, expected an object: {FOREIGN}")
        return value

    def _length(self) -> int:
        """Return how many bytes of JSON the next frame has, by its first four bytes; 0 before these."""
        return int.from_bytes(self._bytes[:_HEAD], "big") if len(self._bytes) >= _HEAD else 0


def short(text: object) -> str:
    """Return a text of foreign code, cut to 500 characters; then unprintable characters are escaped."""
    return printable(str(text)[:LONGEST_MISTAKE])


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError, always: the error names `constant`, which is NaN, Infinity or -Infinity."""
    raise ValueError(f"the answer has {constant}, expected finite numbers: let your code return these")


def send(connection: socket.socket, value: Any) -> None:
    """Send a value as a frame, and wait until all is sent.

    Raise OSError if the connection fails, TypeError, ValueError or RecursionError if `value` is no JSON.
    NaN and infinity are sent too.
    """
    connection.sendall(pack(value))


def receive(connection: socket.socket) -> Any:
    """Wait for a frame of JSON from the parent process, and return its value.

    Raise EOFError if the connection ends before the frame does.
    """
    return json.loads(_body(connection))


def receive_request(connection: socket.socket) -> Any:
    """Wait for a call's request, as `pack_request` has packed it, and return its value.

    Raise EOFError if the connection ends before the frame does.
    """
    return unpack_raw(_body(connection), strict_map_key=False, unicode_errors="surrogatepass")


def _body(connection: socket.socket) -> bytes:
    """Wait for the next frame, and return its bytes without the length.

    Raise EOFError if the connection ends before the frame does.
    """
    return _read(connection, int.from_bytes(_read(connection, _HEAD), "big"))


def _read(connection: socket.socket, size: int) -> bytes:
    """Wait for `size` bytes and return them. Raise EOFError if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 2**20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
