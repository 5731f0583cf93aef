"""What a `penstock up` and the run's queue server tell each other each second.

`penstock up` writes what it runs, and reads how many processes it is to run (`queues scale`). One that
was started with --only, and has no learner to wait for, also reads whether the run has ended.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

from penstock.common.broker.connection import Connection
from penstock.common.broker.keys import Keys
from penstock.common.broker.run_view import RunView
from penstock.common.broker.scale import Scale
from penstock.common.errors import ConfigError, PenstockError, ServerUnavailable
from penstock.common.role import consumer_name
from penstock.deploy.child import Report
from penstock.deploy.supervisor import Supervisor

_EVERY_S, _JOIN_S = 1.0, 5.0


class ScaleLink:
    """A thread that carries the requests for the run named `run` to `supervisor`. A context.

    `connect` connects to the run's queue server, and waits for it at most until the event is set. It may
    raise ConfigError before there is one. `guest`: the learner is elsewhere. What keeps the thread from
    its work is given to `report` once.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        connect: Callable[[threading.Event], Connection],
        run: str,
        report: Callable[[Report], None],
        guest: bool = False,
    ) -> None:
        self.name = consumer_name("up")  # a restarted container has the same host and process id
        self._supervisor, self._connect, self._keys = supervisor, connect, Keys(run)
        self._report, self._guest = report, guest
        self._connection: Connection | None = None
        self._view: RunView | None = None
        self._said, self._went_on, self._saw_end = "", False, False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="scale", daemon=True)

    def __enter__(self) -> "ScaleLink":
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, in up to 5 s. An error of the block passes."""
        self._ended.set()
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        """Look every second until the context ends, then remove the status."""
        while not self._ended.is_set():
            try:
                self._look()
            except (ConfigError, ServerUnavailable) as error:
                self._forget(error)
            except PenstockError as error:
                self._say(error)
            self._ended.wait(_EVERY_S)
        if self._connection is not None:
            with contextlib.suppress(PenstockError):  # the status is old in a few seconds
                Scale(self._connection, self._keys).leave(self.name)
            self._connection.close()

    def _look(self) -> None:
        """Read requests and the run's end, and write the status. Raise Connection.execute's errors."""
        if self._connection is None or self._view is None:
            self._connection = self._connect(self._ended)
            self._view = RunView(self._connection, self._keys)
        if self._guest:
            ended = self._view.ended()
            self._supervisor.goes_on = not ended
            self._went_on = self._went_on or not ended
            self._saw_end = ended and self._went_on  # before, workers wait for a learner
            if self._saw_end:
                self._supervisor.leave()
        scale = Scale(self._connection, self._keys)
        for role, count in scale.requests(self.name).items():
            self._supervisor.ask(role, count)
        scale.write_status(self.name, socket.gethostname(), self._supervisor.counts())

    def _forget(self, error: PenstockError) -> None:
        """Close the connection: the next server may be at another address. A refusal is reported."""
        if self._guest:
            self._supervisor.goes_on = False  # nobody knows
            if self._saw_end:  # the server went with the run
                self._supervisor.leave()
        if self._connection is not None:
            self._connection.close()
            if isinstance(error, ConfigError):
                self._say(error)
        self._connection = None

    def _say(self, error: PenstockError) -> None:
        """Report what keeps `queues scale` from working, unless that was the last thing reported."""
        if str(error) != self._said:
            self._said = str(error)
            self._report(Report("run", "run", f"`queues scale` does not reach this run: {error}"))
