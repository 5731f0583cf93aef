"""A network between one role and the queue server, which can be slow, cut, lossy or forgetful."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from dataclasses import dataclass

from penstock.common.config.redis_url import parse_url

_LOOK_S = 0.02
_PIECES_PER_S = 10
_SHARE = 0.3
"""Of the replies that are reset in the middle, and of the requests that get a strange answer."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to bytes on their way, to the server (up) and back (down).

    `latency_s`: each piece takes up to as long, at random. `bytes_per_s`: the speed of each connection,
    0 for no limit. `resets`: some replies end in their middle, by a reset. `answer`: some requests get
    this reply in the place of the server, which does not get them.
    """

    latency_s: float = 0.0
    up_cut: bool = False
    down_cut: bool = False
    bytes_per_s: int = 0
    resets: bool = False
    answer: bytes = b""


class FaultProxy:
    """A TCP address, `url`, that leads to a server's unix socket. `weather` may be changed at any time.

    While a direction is cut its bytes are held, as by TCP, which would send them again.
    """

    def __init__(self, url: str, seed: int) -> None:
        self._server = parse_url(url)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"redis://:{self._server.password}@127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.weather = Weather()
        self._random = random.Random(seed)
        self._age = 0
        self._closed = False

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._listener.close()

    def forget(self) -> None:
        """Lose all present connections, and tell neither end. New ones are as good as ever."""
        self._age += 1

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client, self._age), daemon=True).start()

    def _relay(self, client: socket.socket, age: int) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
            server.connect(self._server.path)
            up = threading.Thread(target=self._pump, args=(client, server, age, True), daemon=True)
            up.start()
            self._pump(server, client, age, False)
            up.join()  # of a forgotten connection the server's end is open as long as the client's

    def _pump(self, source: socket.socket, sink: socket.socket, age: int, up: bool) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(1 << 16)) and not self._closed:
                self._delay(up)
                if age != self._age:
                    continue  # nobody hears of it, and of an end neither
                weather = self.weather
                if up and weather.answer and self._random.random() < _SHARE:
                    source.sendall(weather.answer)
                elif not up and weather.resets and self._random.random() < _SHARE:
                    sink.sendall(data[: len(data) // 2])
                    sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                else:
                    self._send(sink, data)
        if age == self._age or self._closed:
            for end in (source, sink) if not up else (sink,):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _delay(self, up: bool) -> None:
        if latency_s := self.weather.latency_s:
            time.sleep(self._random.random() * latency_s)
        while (self.weather.up_cut if up else self.weather.down_cut) and not self._closed:
            time.sleep(_LOOK_S)

    def _send(self, sink: socket.socket, data: bytes) -> None:
        while (size := self.weather.bytes_per_s // _PIECES_PER_S) and data:
            sink.sendall(data[:size])
            data = data[size:]
            time.sleep(1 / _PIECES_PER_S)
        sink.sendall(data)
