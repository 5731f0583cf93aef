"""The proof that an engine has loaded weights as the learner has them.

A hash shows that the file is right, and not that the engine loaded it right: a layer that was left out,
or loaded into another layer's place, changes no hash.
"""

import asyncio
from collections.abc import Sequence
from itertools import count

import numpy as np

from penstock.actors.engine import Engine, PromptRefused
from penstock.common.config.settings import ActorSettings
from penstock.common.errors import ConfigError
from penstock.common.wire.contract import Contract
from penstock.common.wire.messages import Probe

_LIMITS = {"float32": 0.01, "bfloat16": 0.1}

_numbers = count()


def probe_limit(settings: ActorSettings, contract: Contract) -> float:
    """Return the mean difference that an engine's log-probabilities may have from the learner's.

    This is ACTOR_PROBE_LIMIT, or that of the coarser precision of learner and actor. 0: any.
    """
    if settings.probe_limit != "auto":
        return settings.probe_limit
    return max(_LIMITS.get(dtype, 0.1) for dtype in (contract.dtype, settings.dtype or contract.dtype))


async def mean_difference(engine: Engine, probes: Sequence[Probe]) -> float:
    """Return the mean of |engine - learner| log-probability over all tokens of the probes, in nats.

    It is 0 without probes. One that the engine refuses, such as for its length, is left out. Raise
    ConfigError if it refuses all, EngineFailed if it fails.
    """
    scored = await asyncio.gather(
        *(engine.score(f"probe-{next(_numbers)}", probe.token_ids) for probe in probes),
        return_exceptions=True,
    )
    differences, refused = [], ""
    for probe, values in zip(probes, scored, strict=True):
        if isinstance(values, PromptRefused):
            refused = str(values)
        elif isinstance(values, BaseException):
            raise values
        else:
            differences.append(np.abs(values - probe.logprobs))
    if probes and not differences:
        raise ConfigError(
            f"the engine refuses all texts of the weights' probe: {refused}. Correct that, or set "
            "ACTOR_PROBE_LIMIT=0 to use weights without a proof"
        )
    return float(np.concatenate(differences).mean()) if probes else 0.0
