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
_LONGEST_MISTAKE = 500

FOREIGN = "remove from the code what writes into the connection of its process"
"""What to do about a frame that Penstock's part of a process does not send."""


class BrokenFrame(ValueError):
    """Bytes that are no frame: too long, no JSON, or a number that JSON does not have."""


def pack(value: Any) -> bytes:
    """Return a value as a frame.

    Raise TypeError, ValueError or RecursionError for a value that is no JSON, or over LONGEST_REQUEST.
    """
    return _framed(json.dumps(value).encode())


def pack_request(value: Any) -> bytes:
    """Return the request of a call as a frame, for `receive_request`. Tuples become lists.

    Raise TypeError, ValueError or OverflowError for a value that msgpack has no form for, or over
    LONGEST_REQUEST.
    """
    return _framed(pack_raw(value, "surrogatepass"))


def _framed(body: bytes) -> bytes:
    """Return the body of a frame after its length. Raise ValueError if it is over LONGEST_REQUEST."""
    if len(body) > LONGEST_REQUEST:
        raise ValueError(
            f"what a call is given has {len(body)} bytes, expected at most {LONGEST_REQUEST}: "
            "use shorter completions, or fewer or shorter columns"
        )
    return len(body).to_bytes(_HEAD, "big") + body


class FrameReader:
    """Collects the bytes of one frame after the other."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def partial(self) -> bool:
        """Return whether there are bytes that belong to no whole frame."""
        return bool(self._bytes)

    @property
    def whole(self) -> bool:
        """Return whether there is a whole frame to take."""
        return len(self._bytes) >= _HEAD + self._length()

    def feed(self, data: bytes) -> None:
        """Add `data` to what has come. Raise BrokenFrame if the next frame is over LONGEST_ANSWER.

        The bytes are kept also then.
        """
        self._bytes += data
        if len(self._bytes) >= _HEAD and self._length() > LONGEST_ANSWER:
            raise BrokenFrame(
                f"an answer of {self._length()} bytes, expected at most {LONGEST_ANSWER}: "
                "let the code return less"
            )

    def take(self) -> dict[str, Any] | None:
        """Return the next whole frame, None without one. Raise BrokenFrame if it is no object."""
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
        """Return the length of the next frame's JSON; 0 while its head is not complete."""
        return int.from_bytes(self._bytes[:_HEAD], "big") if len(self._bytes) >= _HEAD else 0


def short(text: object) -> str:
    """Return a text of foreign code, cut to 500 characters and without commands for terminals."""
    return printable(str(text)[:_LONGEST_MISTAKE])


def _refuse(constant: str) -> NoReturn:
    """Raise ValueError, which names `constant`: NaN, Infinity or -Infinity."""
    raise ValueError(f"it has {constant}, expected finite numbers")


def send(connection: socket.socket, value: Any) -> None:
    """Send a value as a frame. Raise OSError, or as `pack` does."""
    connection.sendall(pack(value))


def receive(connection: socket.socket) -> Any:
    """Return the value of a frame of the parent process. Raise EOFError if the connection ends."""
    return json.loads(_body(connection))


def receive_request(connection: socket.socket) -> Any:
    """Return the request of a call. Raise EOFError if the connection ends."""
    return unpack_raw(_body(connection), strict_map_key=False, unicode_errors="surrogatepass")


def _body(connection: socket.socket) -> bytes:
    """Return the body of the next frame. Raise EOFError if the connection ends before the frame does."""
    return _read(connection, int.from_bytes(_read(connection, _HEAD), "big"))


def _read(connection: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes. Raise EOFError if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 2**20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
