"""Kafka's non-flexible wire format: big-endian numbers, length-prefixed strings, bytes and arrays.

A message is a `NamedTuple` whose annotations are the wire types below, so that its definition reads like the protocol
guide (https://kafka.apache.org/protocol). `codec(Message)` compiles the annotations once.
"""

from __future__ import annotations

import struct
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from headrace_broker.errors import Malformed

T = TypeVar("T")
M = TypeVar("M", bound=NamedTuple)
ITEMS_MAX = 20_000
"""Array items in one message: a few bytes on the wire are a hundred in memory."""


class Source:
    """Bytes being decoded. Reading past the end raises `Malformed`."""

    __slots__ = ("_at", "_data", "_items_left")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._items_left = ITEMS_MAX

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise Malformed(f"{size} bytes wanted at {self._at}, {self.left} left")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def count(self, items: int) -> int:
        """Check the length of an array before anything is made for it."""
        if not 0 <= items <= min(self.left, self._items_left):  # every item takes a byte at least
            raise Malformed(f"an array of {items} items, {self.left} bytes left")
        self._items_left -= items
        return items


class Codec(Generic[T]):
    """Reads and writes one wire type."""

    def read(self, source: Source) -> T:
        raise NotImplementedError

    def write(self, sink: bytearray, value: T) -> None:
        raise NotImplementedError


class _Number(Codec[int]):
    def __init__(self, layout: str) -> None:
        self._struct = struct.Struct(layout)

    def read(self, source: Source) -> int:
        value: int = self._struct.unpack(source.take(self._struct.size))[0]
        return value

    def write(self, sink: bytearray, value: int) -> None:
        sink += self._struct.pack(value)


_INT16 = _Number(">h")
_INT32 = _Number(">i")


class _Nullable(Codec[T | None]):
    """A length, -1 for null, and that many bytes. With `required`, null is malformed."""

    def __init__(self, length: _Number, *, required: bool) -> None:
        self._length = length
        self._required = required

    def read(self, source: Source) -> T | None:
        size = self._length.read(source)
        if size == -1 and not self._required:
            return None
        return self._value(source.take(size))

    def write(self, sink: bytearray, value: T | None) -> None:
        if value is None:
            self._length.write(sink, -1)
            return
        data = self._data(value)
        self._length.write(sink, len(data))
        sink += data

    def _value(self, data: memoryview) -> T:
        raise NotImplementedError

    def _data(self, value: T) -> bytes | memoryview:
        raise NotImplementedError


class _Text(_Nullable[str]):
    def _value(self, data: memoryview) -> str:
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise Malformed(f"a string is not UTF-8: {error.reason}") from None

    def _data(self, value: str) -> bytes:
        return value.encode()


class _Blob(_Nullable[bytes]):
    def _value(self, data: memoryview) -> bytes:
        return bytes(data)

    def _data(self, value: bytes) -> bytes:
        return value


class _View(_Nullable[memoryview | bytes]):
    """Bytes that stay in the frame that they came in."""

    def _value(self, data: memoryview) -> memoryview:
        return data

    def _data(self, value: memoryview | bytes) -> memoryview | bytes:
        return value


class _Array(Codec[tuple[Any, ...] | None]):
    def __init__(self, item: Codec[Any], *, required: bool) -> None:
        self._item = item
        self._required = required

    def read(self, source: Source) -> tuple[Any, ...] | None:
        count = _INT32.read(source)
        if count == -1 and not self._required:
            return None
        read = self._item.read
        return tuple([read(source) for _ in range(source.count(count))])

    def write(self, sink: bytearray, value: tuple[Any, ...] | None) -> None:
        _INT32.write(sink, -1 if value is None else len(value))
        for item in value or ():
            self._item.write(sink, item)


class _Struct(Codec[M]):
    def __init__(self, message: type[M]) -> None:
        hints = get_type_hints(message, include_extras=True)
        self._message = message
        self._fields = [_codec_of(hints[name]) for name in message._fields]

    def read(self, source: Source) -> M:
        return self._message._make([field.read(source) for field in self._fields])

    def write(self, sink: bytearray, value: M) -> None:
        for field, item in zip(self._fields, value, strict=True):
            field.write(sink, item)


Bool = Annotated[bool, _Number(">?")]
Int8 = Annotated[int, _Number(">b")]
Int16 = Annotated[int, _INT16]
Int32 = Annotated[int, _INT32]
Int64 = Annotated[int, _Number(">q")]
String = Annotated[str, _Text(_INT16, required=True)]
NullableString = Annotated[str | None, _Text(_INT16, required=False)]
Bytes = Annotated[bytes, _Blob(_INT32, required=True)]
Records = Annotated[memoryview | bytes | None, _View(_INT32, required=False)]


def codec(message: type[M]) -> Codec[M]:
    """The codec of a message class."""
    return _compiled(message)


@cache
def _compiled(message: type[Any]) -> _Struct[Any]:
    return _Struct(message)


def decode(message: type[M], source: Source) -> M:
    """Raises `Malformed`, also when bytes are left over."""
    value = codec(message).read(source)
    if source.left:
        raise Malformed(f"{source.left} bytes after {message.__name__}")
    return value


def encode(value: M, sink: bytearray | None = None) -> bytearray:
    """Append the message to `sink` (default: a new one) and return it."""
    sink = bytearray() if sink is None else sink
    codec(type(value)).write(sink, value)
    return sink


def _codec_of(annotation: Any) -> Codec[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found: Codec[Any] = arguments[1]
        return found
    if origin is tuple:
        return _Array(_codec_of(arguments[0]), required=True)
    if origin in (Union, UnionType) and NoneType in arguments:
        return _Array(_codec_of(get_args(arguments[0])[0]), required=False)
    return codec(annotation)
