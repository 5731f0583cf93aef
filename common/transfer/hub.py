"""Errors of a hub of models and data sets that may end by themselves."""

from penstock.common.errors import ServerUnavailable


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    return chain


def was_answered(error: BaseException) -> bool:
    """Return whether a hub has answered, with an error: then a name was taken for one of the hub's."""
    return any(getattr(one, "response", None) is not None for one in _chain(error))


def outage_of(error: BaseException, asked: str) -> ServerUnavailable | None:
    """Return the error to raise if a hub is away, busy, broken or cut off; None for another `error`.

    `asked` names the setting. The causes of the error count too, a status more than what followed it.
    """
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    chain = _chain(error)
    kinds = (HTTPError, ConnectionError, TimeoutError)  # hf_xet, for large files, raises the second
    away = any(isinstance(one, kinds) for one in chain)
    found = (getattr(one, "response", None) for one in chain)
    if answers := [one for one in found if one is not None]:
        away = any(one.status_code == 429 or one.status_code >= 500 for one in answers)
    if not away or any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return None
    return ServerUnavailable(f"{asked}: the hub cannot be reached, or its answer was cut off: {error}")
