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

    `name` is the value of LEARNER_LOSS: file.py:function or package.module.function. A second call with
    the same name runs nothing and returns the same function. The hash of the file is logged. Raise
    ConfigError if there is no such module or function, if it is a class or does not take two arguments;
    raise also what the module's own code raises. The returned function takes LossTokens and LossOptions
    and returns the loss of each token (N,), 0 for untrained tokens. The returned function raises
    ConfigError if the user's result is not a tensor of floats (N,), or has no gradient although
    tokens.logprobs_N has one.
    """
    source, function_name = split_source(name)
    code = find_code(source, f"LEARNER_LOSS={name}")
    module = import_code(code)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"LEARNER_LOSS={name}: {source} has no function {function_name}; it has "
            f"{public_names(module)}. Name one of these"
        )
    _check_arguments(name, function)
    log.info("The objective is the user's own loss.", function=name, hash=digest_of(code)[:12])

    def checked(tokens: Any, options: Any) -> Tensor:
        """Return the user's loss of each token (N,), 0 for untrained tokens (mask_N False).

        The user's function gets `tokens` (LossTokens) and `options` (LossOptions); its errors pass
        through. Raise ConfigError unless its result is a tensor of floats (N,), with gradient if
        tokens.logprobs_N has one.
        """
        found = function(tokens, options)
        expected = tokens.logprobs_N.shape
        if not (isinstance(found, Tensor) and found.shape == expected and found.is_floating_point()):
            kind = type(found).__name__
            if isinstance(found, Tensor):
                kind = f"a tensor of shape {tuple(found.shape)} and {found.dtype}"
            wanted = f"the function to return a tensor of floats of shape {tuple(expected)}"
            raise ConfigError(f"LEARNER_LOSS={name}: expected {wanted}, found {kind}; change its code")
        if tokens.logprobs_N.requires_grad and not found.requires_grad:
            remedy = "compute it in this function from tokens.logprobs_N, without detach() and no_grad()"
            raise ConfigError(f"LEARNER_LOSS={name}: the loss has no gradient: {remedy}")
        return torch.where(tokens.mask_N, found, 0.0)

    return checked


def _check_arguments(name: str, function: Callable[..., Any]) -> None:
    """Raise ConfigError if `function` is a class, or cannot be called with two arguments by place.

    `name` is the value of LEARNER_LOSS, for the error. The function is not called.
    """
    try:
        inspect.signature(function).bind(None, None)
        fits = not isinstance(function, type)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        found = "this is a class, or cannot be called with two arguments"
        expected = "expected a function f(tokens, options): change the file, or set LEARNER_LOSS anew"
        raise ConfigError(f"LEARNER_LOSS={name}: {found}; {expected}")
