"""Kafka's own Java client (the jars of the test node), which agents on the JVM use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support import kafka_node

PROGRAM = Path(__file__).with_name("JavaClient.java")


async def test_topics_producers_transactions_groups(bus: str, unique: str) -> None:
    reason = kafka_node.missing()
    if reason:
        pytest.skip(f"Kafka's jars: {reason}")
    process = await asyncio.create_subprocess_exec(
        "java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        "-cp", f"{kafka_node.JARS}/*", str(PROGRAM), bus, unique,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out.decode().endswith("ok\n"), out.decode()[-3_000:]
