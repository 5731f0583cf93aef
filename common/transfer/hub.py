"""Errors of a hub of models and data sets that may end by themselves."""

from penstock.common.errors import ServerUnavailable

_BUSY = (408, 429)
_CUT = "Consistency check failed"
"""huggingface_hub's text for a file that ended too early."""


def outage_of(error: BaseException, asked: str) -> ServerUnavailable | None:
    """Return the error to raise if a hub is away, busy, broken or cut off; None for another `error`.

    `asked` names the setting. The causes of the error count too, a status more than what followed it.
    """
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    answers = [found for one in chain if (found := getattr(one, "response", None)) is not None]
    kinds = (HTTPError, ConnectionError, TimeoutError)  # hf_xet, for large files, raises the second
    away = any(isinstance(one, kinds) or _CUT in str(one) for one in chain)
    if answers:
        away = any(one.status_code in _BUSY or one.status_code >= 500 for one in answers)
    if not away or any(isinstance(one, OfflineModeIsEnabled) for one in chain):
        return None  # that is the user's wish
    return ServerUnavailable(f"{asked}: the hub cannot be reached, or its answer was cut off: {error}")
