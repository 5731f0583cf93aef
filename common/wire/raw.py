"""Plain data as msgpack and back, without checks. The one module that imports msgpack.

codec.py checks what comes from other processes; the sandbox sends requests to its own processes.
"""

from typing import Any, Literal, cast

import msgpack


def pack_raw(value: Any, lone_surrogates: Literal["backslashreplace", "surrogatepass"]) -> bytes:
    """Return plain data as msgpack; tuples become lists.

    `lone_surrogates` escapes or keeps half characters in texts. Raise ValueError, TypeError or
    OverflowError for a value that msgpack has no form for.
    """
    return cast(bytes, msgpack.packb(value, use_bin_type=True, unicode_errors=lone_surrogates))


def unpack_raw(data: bytes, **options: Any) -> Any:
    """Return the plain data in msgpack bytes; `options` are those of msgpack.unpackb.

    Raise ValueError for bytes that are not msgpack, and what the options' hooks raise.
    """
    try:
        return msgpack.unpackb(data, raw=False, **options)
    except msgpack.UnpackException as error:
        raise ValueError(str(error) or type(error).__name__) from error
