"""Reward source that prefers polite answers: `python without_sdk.py [HOST:PORT]`. Needs aiokafka and fsspec."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

import fsspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

SOURCE = "polite"


def polite(trajectory: dict[str, Any]) -> float | None:
    """Return 1.0 for a polite answer, else 0.0. None abstains, which differs from 0.0."""
    dialogues = trajectory.get("dialogues") or []
    if not dialogues:
        return None
    answer = str(dialogues[0]["messages"][-1].get("content") or "").lower()
    return 1.0 if "please" in answer or "thank" in answer else 0.0


def reward(trajectory: dict[str, Any]) -> dict[str, Any]:
    """Return the reward event. The event has a value exactly if the outcome is `scored`. A revision that is sent twice
    counts once."""
    value = polite(trajectory)
    event: dict[str, Any] = {
        name: trajectory[name] for name in ("trajectory_id", "session_key", "tenant") if name in trajectory
    }
    event |= {"time": datetime.now(UTC).isoformat(), "source": SOURCE, "revision": 0}
    return event | ({"outcome": "abstained"} if value is None else {"outcome": "scored", "value": value})


def content(value: bytes, headers: dict[str, bytes]) -> bytes:
    """Return the payload of a record. Payloads above 256 KiB are in the blob store, and the record refers to them."""
    if "ce_dataref" not in headers:
        return value
    with fsspec.open(json.loads(value)["uri"], "rb") as file:
        stored: bytes = file.read()
    return stored


def login() -> dict[str, str]:
    """Return the login options of the bus, if it needs a login. The embedded broker's password is in
    `.headrace/run/token`."""
    password = os.environ.get("HEADRACE_BUS__PASSWORD")
    if not password:
        return {}
    user = os.environ.get("HEADRACE_BUS__USERNAME", "headrace")
    return {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


def _producer(bus: str) -> AIOKafkaProducer:
    return AIOKafkaProducer(bootstrap_servers=bus, acks="all", enable_idempotence=True, **login())


async def main(bus: str = "127.0.0.1:9092") -> None:
    """Consume trajectories without end. Offsets are committed after the reward is durable, so that a crash loses
    none."""
    consumer = AIOKafkaConsumer(
        "trajectories",
        bootstrap_servers=bus,
        **login(),
        group_id=f"rewards-{SOURCE}",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    )
    async with consumer, _producer(bus) as producer:
        async for record in consumer:
            try:
                trajectory = json.loads(content(record.value or b"", dict(record.headers)))
                key = trajectory["session_key"].encode()
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # not a trajectory: the scorer reads the same topic and dead-letters the record
            await producer.send_and_wait("rewards", json.dumps(reward(trajectory)).encode(), key)
            await consumer.commit()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
