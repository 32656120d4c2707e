"""Sender of the largest feedback that is allowed: `python -m tests.support.hostile_feedback URL KEY`."""

from __future__ import annotations

import asyncio
import os
import sys

import httpx2

from headrace_schemas.values import ids

SESSIONS = 64
_AT_ONCE = 4


def body(tenant: str, sessions: int = SESSIONS) -> dict[str, object]:
    """Return the body of feedback about one answer in each of `sessions` sessions."""
    listed = [ids.response_id(ids.session_key(tenant, ids.uuid7().hex)) for _ in range(sessions)]
    return {"msg_ids": listed, "value": 1}


async def _send(client: httpx2.AsyncClient) -> None:
    while True:
        answer = await client.post("/v1/feedback", json=body("hostile"))
        await asyncio.sleep(0.02 if answer.status_code == 429 else 0)


async def main() -> None:
    os.nice(10)  # an attacker has a machine of its own: what it computes here is not taken from the gateway
    url, key = sys.argv[1:3]
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(base_url=url, headers=headers, timeout=30, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(_AT_ONCE):
            group.create_task(_send(client))


if __name__ == "__main__":
    asyncio.run(main())
