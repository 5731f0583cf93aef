"""Whether the run's folder is the newest one: the run may have gone on in a copy of it."""

import socket

from penstock.common.broker.run_view import RunView
from penstock.common.errors import ConfigError, MalformedMessage, OtherRelease
from penstock.common.files.run_folder import RunFolder
from penstock.common.journal.claims import read_claims
from penstock.common.journal.segments import list_segments
from penstock.common.log import get_logger
from penstock.common.text import short
from penstock.common.wire.codec import decode
from penstock.common.wire.contract import Contract
from penstock.learner.state.incarnations import FENCE_JUMP

log = get_logger(__name__)


def name_of(folder: RunFolder) -> str:
    """Return how a run's folder is named on the queue server, for people: HOST:PATH."""
    return f"{socket.gethostname()}:{folder.path.resolve()}"


def may_run_elsewhere(folder: RunFolder, view: RunView) -> bool:
    """Return whether the run went on in another folder, of which this one may be a copy.

    The copy of its lock's file names a learner that may live. Raise ServerUnavailable.
    """
    *_, other = view.newest_folder()
    return other not in ("", name_of(folder))


def check_not_older(folder: RunFolder, view: RunView) -> None:
    """Raise ConfigError if the run went on in another folder, of which this one is an older copy.

    The queue server knows the last claim that was written to the run's folder, by which process, and how
    much of its journal was acknowledged. A server that knows nothing, as it was emptied, is logged.
    Numbers that no learner wrote are ignored. Raise ConfigError too for a damaged claim, or
    ServerUnavailable.
    """
    incarnation, length, claimant, other = view.newest_folder()
    claims = read_claims(folder)  # later: the file of a claim is written before the server knows it
    if not incarnation or incarnation > max(claims, default=0) + FENCE_JUMP:
        if claims:
            log.info(
                "The queue server does not know how far the run came: an older copy would not show."
            )
        return
    there = max((segment.end for segment in list_segments(folder, incarnation)), default=0)
    if incarnation not in claims:
        lack = f"lacks the file of incarnation {incarnation} in {folder.claims}"
    elif claimant not in ("", claims[incarnation].holder):
        lack = f"has another claim of incarnation {incarnation} than that of {short(claimant)}"
    elif there < length:
        lack = f"has {there} of the {length} bytes that incarnation {incarnation} wrote to its journal"
    else:
        return
    here = name_of(folder)
    went = "" if other == here else f"The run went on in {short(other, 500)}: start the learner there. "
    raise ConfigError(
        f"{here} is an older copy, or was cut: it {lack}. {went}To give up what "
        "was trained since, and go on from here, stop all processes of the run and type `queues discard "
        f"--run.name {folder.path.name} --yes` first"
    )


def check_release(view: RunView) -> None:
    """Raise OtherRelease if the server holds open tickets of another wire schema than this release's.

    Their groups could not be read. A contract that no learner wrote is none: the learner replaces it.
    Raise ServerUnavailable or another error of Connection.execute.
    """
    data = view.contract()
    try:
        if data is not None:
            decode(data, Contract)
    except OtherRelease as error:
        if count := view.open_tickets():
            raise OtherRelease(
                f"{error}, and {count} of its tickets are open. Let that release end the run. Or end "
                "its processes with Ctrl-C, so that the learner writes a checkpoint, and type `queues "
                "discard --yes` with --run.name: what lies on the server is sampled again"
            ) from error
    except MalformedMessage:  # written by another client: the learner publishes its own
        pass
