"""kcat, which most people look at a bus with (Debian's is librdkafka 2.0.2, an old one)."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest

from tests.contract.bus.conftest import CreateTopic

pytestmark = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")


async def _kcat(*arguments: str, stdin: bytes = b"") -> str:
    process = await asyncio.create_subprocess_exec(
        "kcat",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate(stdin)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_produce_and_read_back(bus: str, topic: str) -> None:
    await _kcat("-b", bus, "-P", "-t", topic, "-K", ":", "-H", "ce_id=1", "-z", "gzip", stdin=b"a:1\nb:2\na:3\n")
    out = await _kcat("-b", bus, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%o %k %s %h\n")
    assert out.splitlines() == ["0 a 1 ce_id=1", "1 b 2 ce_id=1", "2 a 3 ce_id=1"]


async def test_from_an_offset_and_from_a_time(bus: str, topic: str) -> None:
    await _kcat("-b", bus, "-P", "-t", topic, stdin=b"one\ntwo\nthree\n")
    assert (await _kcat("-b", bus, "-C", "-t", topic, "-o", "1", "-e", "-q")).split() == ["two", "three"]
    assert (await _kcat("-b", bus, "-C", "-t", topic, "-o", "-1", "-e", "-q")).split() == ["three"]
    assert (await _kcat("-b", bus, "-C", "-t", topic, "-o", "s@1000", "-e", "-q")).split() == ["one", "two", "three"]
    assert await _kcat("-b", bus, "-Q", "-t", f"{topic}:0:1000") == f"{topic} [0] offset 0\n"


async def test_list(bus: str, create: CreateTopic) -> None:
    topic = await create(partitions=3)
    listed = json.loads(await _kcat("-b", bus, "-L", "-J", "-t", topic))
    assert [len(entry["partitions"]) for entry in listed["topics"]] == [3]
    assert [broker["name"] for broker in listed["brokers"]] == [bus]


async def test_group(bus: str, topic: str, unique: str) -> None:
    await _kcat("-b", bus, "-P", "-t", topic, stdin=b"one\ntwo\n")
    options = ("-b", bus, "-G", unique, "-q", "-X", "auto.offset.reset=earliest", "-c")
    assert (await _kcat(*options, "1", topic)).split() == ["one"]
    assert (await _kcat(*options, "1", topic)).split() == ["two"]
