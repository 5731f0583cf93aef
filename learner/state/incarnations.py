"""One learner at a time, and who came after whom.

A start of the learner takes the lock on the run's folder, then claims the next incarnation with a
file that says from where it goes on. A resume follows this chain of claims, never the highest step:
what an old incarnation appends after it was superseded is not part of the run.
"""

import json
import os
import uuid
from contextlib import AbstractContextManager
from dataclasses import asdict

from penstock.common.errors import ConfigError, RunTaken
from penstock.common.failpoint import failpoint
from penstock.common.files.atomic import make_folder, sync_folder, write_whole
from penstock.common.files.lock import hold_lock, holder_name
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Claim, Position, ancestors, read_claims
from penstock.common.journal.segments import explain_gap, left_out, valid_length


def lock_run(run_folder: RunFolder) -> AbstractContextManager[list[str]]:
    """Hold the run's folder as its learner; raises RunTaken naming the process that does.

    Gives the names of the learners that held it before.
    """
    return hold_lock(run_folder.learner_lock, "learner")


def read_nonce(run_folder: RunFolder) -> str:
    """The number that ties the folder to its run in Redis; made at the first start."""
    path = run_folder.nonce
    if not path.is_file():
        write_whole(path, uuid.uuid4().hex.encode())
    return path.read_text()


def next_incarnation(run_folder: RunFolder, redis_incarnation: int) -> int:
    """The number after the largest that folder and Redis know."""
    return max([redis_incarnation, *read_claims(run_folder)]) + 1


def claim_incarnation(folder: LearnerFolder, checkpointed: Position | None = None) -> Claim:
    """Take the number that Redis gave, on the folder; raises RunTaken, ConfigError.

    Redis is claimed first: from there on the learner before can acknowledge nothing, so that whatever
    it still appends to its journal may count or not. Exactly that number is taken, and none if a later
    one is there: a learner that was stopped between the two would cut off its successor's journal.
    `checkpointed` is the newest checkpoint's position: damage of the journal before it does no harm.
    """
    folder.check_not_superseded()
    claims = read_claims(folder)
    parent = max(claims, default=0)
    ancestors(folder, claims, parent)
    start = checkpointed.offset if checkpointed and checkpointed.incarnation == parent else 0
    length = valid_length(folder, parent, start)
    rest = left_out(folder, parent, length)
    if rest is not None and not rest.torn:
        raise ConfigError(
            f"{explain_gap(folder, parent, length)}. To give up what follows, {rest.length} bytes: "
            f"truncate -s {rest.offset} {rest.path}, and delete the files of that incarnation after it"
        )
    claim = Claim(
        incarnation=folder.incarnation,
        parent=parent,
        parent_length=length,
        holder=holder_name(),
    )
    path = folder.claim(claim.incarnation)
    make_folder(path.parent)
    aside = path.with_suffix(f".{os.getpid()}")
    write_whole(aside, json.dumps(asdict(claim)).encode())
    try:
        os.link(aside, path)  # unlike a rename, refuses to replace another learner's claim
    except FileExistsError as error:
        raise RunTaken(f"another learner claimed incarnation {claim.incarnation} first") from error
    finally:
        aside.unlink()
    failpoint("claims.linked")
    sync_folder(path.parent)
    return claim
