"""Encoding of messages as bytes: msgpack with raw little-endian arrays. Decoding checks everything.

A message is the list [schema, type name, fields in order]. The dataclasses of messages.py are the
schema: their annotations give the type of each field, and their `__post_init__` checks the relations
between fields. Bytes that do not fit raise MalformedMessage.

Example:
    >>> decode(encode(Verdict("train:7", "dead", "failed 5 times")), Verdict).reason
    'failed 5 times'
"""

import reprlib
import types
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from penstock.common.errors import MalformedMessage
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import SCHEMA, Outcome, ScoredGroup, Verdict

Message = TypeVar("Message")
PlainData = Any

_OTHER_RELEASE = "If its sender runs another release of penstock, install the same everywhere"


def encode(message: object) -> bytes:
    """Return a message, a dataclass of messages.py or the contract, as bytes. Raise as `pack` does."""
    return pack([SCHEMA, type(message).__name__, _to_wire(message)])


def decode(data: bytes, *expected: type[Message]) -> Message:
    """Return the message in the bytes.

    Raise MalformedMessage if the bytes are not a message of an expected type and of this wire schema.
    """
    envelope = unpack(data)
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise MalformedMessage(
            f"expected [schema, type, fields], found {_brief(envelope)}. {_OTHER_RELEASE}"
        )
    schema, name, body = envelope
    if schema != SCHEMA:
        found = f"found wire schema {schema}, expected {SCHEMA}"
        raise MalformedMessage(f"{found}: install the same release of penstock everywhere")
    for kind in expected:
        if kind.__name__ == name:
            try:
                return cast(Message, _from_wire(kind, body, name))
            except MalformedMessage as error:
                raise MalformedMessage(f"{error}. {_OTHER_RELEASE}") from error
    names = " or ".join(kind.__name__ for kind in expected)
    raise MalformedMessage(f"expected a {names}, found {_brief(name)}")


def decode_outcome(data: bytes) -> Outcome:
    """Return the scored group or verdict in the bytes. Raise MalformedMessage if they hold neither."""
    return cast(Outcome, decode(data, ScoredGroup, Verdict))


def pack(value: PlainData) -> bytes:
    """Return plain data as msgpack, lone surrogates escaped. Raise msgpack's error for other values."""
    return cast(bytes, msgpack.packb(value, use_bin_type=True, unicode_errors="backslashreplace"))


def unpack(data: bytes) -> PlainData:
    """Return the plain data in msgpack bytes. Raise MalformedMessage if they are not msgpack."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError) as error:  # TypeError: a map key that cannot be hashed
        raise MalformedMessage(f"{len(data)} bytes are not msgpack: {error}") from error


def _to_wire(value: object) -> PlainData:
    """Return a field as plain data: arrays as bytes, dataclasses and tuples as lists."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    if is_dataclass(value):
        return [_to_wire(getattr(value, spec.name)) for spec in fields(value)]
    if isinstance(value, (list, tuple)):
        return [_to_wire(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_wire(item) for key, item in value.items()}
    return value


@cache
def _field_types(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the name and annotation of each field of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((spec.name, hints[spec.name]) for spec in fields(kind))


def _from_wire(kind: Any, value: PlainData, where: str) -> Any:
    """Return plain data as a value of an annotated type. Raise MalformedMessage if it does not fit."""
    origin = get_origin(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _array(get_args(kind)[1], value, where)
    if origin is Literal:
        return _checked(value in get_args(kind), value, f"one of {get_args(kind)}", where)
    if origin in (Union, types.UnionType):
        return _optional(get_args(kind), value, where)
    if origin is tuple:
        items = _checked(isinstance(value, list), value, "a list", where)
        return tuple(_from_wire(get_args(kind)[0], item, where) for item in items)
    if origin is dict:
        items = _checked(isinstance(value, dict), value, "a map", where).items()
        read_key, read_item = (partial(_from_wire, part) for part in get_args(kind))
        return {read_key(key, where): read_item(item, f"{where}.{key}") for key, item in items}
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, where)
    if kind is TicketId:
        return TicketId(_checked(isinstance(value, str), value, "a ticket", where))
    if kind is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(_checked(number, value, "a number", where))
    matches = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _checked(matches, value, kind.__name__, where)


def _dataclass(kind: type, value: PlainData, where: str) -> Any:
    """Return a list of fields as the dataclass `kind`. Raise MalformedMessage if they do not fit."""
    specs = _field_types(kind)
    if not isinstance(value, list) or len(value) != len(specs):
        raise MalformedMessage(f"{where}: expected {len(specs)} fields, found {_brief(value)}")
    named = zip(specs, value, strict=True)
    return kind(*(_from_wire(field_kind, item, f"{where}.{name}") for (name, field_kind), item in named))


def _optional(kinds: tuple[Any, ...], value: PlainData, where: str) -> Any:
    """Return None, or the value as the one other type of a union. Raise MalformedMessage for others."""
    if value is None:
        return _checked(type(None) in kinds, value, "a value", where)
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return _from_wire(kind, value, where)


def _array(dtype: str, value: PlainData, where: str) -> np.ndarray:
    """Return bytes as an array, without a copy. Raise MalformedMessage if they do not fit the dtype."""
    _checked(isinstance(value, bytes), value, f"the bytes of an array of {dtype}", where)
    size = np.dtype(dtype).itemsize
    if len(value) % size:
        raise MalformedMessage(f"{where}: {len(value)} bytes are no whole number of {dtype}")
    if dtype == "|b1" and max(value, default=0) > 1:
        raise MalformedMessage(f"{where}: a truth value is neither 0 nor 1")
    return np.frombuffer(value, dtype=dtype)


def _checked(holds: bool, value: PlainData, expected: str, where: str) -> PlainData:
    """Return the value if the condition holds. Raise MalformedMessage otherwise."""
    if not holds:
        raise MalformedMessage(f"{where}: expected {expected}, found {_brief(value)}")
    return value


def _brief(value: PlainData) -> str:
    """Return the value in at most 60 letters, for errors."""
    text = reprlib.repr(value)  # plain repr fails on a thousand nested lists
    return text if len(text) <= 60 else f"{text[:57]}..."
