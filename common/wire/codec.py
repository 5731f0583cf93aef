"""Encoding of messages as bytes: msgpack with raw little-endian arrays. Decoding checks everything.

A message is the list [schema, type name, fields in order]. The dataclasses of messages.py are the
schema: their annotations give the type of each field, and their `__post_init__` checks the relations
between fields. Bytes that do not fit raise MalformedMessage.

Example:
    >>> decode(encode(Verdict("train:7", "dead", "failed 5 times")), Verdict).reason
    'failed 5 times'
"""

import types
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from penstock.common.errors import MalformedMessage
from penstock.common.text import short
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import SCHEMA, Outcome, ScoredGroup, Verdict
from penstock.common.wire.plain import DEEPEST, PlainData, brief, find_fault
from penstock.common.wire.raw import pack_raw, unpack_raw

Message = TypeVar("Message")

_DEEPEST = DEEPEST + 8  # of a message: its user's data have a place within its own fields
_MOST_VALUES = 2**22
"""Most items of lists and maps in one message. Each takes up to 72 bytes of memory, one on the wire."""

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
            f"expected [schema, type, fields], found {brief(envelope)}. {_OTHER_RELEASE}"
        )
    schema, name, body = envelope
    if schema != SCHEMA:
        found = f"found wire schema {brief(schema)}, expected {SCHEMA}"
        raise MalformedMessage(f"{found}: install the same release of penstock everywhere")
    for kind in expected:
        if kind.__name__ == name:
            try:
                return cast(Message, _from_wire(kind, body, name))
            except MalformedMessage as error:
                raise MalformedMessage(f"{error}. {_OTHER_RELEASE}") from error
    names = " or ".join(kind.__name__ for kind in expected)
    raise MalformedMessage(f"expected a {names}, found {brief(name)}. {_OTHER_RELEASE}")


def decode_outcome(data: bytes) -> Outcome:
    """Return the scored group or verdict in the bytes. Raise MalformedMessage if they hold neither."""
    return cast(Outcome, decode(data, ScoredGroup, Verdict))


def pack(value: PlainData) -> bytes:
    """Return plain data as msgpack. Raise MalformedMessage for values that msgpack has no form for.

    A lone surrogate in a text, which no message holds, is escaped.
    """
    try:
        return pack_raw(value, "backslashreplace")
    except (ValueError, TypeError, OverflowError) as error:
        fault = find_fault(value, _DEEPEST) or str(error)
        raise MalformedMessage(f"a message cannot hold this: {fault}") from error


def unpack(data: bytes, most: int = _MOST_VALUES) -> PlainData:
    """Return the plain data in msgpack bytes.

    Raise MalformedMessage for bytes that are not msgpack, a fault that `find_fault` names, extension
    types, a key that is twice in a map, and more than `most` values in lists and maps.
    """
    left = most

    def count(items: int) -> None:
        """Count the items of a list or map. Raise ValueError for too many in all."""
        nonlocal left
        left -= items
        if left < 0:
            raise ValueError(f"found more than {most} values in lists and maps, expected fewer")

    def read_list(items: list[Any]) -> list[Any]:
        """Return the list; its items count towards the limit."""
        count(len(items))
        return items

    def read_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return the map, counted. Raise ValueError if a key is there twice."""
        count(len(pairs))
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a map has a key twice, which no release of penstock writes")
        return made

    longest = min(len(data), most)
    try:
        value = unpack_raw(
            data, list_hook=read_list, object_pairs_hook=read_map, ext_hook=_refuse,
            max_array_len=longest, max_map_len=longest,
        )  # fmt: skip
        fault = find_fault(value, _DEEPEST)
    except (ValueError, TypeError, RecursionError) as error:
        fault = str(error)[:200] or type(error).__name__  # TypeError: a key that cannot be hashed
    if fault:
        raise MalformedMessage(
            f"{len(data)} bytes are not msgpack of plain data: {fault}. {_OTHER_RELEASE}"
        )
    return value


def _refuse(code: int, _: bytes) -> None:
    """Raise ValueError: no message holds an extension type."""
    raise ValueError(f"found msgpack's extension type {code}, expected plain data")


def fields_as(kind: type, value: PlainData, where: str) -> dict[str, Any]:
    """Return a map that has the fields of a dataclass or TypedDict, each converted by its annotation.

    Raise MalformedMessage, which begins with `where`, for a value that is no map, and if a field is
    missing (one with a default too), unknown or of another type.
    """
    types = get_type_hints(kind, include_extras=True)
    found = _checked(isinstance(value, dict), value, "a map", where)
    if set(found) != set(types):
        odd = ", ".join(sorted(map(brief, set(found) ^ set(types))))
        raise MalformedMessage(f"{where}: these fields are missing or unknown: {odd[:200]}")
    return {name: _from_wire(part, found[name], f"{where}.{name}") for name, part in types.items()}


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
    if origin in (tuple, list):
        items = _checked(isinstance(value, list), value, "a list", where)
        return origin(_from_wire(get_args(kind)[0], item, where) for item in items)
    if origin is dict:
        items = _checked(isinstance(value, dict), value, "a map", where).items()
        read_key, read_item = (partial(_from_wire, part) for part in get_args(kind))
        return {
            read_key(key, where): read_item(item, f"{where}.{short(key, 60)}") for key, item in items
        }
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
        raise MalformedMessage(f"{where}: expected {len(specs)} fields, found {brief(value)}")
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
        raise MalformedMessage(f"{where}: found a truth value that is neither 0 nor 1")
    return np.frombuffer(value, dtype=dtype)


def _checked(holds: bool, value: PlainData, expected: str, where: str) -> PlainData:
    """Return the value if the condition holds. Raise MalformedMessage otherwise."""
    if not holds:
        raise MalformedMessage(f"{where}: expected {expected}, found {brief(value)}")
    return value
