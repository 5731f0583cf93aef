"""Encoding of messages as bytes: msgpack with raw little-endian arrays. Decoding checks everything.

A message is the list [schema, type name, fields in order]. The dataclasses of messages.py are the
schema: their annotations give the type of each field, and their `__post_init__` checks the relations
between fields. Bytes that do not fit raise MalformedMessage.

Example:
    >>> decode(encode(Verdict("train:7", "dead", "failed 5 times")), Verdict).reason
    'failed 5 times'
"""

import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from penstock.common.errors import MalformedMessage, OtherRelease
from penstock.common.text import short
from penstock.common.wire.ids import TicketId
from penstock.common.wire.messages import SCHEMA, Outcome, ScoredGroup, Verdict
from penstock.common.wire.plain import DEEPEST, PlainData, brief, find_fault
from penstock.common.wire.raw import pack_raw, unpack_raw

Message = TypeVar("Message")

_DEEPEST = DEEPEST + 8  # of a message: its user's data have a place within its own fields
_MOST_VALUES = 2**22
"""Most items of lists and maps in one message. Each takes up to 72 bytes of memory, one on the wire."""

Reader = Callable[[PlainData, str], Any]
"""Converts a value from the wire; the text names its place in errors. Raises MalformedMessage."""

_OTHER_RELEASE = "Install one release of penstock everywhere, or see who else writes to server or file"


def encode(message: object) -> bytes:
    """Return the msgpack bytes of [number of the wire schema, class name, list of the fields in order].

    `message` is a dataclass of messages.py or a Contract. Raise MalformedMessage for a field that
    msgpack has no form for, such as an integer over 64 bits. A lone surrogate in a text is escaped.
    """
    return pack([SCHEMA, type(message).__name__, _to_wire(message)])


def decode(data: bytes, *expected: type[Message]) -> Message:
    """Return the message that `encode` made the bytes of: an object of one of the classes `expected`.

    Raise OtherRelease for a wire schema other than SCHEMA. Raise MalformedMessage for bytes that are no
    message, a class that is not expected, and a field of a wrong type or value.
    """
    envelope = unpack(data)
    if not isinstance(envelope, list) or len(envelope) != 3:
        form = f"a message is {brief(envelope)}, expected [schema, type, fields]"
        raise MalformedMessage(f"{form}. {_OTHER_RELEASE}")
    schema, name, body = envelope
    if schema != SCHEMA:
        found = f"a message has wire schema {brief(schema)}, expected {SCHEMA}"
        raise OtherRelease(f"{found}. {_OTHER_RELEASE}")
    for kind in expected:
        if kind.__name__ == name:
            return cast(Message, _from_wire(kind, body, name))
    names = " or ".join(kind.__name__ for kind in expected)
    raise MalformedMessage(f"a message: expected a {names}, found {brief(name)}. {_OTHER_RELEASE}")


def decode_outcome(data: bytes) -> Outcome:
    """Return the ScoredGroup or Verdict that `encode` has made the bytes of.

    Raise MalformedMessage for other bytes, another wire schema, or a field of a wrong type or value.
    """
    return cast(Outcome, decode(data, ScoredGroup, Verdict))


def pack(value: PlainData) -> bytes:
    """Return None, a truth value, number, text or bytes, or lists and maps of these, as msgpack.

    Tuples become lists. A lone surrogate in a text is replaced by its escape: "\\ud800" is then six
    characters. Raise MalformedMessage for what msgpack has no form for, such as an integer over 64 bits.
    """
    try:
        return pack_raw(value, "backslashreplace")
    except (ValueError, TypeError, OverflowError) as error:
        fault = find_fault(value, _DEEPEST) or str(error)
        raise MalformedMessage(f"a message cannot hold a value: {fault}. Drop its column") from error


def unpack(data: bytes, most: int = _MOST_VALUES) -> PlainData:
    """Return the None, truth value, number, text or bytes, or lists and maps of these, in msgpack bytes.

    Raise MalformedMessage for bytes that are not one whole value of msgpack, over `most` items of all
    lists and entries of all maps together, nesting over 40 levels, a key that is no text or is twice in
    a map, a text that is not UTF-8, and msgpack's extension types.
    """
    left = most

    def count(items: int) -> None:
        """Subtract `items`, the length of a list or map, from `left`, the values that are still allowed.

        Raise ValueError if `left` is below 0 then.
        """
        nonlocal left
        left -= items
        if left < 0:
            raise ValueError(f"a message has more than {most} values in all: use smaller rows")

    def read_list(items: list[Any]) -> list[Any]:
        """Return the same list. Raise ValueError if the bytes have too many items with its own."""
        count(len(items))
        return items

    def read_map(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        """Return the map of the (key, value) `pairs`.

        Raise ValueError if a key is there twice, or the bytes have too many items with these pairs.
        """
        count(len(pairs))
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a map has a key twice, expected once: see who else writes to the server")
        return made

    longest = min(len(data), most)
    try:
        value = unpack_raw(
            data, list_hook=read_list, object_pairs_hook=read_map, ext_hook=_refuse,
            max_array_len=longest, max_map_len=longest,
        )  # fmt: skip
        fault = find_fault(value, _DEEPEST)
    except (ValueError, TypeError, RecursionError) as error:
        fault = str(error)[:200] or type(error).__name__
    if fault:
        found = f"{len(data)} bytes are not msgpack of plain data: {fault}"
        raise MalformedMessage(f"{found}. {_OTHER_RELEASE}")
    return value


def _refuse(code: int, _: bytes) -> None:
    """Raise ValueError, always: `code` is the number of an extension type of msgpack, for the error."""
    raise ValueError(f"extension type {code}, expected plain data: see who else writes to the server")


def fields_as(kind: type, value: PlainData, where: str) -> dict[str, Any]:
    """Return, by name, the fields of a dataclass or TypedDict `kind` from the map `value` of plain data.

    They come in the order of `kind`. Each is converted to its annotated type: a list to a tuple, for
    example. `where` says in errors which map this is. Raise MalformedMessage if `value` is no map, or if
    a field is missing (one with a default too), unknown, or of another type.
    """
    types = get_type_hints(kind, include_extras=True)
    found = _checked(isinstance(value, dict), value, "a map", where)
    if set(found) != set(types):
        odd = ", ".join(sorted(map(brief, set(found) ^ set(types))))[:200]
        raise MalformedMessage(f"{where}: these fields are missing or unknown: {odd}. {_OTHER_RELEASE}")
    return {name: _from_wire(part, found[name], f"{where}.{name}") for name, part in types.items()}


def _to_wire(value: object) -> PlainData:
    """Return a message, or a part of one, as plain data for msgpack.

    An array becomes the bytes of its elements, a dataclass the list of its fields, a tuple a list. The
    values of a list or map are converted too; anything else is returned as it is.
    """
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    kind: type = type(value)
    if names := _field_names(kind):
        return [_to_wire(getattr(value, name)) for name in names]
    if isinstance(value, (list, tuple)):
        return [_to_wire(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_wire(item) for key, item in value.items()}
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of the fields of `kind`, in order; () if it is no dataclass."""
    return tuple(spec.name for spec in fields(kind)) if is_dataclass(kind) else ()


@cache
def _field_readers(kind: type) -> tuple[tuple[str, Reader], ...]:
    """Return (place for errors, what converts it) of each field of the dataclass `kind`, in order."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple((f"{kind.__name__}.{spec.name}", _reader(hints[spec.name])) for spec in fields(kind))


def _from_wire(kind: Any, value: PlainData, where: str) -> Any:
    """Return a field of a message as the annotated type `kind`, such as tuple[int, ...] or a dataclass.

    `value` is the field as msgpack had it: a tuple is a list there, a dataclass the list of its fields,
    an array bytes. `where`, such as "Ticket.sampling", names the field in errors. Every value fits Any.
    An integer fits float; a truth value fits neither. Raise MalformedMessage if `value` does not fit.
    """
    return _reader(kind)(value, where)


@cache
def _reader(kind: Any) -> Reader:
    """Return the function that does what `_from_wire` does for `kind`, found once per type."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value, where: value
    if origin is Annotated:
        return partial(_array, parts[1])
    if origin is Literal:
        return lambda value, where: _checked(value in parts, value, f"one of {parts}", where)
    if origin in (Union, types.UnionType):
        return _optional(parts)
    if origin in (tuple, list):
        return partial(_items, origin, _reader(parts[0]))
    if origin is dict:
        return partial(_map, _reader(parts[0]), _reader(parts[1]))
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(_dataclass, kind)
    if kind is TicketId:
        return lambda value, where: TicketId(_checked(isinstance(value, str), value, "a ticket", where))
    return _number if kind is float else partial(_plain, kind)


def _items(origin: type, read: Reader, value: PlainData, where: str) -> Any:
    """Return the list `value` as the type `origin`, tuple or list, of items that `read` has converted.

    `where` names the place in a message, for errors. Raise MalformedMessage for no list or a wrong item.
    """
    return origin(
        [read(item, where) for item in _checked(isinstance(value, list), value, "a list", where)]
    )


def _map(read_key: Reader, read_item: Reader, value: PlainData, where: str) -> dict[Any, Any]:
    """Return the map `value` with keys and values that `read_key` and `read_item` have converted.

    `where` names the place in a message, for errors. Raise MalformedMessage for no map, or a wrong part.
    """
    items = _checked(isinstance(value, dict), value, "a map", where).items()
    return {read_key(key, where): read_item(item, f"{where}.{short(key, 60)}") for key, item in items}


def _number(value: PlainData, where: str) -> float:
    """Return the number `value` as float. Raise MalformedMessage, naming `where`, for anything else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(_checked(number, value, "a number", where))


def _plain(kind: type, value: PlainData, where: str) -> Any:
    """Return `value`, an object of `kind` such as int or str. True and False are no int.

    Raise MalformedMessage, which names `where`, for any other object.
    """
    matches = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _checked(matches, value, kind.__name__, where)


def _dataclass(kind: type, value: PlainData, where: str) -> Any:
    """Return an object of the dataclass `kind`, whose fields in order are the items of the list `value`.

    `where` names the place in a message, for errors. Raise MalformedMessage if `value` is no list of as
    many items, an item is not of its field's type, or the dataclass refuses the values.
    """
    read = _field_readers(kind)  # here, and not in `_reader`: a rollout has rollouts
    if not isinstance(value, list) or len(value) != len(read):
        _checked(False, value, f"{len(read)} fields", where)
    return kind(*[one(item, place) for (place, one), item in zip(read, value, strict=True)])


def _optional(kinds: tuple[Any, ...]) -> Reader:
    """Return a function that gives None for None, else a value as the one type in `kinds` but None's.

    It raises MalformedMessage for None if `kinds` lacks None's type, and for a value that does not fit.
    """
    (kind,) = (kind for kind in kinds if kind is not type(None))
    read, has_none = _reader(kind), type(None) in kinds

    def read_optional(value: PlainData, where: str) -> Any:
        """Return None or the value converted. `where` names the place in a message, for errors."""
        return _checked(has_none, value, "a value", where) if value is None else read(value, where)

    return read_optional


def _array(dtype: str, value: PlainData, where: str) -> np.ndarray:
    """Return the bytes `value` as a read-only array of one dimension, without a copy.

    `dtype` is numpy's, such as "<i4"; `where` names the place in a message, for errors. Raise
    MalformedMessage for no bytes, a part of an element, and a byte over 1 with the dtype "|b1".
    """
    if not isinstance(value, bytes):
        _checked(False, value, f"the bytes of an array of {dtype}", where)
    if len(value) % np.dtype(dtype).itemsize:
        _checked(False, value, f"a whole number of {dtype} in {len(value)} bytes", where)
    if dtype == "|b1" and value.translate(None, b"\0\1"):
        _checked(False, value, "bytes that are 0 or 1", where)
    return np.frombuffer(value, dtype=dtype)


def _checked(holds: bool, value: PlainData, expected: str, where: str) -> PlainData:
    """Return `value` if `holds`. Raise MalformedMessage otherwise.

    The error says that at `where`, a place in a message or file, `expected` was expected.
    """
    if not holds:
        raise MalformedMessage(f"{where}: expected {expected}, found {brief(value)}. {_OTHER_RELEASE}")
    return value
