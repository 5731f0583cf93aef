"""Plain data as msgpack and back, without checks. The one module that imports msgpack.

codec.py checks what comes from other processes; the sandbox sends requests to its own processes.
"""

from typing import Any, Literal, cast

import msgpack


def pack_raw(value: Any, lone_surrogates: Literal["backslashreplace", "surrogatepass"]) -> bytes:
    """Return `value`, None, numbers, texts, bytes, lists and maps, as msgpack; tuples become lists.

    A half of a character in a text, such as "\\ud800", becomes its six-letter escape with
    "backslashreplace", and stays with "surrogatepass". Raise ValueError, TypeError or OverflowError for
    a value that msgpack has no form for.
    """
    return cast(bytes, msgpack.packb(value, use_bin_type=True, unicode_errors=lone_surrogates))


def unpack_raw(data: bytes, **options: Any) -> Any:
    """Return the one value in msgpack bytes; lists come as lists, and texts are decoded from UTF-8.

    `options` are those of msgpack.unpackb, such as limits and hooks. Raise ValueError for bytes that are
    not one whole msgpack value or over a limit, and for a map's key that is neither text nor bytes;
    raise also what a hook raises.
    """
    try:
        return msgpack.unpackb(data, raw=False, **options)
    except msgpack.UnpackException as error:
        raise ValueError(str(error) or type(error).__name__) from error
