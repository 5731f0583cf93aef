"""The device that the learner lends to the actors of its host while it waits for groups."""

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.common.config.role_command import LearnerCommand
from penstock.common.deadline import Deadline
from penstock.common.errors import DeadlineExceeded
from penstock.common.phases import WAITING_FOR_DEVICE, Phases
from penstock.common.shared_device import SharedDevice
from penstock.learner.policy.collective import TrainablePolicy


class DeviceLender:
    """Takes `device` for the learner, and lends it; None: the learner has its own, and calls do nothing.

    A wait for the device is a phase in `phases`, and lasts `limit_s` (RUN_PROGRESS_TIMEOUT_S) at most.
    """

    def __init__(self, device: SharedDevice | None, phases: Phases, limit_s: float) -> None:
        self._device, self._phases, self._limit_s = device, phases, limit_s

    def take(self) -> None:
        """Wait until no actor uses the device, and use it. Raise DeadlineExceeded after `limit_s`."""
        if self._device is None:
            return
        deadline = Deadline(self._limit_s)

        def give_up() -> bool:
            """Return whether the wait is over its limit; tell `phases` that the process is alive."""
            self._phases.poll()
            return deadline.expired()

        with self._phases.enter(WAITING_FOR_DEVICE):
            if not self._device.take(give_up):
                raise DeadlineExceeded(
                    f"the actors of this host have not left the device for {self._limit_s:g} s "
                    "(RUN_PROGRESS_TIMEOUT_S), expected them to sleep once their tickets are sampled: "
                    "see their logs, raise the setting, or set LEARNER_SHARE_DEVICE=false"
                )

    @contextmanager
    def lending(self, policy: TrainablePolicy) -> Iterator[None]:
        """Lend the device during the block, and take it again. `policy` is on the CPU meanwhile.

        After an error in the block the policy stays there, as the process ends. Raise DeadlineExceeded
        if the actors do not leave the device, and the errors of the policy.
        """
        if self._device is None:
            yield
            return
        policy.offload()
        self._device.release()
        yield
        self.take()
        policy.reload()


def make_lender(command: LearnerCommand, phases: Phases) -> DeviceLender:
    """Return the lender of the run's shared device; of none without LEARNER_SHARE_DEVICE.

    Raise ConfigError if the folder of its locks, or a file, cannot be made.
    """
    run = command.run
    shares = command.learner.share_device
    device = SharedDevice(run.folder.device_locks, alone=True) if shares else None
    return DeviceLender(device, phases, run.progress_timeout_s)
