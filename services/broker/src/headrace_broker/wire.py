"""Codec of Kafka's wire format: big-endian numbers, and strings, bytes and arrays that begin with a length.

A message is a `NamedTuple` with the wire types below as annotations, so that its definition resembles the protocol
guide (https://kafka.apache.org/protocol). `codec(Message, form)` compiles the annotations once for each version's
encoding (`Form`). Fields with `Since` a later version are left out. In a flexible version, lengths are varints, and
tagged fields follow.
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
"""Maximum number of array items in one message, because a few bytes on the wire become a hundred in memory."""


class WireReader:
    """Cursor over the bytes of a message. Reading past the end raises `Malformed`."""

    __slots__ = ("_at", "_data", "_items_left")

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._items_left = ITEMS_MAX

    @property
    def unread_bytes(self) -> int:
        """Number of bytes that were not read yet."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        """Read `size` bytes."""
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise Malformed(f"a field of {size} bytes at {self._at}, but {self.unread_bytes} bytes are left")
        data = self._data[self._at : end]
        self._at = end
        return data

    def count(self, items: int) -> int:
        """Check and return the length of an array before memory is allocated for it."""
        if not 0 <= items <= min(self.unread_bytes, self._items_left):  # every item takes at least one byte
            raise Malformed(f"an array of {items} items, but {self.unread_bytes} bytes are left")
        self._items_left -= items
        return items


class Form(NamedTuple):
    """Encoding of one version of a message. In a `flexible` version, lengths are varints, and tagged fields follow."""

    version: int = 0
    flexible: bool = False


PLAIN = Form()


class Since(NamedTuple):
    """Annotation of a field that exists since `version`. In messages of earlier versions it has the value `default`."""

    version: int
    default: Any


class Codec(Generic[T]):
    """Encoder and decoder of one wire type."""

    def read(self, source: WireReader) -> T:
        raise NotImplementedError

    def write(self, sink: bytearray, value: T) -> None:
        raise NotImplementedError


class _Number(Codec[int]):
    def __init__(self, layout: str) -> None:
        self._struct = struct.Struct(layout)

    def read(self, source: WireReader) -> int:
        value: int = self._struct.unpack(source.take(self._struct.size))[0]
        return value

    def write(self, sink: bytearray, value: int) -> None:
        sink += self._struct.pack(value)


class _Varint(Codec[int]):
    """An unsigned varint of at most five bytes."""

    def read(self, source: WireReader) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = source.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise Malformed("a varint has more than five bytes")

    def write(self, sink: bytearray, value: int) -> None:
        while value >= 0x80:
            sink.append(value & 0x7F | 0x80)
            value >>= 7
        sink.append(value)


_VARINT = _Varint()


class _CompactLength(Codec[int]):
    """Length in a flexible version. It is stored plus one, so that null (-1) is 0."""

    def read(self, source: WireReader) -> int:
        return _VARINT.read(source) - 1

    def write(self, sink: bytearray, value: int) -> None:
        _VARINT.write(sink, value + 1)


_INT16 = _Number(">h")
_INT32 = _Number(">i")
_COMPACT = _CompactLength()


class _Nullable(Codec[T | None]):
    """Base of values that follow their length. The length -1 means null, which is malformed if the value is
    `required`."""

    def __init__(self, length: Codec[int], *, required: bool) -> None:
        self._length = length
        self._required = required

    def read(self, source: WireReader) -> T | None:
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
    """View of bytes in the received frame, without a copy."""

    def _value(self, data: memoryview) -> memoryview:
        return data

    def _data(self, value: memoryview | bytes) -> memoryview | bytes:
        return value


class _Array(Codec[tuple[Any, ...] | None]):
    def __init__(self, item: Codec[Any], length: Codec[int], *, required: bool) -> None:
        self._item = item
        self._length = length
        self._required = required

    def read(self, source: WireReader) -> tuple[Any, ...] | None:
        count = self._length.read(source)
        if count == -1 and not self._required:
            return None
        read = self._item.read
        return tuple([read(source) for _ in range(source.count(count))])

    def write(self, sink: bytearray, value: tuple[Any, ...] | None) -> None:
        self._length.write(sink, -1 if value is None else len(value))
        for item in value or ():
            self._item.write(sink, item)


class _Absent(Codec[Any]):
    """Field that does not exist in this version. It is not encoded, and decoding returns its default."""

    def __init__(self, default: Any) -> None:
        self._default = default

    def read(self, source: WireReader) -> Any:
        return self._default

    def write(self, sink: bytearray, value: Any) -> None:
        pass


class _Struct(Codec[M]):
    def __init__(self, message: type[M], form: Form) -> None:
        hints = get_type_hints(message, include_extras=True)
        self._message = message
        self._flexible = form.flexible
        self._fields = [_codec_of(hints[name], form) for name in message._fields]

    def read(self, source: WireReader) -> M:
        value = self._message._make([field.read(source) for field in self._fields])
        if self._flexible:
            skip_tagged(source)
        return value

    def write(self, sink: bytearray, value: M) -> None:
        for field, item in zip(self._fields, value, strict=True):
            field.write(sink, item)
        if self._flexible:
            sink.append(0)


Bool = Annotated[bool, _Number(">?")]
Int8 = Annotated[int, _Number(">b")]
Int16 = Annotated[int, _INT16]
Int32 = Annotated[int, _INT32]
Int64 = Annotated[int, _Number(">q")]
String = Annotated[str, _Text(_INT16, required=True), _Text(_COMPACT, required=True)]
NullableString = Annotated[str | None, _Text(_INT16, required=False), _Text(_COMPACT, required=False)]
Bytes = Annotated[bytes, _Blob(_INT32, required=True), _Blob(_COMPACT, required=True)]
Records = Annotated[memoryview | bytes | None, _View(_INT32, required=False), _View(_COMPACT, required=False)]


def codec(message: type[M], form: Form = PLAIN) -> Codec[M]:
    """Return the codec of a message class for one encoding. It is compiled once."""
    return _compiled(message, form)


@cache
def _compiled(message: type[Any], form: Form) -> _Struct[Any]:
    return _Struct(message, form)


def decode(message: type[M], source: WireReader, form: Form = PLAIN) -> M:
    """Decode a message. Raises `Malformed`, also if bytes remain."""
    value = codec(message, form).read(source)
    if source.unread_bytes:
        raise Malformed(f"{source.unread_bytes} bytes remain after {message.__name__}")
    return value


def encode(value: M, sink: bytearray | None = None, form: Form = PLAIN) -> bytearray:
    """Encode a message, append it to `sink` (by default a new bytearray), and return `sink`."""
    sink = bytearray() if sink is None else sink
    codec(type(value), form).write(sink, value)
    return sink


def skip_tagged(source: WireReader) -> None:
    """Skip tagged fields, which future brokers and clients may add without a new version."""
    for _ in range(source.count(_VARINT.read(source))):
        _VARINT.read(source)
        source.take(_VARINT.read(source))


def _codec_of(annotation: Any, form: Form) -> Codec[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        since = next((mark for mark in arguments[1:] if isinstance(mark, Since)), None)
        if since is not None and form.version < since.version:
            return _Absent(since.default)
        codecs = [mark for mark in arguments[1:] if isinstance(mark, Codec)]
        return codecs[-1 if form.flexible else 0] if codecs else _codec_of(arguments[0], form)
    length: Codec[int] = _COMPACT if form.flexible else _INT32
    if origin is tuple:
        return _Array(_codec_of(arguments[0], form), length, required=True)
    if origin in (Union, UnionType) and NoneType in arguments:
        return _Array(_codec_of(get_args(arguments[0])[0], form), length, required=False)
    return codec(annotation, form)
