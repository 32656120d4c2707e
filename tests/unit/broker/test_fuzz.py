"""Frames that mean almost something, against a live broker."""

from __future__ import annotations

import asyncio
import random
import struct
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from headrace_broker import wire
from headrace_broker.dispatch import APIS
from headrace_broker.errors import Code
from headrace_broker.protocol.versions import RequestHeader
from tests.support.record_batches import batch, corrupted, patched
from tests.support.seeds import draw_seed
from tests.unit.broker.conftest import Live, Run

ROUNDS = 400
EDGES = (0, 1, -1, 2, 7, 127, -128)
_BITS = {wire.Int8: 8, wire.Int16: 16, wire.Int32: 32, wire.Int64: 64}


class Frames:
    """Random requests of every API: well-formed ones with odd values, and damaged ones."""

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
    """A few frames on a connection, not always read, not always to the end."""
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


async def test_a_live_broker_survives_anything(run: Run) -> None:
    seed = draw_seed()
    frames = Frames(seed)
    async with run(partitions_max=50, groups_max=50) as live:
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
