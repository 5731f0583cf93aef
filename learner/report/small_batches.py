"""What the log says of batches with fewer groups than asked for."""

from penstock.common.log import get_logger
from penstock.learner.streams.intake import Arrivals

log = get_logger(__name__)

_IN_A_ROW = 3
_WITHOUT_SPREAD = (
    "most questions are too easy or too hard for the model, or it always answers alike. Raise "
    "LEARNER_TEMPERATURE, take other questions, or raise LEARNER_MAX_RESAMPLE_TIMES, which makes steps "
    "larger and longer."
)
_DIED = "most tickets died, which no setting of the training helps: `queues dead` says why."


class SmallBatches:
    """Counts the groups that each step trained of the `size` asked for, and why others are missing.

    Call `add` once per step, then `describe` and `warn`.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_a_row = 0
        self._last, self._most_died = "", False

    def add(self, trained: int, arrivals: Arrivals) -> None:
        """Count a step that `trained` so many groups.

        `arrivals` are the outcomes since the batch before, without the `trained` groups of this one.
        """
        self._in_a_row = self._in_a_row + 1 if 2 * trained < self._size else 0
        self._last = ""
        if trained >= self._size:
            return
        filtered, dead = len(arrivals.filtered), arrivals.dead
        lost = {"had no spread": filtered, "died": dead, "were stale": arrivals.stale}
        came = trained + sum(lost.values())
        shown = ", ".join(f"{count} of {came} {what}" for what, count in lost.items() if count)
        self._most_died = dead > filtered
        self._last = f"trained {trained} of {self._size} groups ({shown})"

    def describe(self) -> str:
        """Return of the last step a text such as ", trained 19 of 64 groups (189 of 256 had no spread)".

        The text is "" for a full batch.
        """
        return f", {self._last}" if self._last else ""

    def warn(self) -> None:
        """Log advice after each three batches in a row that were under half of their size."""
        if self._in_a_row and self._in_a_row % _IN_A_ROW == 0:
            advice = _DIED if self._most_died else _WITHOUT_SPREAD
            log.warning(
                f"The last {self._in_a_row} steps each trained less than half of a batch, this one "
                f"{self._last}: {advice}"
            )
