"""Publish one trajectory: `python produce.py SESSION [HOST:PORT]`. Needs aiokafka, but no package of Headrace."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaProducer


def session_key(session_id: str, tenant: str = "default") -> str:
    """Return the Kafka key of all events of a session: the first 80 bits of SHA-256, as lower-case base32."""
    digest = hashlib.sha256(f"{tenant}\0{session_id}".encode()).digest()
    return base64.b32encode(digest[:10]).decode().lower()


def trajectory(session_id: str) -> dict[str, Any]:
    """Return the example event with the ids of this session."""
    event: dict[str, Any] = json.loads((Path(__file__).parents[1] / "trajectory.json").read_text())
    event |= {"session_id": session_id, "trajectory_id": session_id, "session_key": session_key(session_id)}
    event["branches"][0]["spans"][0]["turn_id"] = f"{session_id}-1"
    event["time"] = event["started_at"] = datetime.now(UTC).isoformat()
    return event


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


async def main(session_id: str, bus: str = "127.0.0.1:9092") -> None:
    """Publish the event and return once it is durable on the bus."""
    event = trajectory(session_id)
    async with AIOKafkaProducer(bootstrap_servers=bus, acks="all", enable_idempotence=True, **login()) as producer:
        sent = await producer.send_and_wait("trajectories", json.dumps(event).encode(), event["session_key"].encode())
    print(f"{session_id} is at trajectories[{sent.partition}]@{sent.offset}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
