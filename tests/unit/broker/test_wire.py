"""Tests of the Kafka codec: comparison with the message classes of aiokafka, round trips, and malformed frames.

Hypothesis strategies build messages from the type annotations of the message classes. A live broker gets malformed
frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import sys
from functools import cache
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
from aiokafka.protocol.api import RequestStruct
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_broker import wire
from headrace_broker.dispatch import APIS, ApiSpec, api_versions_response, parse
from headrace_broker.errors import Code, Malformed
from headrace_broker.protocol.groups import OffsetFetchRequest, OffsetFetchTopic
from headrace_broker.protocol.metadata import RequestHeader
from headrace_broker.wire import Form, WireReader, decode, encode
from tests.support.presence import draw_seed
from tests.support.wire_client import batch, corrupted, patched
from tests.unit.broker.conftest import Live, Run

TEXT = st.text(max_size=12)
BYTES = st.binary(max_size=12)
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    wire.Bool: st.booleans(),
    wire.Int8: st.integers(-(1 << 7), (1 << 7) - 1),
    wire.Int16: st.integers(-(1 << 15), (1 << 15) - 1),
    wire.Int32: st.integers(-(1 << 31), (1 << 31) - 1),
    wire.Int64: st.integers(-(1 << 63), (1 << 63) - 1),
    wire.String: TEXT,
    wire.NullableString: st.none() | TEXT,
    wire.Bytes: BYTES,
    wire.Records: st.none() | BYTES,
}


def response_of(request: type[Any]) -> type[Any]:
    """Return the response class of a request class."""
    response: type[Any] = getattr(sys.modules[request.__module__], request.__name__.replace("Request", "Response"))
    return response


REQUESTS = tuple(api.request for api in APIS)
RESPONSES = tuple(response_of(request) for request in REQUESTS)


_strategies: dict[Any, st.SearchStrategy[Any]] = {}


def messages(message: type[Any]) -> st.SearchStrategy[Any]:
    """Return a cached strategy for any value of the class `message`."""
    if message not in _strategies:
        hints = get_type_hints(message, include_extras=True)  # every field is there, as in the newest version
        _strategies[message] = st.builds(message, *[_field(hints[name]) for name in message._fields])
    return _strategies[message]


def _field(annotation: Any) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bare = [mark for mark in arguments[1:] if not isinstance(mark, wire.Since)]
        return _VALUES[Annotated[arguments[0], *bare]] if bare else _field(arguments[0])
    if origin is tuple:
        return st.lists(_field(arguments[0]), max_size=3).map(tuple)
    if origin in (Union, UnionType):
        return st.none() | _field(arguments[0])
    return messages(annotation)


NEWEST = 100
FEW = settings(max_examples=12)
MODULES = ("admin", "commit", "coordination", "fetch", "group", "metadata", "offset", "produce", "transaction")


@cache
def _aiokafka_classes() -> dict[tuple[int, int], type[Any]]:
    """Return the request classes of aiokafka by API key and version."""
    modules = [import_module(f"aiokafka.protocol.{name}") for name in MODULES]
    classes: list[Any] = [item for module in modules for item in vars(module).values() if isinstance(item, type)]
    return {
        (item.API_KEY, item.API_VERSION): item
        for item in classes
        if issubclass(item, RequestStruct) and hasattr(item, "API_KEY")
    }


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
@given(data=st.data())
@FEW
def test_bytes_are_those_of_aiokafka(api: ApiSpec, data: st.DataObject) -> None:
    reference = _aiokafka_classes().get((api.key, api.version))
    if api.name == "CreatePartitions":
        pytest.skip("the same bytes, but aiokafka nests the arguments in another way")
    if reference is None:
        pytest.skip(f"aiokafka has no {api.name} {api.version}")
    form = api.form(api.version)
    if form.flexible:
        pytest.skip("aiokafka's flexible messages want tagged fields among their arguments")
    request = data.draw(messages(api.request))
    assert bytes(encode(request, form=form)) == reference(*request).encode()
    response = data.draw(messages(response_of(api.request)))
    assert bytes(encode(response, form=form)) == reference.RESPONSE_TYPE(*response).encode()


def test_most_apis_have_that_oracle() -> None:
    assert len([api for api in APIS if (api.key, api.version) in _aiokafka_classes()]) >= 20


@pytest.mark.parametrize("flexible", [False, True])
@pytest.mark.parametrize("message", [*REQUESTS, *RESPONSES], ids=lambda message: message.__name__)
@given(data=st.data())
@FEW
def test_round_trip(message: type[Any], flexible: bool, data: st.DataObject) -> None:
    value = data.draw(messages(message))
    form = Form(NEWEST, flexible)
    assert decode(message, WireReader(bytes(encode(value, form=form))), form) == value


@pytest.mark.parametrize("flexible", [False, True])
@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: message.__name__)
@given(data=st.data())
@FEW
def test_a_request_that_is_cut_or_too_long_is_malformed(
    message: type[Any], flexible: bool, data: st.DataObject
) -> None:
    form = Form(NEWEST, flexible)
    encoded = bytes(encode(data.draw(messages(message)), form=form))
    with pytest.raises(Malformed):
        decode(message, WireReader(encoded + b"\0"), form)
    if encoded:
        with pytest.raises(Malformed):
            decode(message, WireReader(encoded[: data.draw(st.integers(0, len(encoded) - 1))]), form)


def test_a_version_has_the_fields_of_its_time() -> None:
    """Compare OffsetFetch requests with hand-written bytes that follow the protocol guide.

    Version 7 has the flexible encoding and `require_stable`; version 3 has neither.
    """
    request = OffsetFetchRequest("g", (OffsetFetchTopic("t", (5,)),), require_stable=True)
    flexible = b"\x02g\x02\x02t\x02\x00\x00\x00\x05\x00\x01\x00"
    assert bytes(encode(request, form=Form(7, flexible=True))) == flexible
    plain = b"\x00\x01g\x00\x00\x00\x01\x00\x01t\x00\x00\x00\x01\x00\x00\x00\x05"
    assert bytes(encode(request, form=Form(3))) == plain
    assert decode(OffsetFetchRequest, WireReader(plain), Form(3)) == request._replace(require_stable=False)


def test_tagged_fields_are_read_over() -> None:
    body = b"\x02g\x01\x01\x02\x07\x03abc\x80\x01\x00"
    assert decode(OffsetFetchRequest, WireReader(body), Form(7, flexible=True)) == OffsetFetchRequest("g", (), True)


@given(key=st.sampled_from([api.key for api in APIS]), body=st.binary(max_size=200))
@settings(max_examples=500)
def test_no_bytes_do_more_than_be_malformed(key: int, body: bytes) -> None:
    version = next(api.version for api in APIS if api.key == key)
    frame = bytes(encode(RequestHeader(key, version, 1, None))) + body
    with contextlib.suppress(Malformed):
        assert parse(frame).api is not None


def test_an_array_cannot_ask_for_memory_that_was_not_sent() -> None:
    frame = bytes(encode(RequestHeader(3, 4, 1, None))) + struct.pack(">i", 2**31 - 1) + b"\0\0"
    with pytest.raises(Malformed, match="array"):
        parse(frame)


def test_text_must_be_utf8() -> None:
    frame = struct.pack(">hhih", 3, 4, 1, 2) + b"\xff\xfe"
    with pytest.raises(Malformed, match="UTF-8"):
        parse(frame)


def test_announced_ranges_end_at_the_version_served() -> None:
    ranges = {entry.api_key: entry for entry in api_versions_response(Code.NONE).api_keys}
    assert {key: entry.max_version for key, entry in ranges.items()} == {api.key: api.version for api in APIS}
    old_librdkafka = {0: 3, 1: 4, 2: 1, 8: 2, 9: 1, 10: 0, 11: 0, 12: 0, 13: 0, 14: 0, 17: 0}
    lowered = {key: entry.min_version for key, entry in ranges.items() if entry.min_version != entry.max_version}
    supported_versions = {api.key: api.supported_versions.start for api in APIS if len(api.supported_versions) > 1}
    assert lowered == old_librdkafka | supported_versions


ROUNDS = 400
EDGES = (0, 1, -1, 2, 7, 127, -128)
_BITS = {wire.Int8: 8, wire.Int16: 16, wire.Int32: 32, wire.Int64: 64}


class Frames:
    """Generator of random requests of every API: well-formed requests with unusual values, and damaged requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def frame(self) -> bytes:
        api = self.random.choice(APIS)
        frame = wire.encode(RequestHeader(api.key, api.version, self.random.getrandbits(31), "fuzz"))
        wire.encode(self._message(api.request), frame)
        return self._damaged(bytes(frame)) if self.random.random() < 0.5 else bytes(frame)

    def _message(self, message: type[Any]) -> Any:
        hints = get_type_hints(message, include_extras=True)
        return message(*[self._value(hints[name]) for name in message._fields])

    def _value(self, kind: Any) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if origin is tuple:
            return tuple(self._value(arguments[0]) for _ in range(self.random.randrange(3)))
        if origin in (Union, UnionType):
            return None if self.random.random() < 0.2 else self._value(arguments[0])
        if origin is not Annotated:
            return self._message(kind)
        if kind in _BITS:
            return self._number(_BITS[kind])
        if kind is wire.Bool:
            return self.random.random() < 0.5
        if kind is wire.Records:
            return self._records()
        if kind is wire.Bytes:
            return self.random.randbytes(self.random.randrange(20))
        return self.random.choice(["", "fuzzed", "fuzzed-2", "x" * 300, "ü", "group", "a.b"])

    def _number(self, bits: int) -> int:
        high = (1 << bits - 1) - 1
        return self.random.choice([*EDGES, high, -high - 1, self.random.randint(-high - 1, high)])

    def _records(self) -> bytes:
        good = batch([(b"k", b"v"), (None, None)], compression=self.random.randrange(5))
        field = self.random.choice(
            ["attributes", "count", "last_offset_delta", "producer_id", "epoch", "sequence", "max_timestamp"]
        )
        return self.random.choice([good, corrupted(good), good[:70], patched(good, **{field: self._number(16)}), b""])

    def _damaged(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        match self.random.randrange(4):
            case 0:
                del data[self.random.randrange(len(data)) :]
            case 1:
                data += self.random.randbytes(self.random.randrange(1, 20))
            case 2:
                for _ in range(self.random.randrange(1, 6)):
                    data[self.random.randrange(8, len(data))] = self.random.randrange(256)
            case _:
                at = self.random.randrange(8, len(data))
                data[at : at + 4] = struct.pack(">i", self.random.choice([-1, -2, 2**31 - 1, -(2**31), 65_536]))
        return bytes(data)


async def _send_frames(live: Live, frames: Frames) -> None:
    """Send up to four frames on a connection, some of them truncated, and read only some of the responses."""
    async with live.client() as client:
        for _ in range(frames.random.randrange(1, 5)):
            frame = frames.frame()
            size = len(frame) if frames.random.random() < 0.95 else frames.random.getrandbits(32) - (1 << 31)
            client.writer.write(struct.pack(">i", size) + frame)
        if frames.random.random() < 0.7:
            try:
                async with asyncio.timeout(0.05):
                    while True:
                        await client.receive_raw()
            except (EOFError, OSError):
                pass


async def test_a_live_broker_survives_anything(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = draw_seed()
    frames = Frames(seed)
    monkeypatch.setattr("headrace_broker.coordinator.GROUPS_MAX", 50)
    monkeypatch.setattr("headrace_broker.app.PARTITIONS_MAX", 50)
    async with run() as live:
        topic = await live.create("steady")
        async with live.client() as steady:
            for number in range(ROUNDS // 20):
                await asyncio.gather(*[_send_frames(live, frames) for _ in range(20)])
                assert await steady.produce(topic, batch()) == (Code.NONE, number)
            stats = live.broker.stats
            assert stats.handler_failures == 0
            assert not live.broker.writer.failed.done()
            async with asyncio.timeout(10):
                while stats.connections > 1 or live.server.request_bytes:  # noqa: ASYNC110 (there is no event for it)
                    await asyncio.sleep(0.01)
            assert live.broker.fetch_memory.used == 0
            assert await steady.base_offsets(topic) == list(range(ROUNDS // 20))
            assert stats.malformed > 20
            assert sum(stats.requests.values()) > 100
