"""The claims that let one learner at a time write a run, and order the learners by incarnation.

A start of the learner takes the lock on the run's folder, then claims the next incarnation with a file.
The file names the incarnation before and how much of its journal counts, see common/journal/claims.py.
"""

import json
import os
import uuid
from dataclasses import asdict

from penstock.common.errors import RunTaken
from penstock.common.failpoint import failpoint
from penstock.common.files.atomic import make_folder, sync_path, write_whole
from penstock.common.files.lock import holder_name
from penstock.common.files.reading import reading
from penstock.common.files.run_folder import LearnerFolder, RunFolder
from penstock.common.journal.claims import Claim, Position, next_claim, read_claims
from penstock.common.journal.segments import REMEDY

FENCE_JUMP = 1000
"""The most by which a number on the server is above the folder's, as in common/broker/functions.lua."""


def read_nonce(run_folder: RunFolder) -> str:
    """Return the random text that ties the folder to its run on the server; write it if missing.

    The text is the content of the file `nonce`: 32 hexadecimal digits. An existing file's text is
    returned unchecked; raise ConfigError if it is no UTF-8.
    """
    path = run_folder.nonce
    if not path.is_file():
        write_whole(path, uuid.uuid4().hex.encode())
    with reading(path, REMEDY):
        return path.read_text()


def next_incarnation(run_folder: RunFolder, redis_incarnation: int) -> int:
    """Return 1 + the larger of newest claim and server's incarnation. Raise ConfigError for a bad claim.

    `redis_incarnation` is the number on the server, 0 for none. A number that is over FENCE_JUMP (1000)
    above the folder's next is ignored: no learner wrote it, and a claim above such numbers would use up
    all of them. Nothing is written.
    Example: claims 1 and 2, and 4 on the server: 5. The same claims, and 10^15 on the server: 3.
    """
    newest = max(read_claims(run_folder), default=0)
    return max(newest, redis_incarnation if redis_incarnation <= newest + 1 + FENCE_JUMP else 0) + 1


def describe_fence(run_folder: RunFolder, incarnation: int, fence: int) -> str:
    """Return a text for an error: whether a claim in the folder backs `fence`, the server's incarnation.

    `incarnation` is this learner's own, lower one. If the folder has a claim above it, the text names
    the newest of these; otherwise it says that none backs `fence`, and what to do. Raise ConfigError if
    a claim's file is damaged.
    """
    newer = [number for number in read_claims(run_folder) if number > incarnation]
    folder = run_folder.claim(fence).parent
    if newer:
        return f"incarnation {max(newer)} claimed {folder} too, so it is a learner of this run"
    return (
        f"no file in {folder} claims incarnation {fence}: its learner is still starting, or another "
        "client wrote the fence. If no other learner runs, start this one again, which claims anew, "
        "and see who may write to the queue server"
    )


def claim_incarnation(folder: LearnerFolder, checkpointed: Position | None = None) -> Claim:
    """Write the claim of `folder.incarnation` to the folder, sync it, and return it.

    The claim names the incarnation before, and how much of its journal counts. The server was claimed
    before: from then on the learner before can acknowledge nothing, so its later records may count or
    not. Raise RunTaken if this or a later incarnation is claimed here: a learner that was stopped
    between its two claims must not cut off its successor's journal. Raise ConfigError if a claim or the
    journal is damaged, or the folder claims/ cannot be made, OSError if the claim cannot be written.
    Damage of the journal before `checkpointed`, the newest checkpoint's position (None: no checkpoint),
    is ignored: a resume reads only the rest.
    """
    folder.check_not_superseded()
    claim = next_claim(folder, folder.incarnation, holder_name(), checkpointed)
    path = folder.claim(claim.incarnation)
    make_folder(path.parent)
    aside = path.with_suffix(f".{os.getpid()}")
    write_whole(aside, json.dumps(asdict(claim)).encode())
    try:
        os.link(aside, path)  # unlike a rename, refuses to replace another learner's claim
    except FileExistsError as error:
        raise RunTaken(
            f"another learner claimed incarnation {claim.incarnation} of {folder.path} first: stop it, "
            "or choose another RUN_NAME"
        ) from error
    finally:
        aside.unlink()
    failpoint("claims.linked")
    sync_path(path.parent)
    return claim
