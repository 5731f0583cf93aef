"""The proof that an engine has loaded weights as the learner has them.

A hash shows that the file is right, and not that the engine loaded it right: a layer that was left out,
or loaded into another layer's place, changes no hash.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np

from penstock.actors.engine import Engine, PromptRefused
from penstock.common.config.settings import ActorSettings
from penstock.common.log import get_logger
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Probe

_LIMITS = {"float32": 0.01, "bfloat16": 0.1}

_numbers = count()

log = get_logger(__name__)


def probe_limit(settings: ActorSettings, contract: Contract) -> float:
    """Return the mean difference that an engine's log-probabilities may have from the learner's.

    This is ACTOR_PROBE_LIMIT, or that of the coarser precision of learner and actor. 0: any.
    """
    if settings.probe_limit != "auto":
        return settings.probe_limit
    return max(_LIMITS.get(dtype, 0.1) for dtype in (contract.dtype, settings.dtype or contract.dtype))


async def mean_difference(engine: Engine, probes: Sequence[Probe]) -> float:
    """Return the mean of |engine - learner| log-probability over all tokens of the probes, in nats.

    It is 0 without probes. A probe that the engine refuses, such as for its length, is logged and left
    out. Raise EngineFailed if the engine fails.
    """
    differences = [np.zeros(0)]
    for probe in probes:
        try:
            scored = await engine.score(f"probe-{next(_numbers)}", probe.token_ids)
        except PromptRefused as error:
            log.warning("A probe of the weights was left out.", cause=str(error))
            continue
        differences.append(np.abs(scored - probe.logprobs))
    found = np.concatenate(differences)
    return float(found.mean()) if len(found) else 0.0
