"""The user's own loss: LEARNER_LOSS=file.py:function or package.module.function."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.common.errors import ConfigError
from penstock.common.log import get_logger
from penstock.common.own_code import digest_of, find_code, import_code, public_names, split_source

log = get_logger(__name__)

OwnLoss = Callable[[Any, Any], Tensor]
"""Called with LossTokens and LossOptions; returns the loss of each token, (N,), with gradient."""


@functools.cache
def load_loss(name: str) -> OwnLoss:
    """Run the module that `name` names and return its function, with a check of what it returns.

    The hash of the file is logged. Raise ConfigError if there is no such function or it does not take
    two arguments, and what the module's own code raises. The returned function raises ConfigError if
    its result is not a tensor of floats (N,) with gradient.
    """
    source, function_name = split_source(name)
    code = find_code(source, f"LEARNER_LOSS={name}")
    module = import_code(code)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"LEARNER_LOSS={name}: {source} has no function {function_name}; it has "
            f"{public_names(module)}"
        )
    _check_arguments(name, function)
    log.info("The objective is the user's own loss.", function=name, hash=digest_of(code)[:12])

    def checked(tokens: Any, options: Any) -> Tensor:
        """Return the loss of each token; raise ConfigError unless it is a tensor of floats (N,)."""
        found = function(tokens, options)
        expected = tokens.logprobs_N.shape
        if not (isinstance(found, Tensor) and found.shape == expected and found.is_floating_point()):
            kind = type(found).__name__
            if isinstance(found, Tensor):
                kind = f"a tensor of shape {tuple(found.shape)} and {found.dtype}"
            raise ConfigError(
                f"LEARNER_LOSS={name}: expected the loss of each token, a tensor of shape "
                f"{tuple(expected)} and floats, found {kind}"
            )
        if tokens.logprobs_N.requires_grad and not found.requires_grad:
            raise ConfigError(
                f"LEARNER_LOSS={name}: the loss has no gradient: compute it from tokens.logprobs_N, "
                "without detach() and no_grad()"
            )
        return torch.where(tokens.mask_N, found, 0.0)

    return checked


def _check_arguments(name: str, function: Callable[..., Any]) -> None:
    """Raise ConfigError if a function cannot be called with tokens and options, or is a class."""
    try:
        inspect.signature(function).bind(None, None)
        fits = not isinstance(function, type)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(f"LEARNER_LOSS={name}: expected a function f(tokens, options), found another")
