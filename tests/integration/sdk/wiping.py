"""A bus without topics again, for the next test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka.admin import AIOKafkaAdminClient

from tests.contract.bus.clients import eventually


async def wipe(bus: str) -> None:
    async with admin_of(bus) as admin:

        async def topics() -> list[str]:
            return [name for name in await admin.list_topics() if not name.startswith("__")]

        async def empty() -> bool:
            return not await topics()

        await admin.delete_topics(await topics())
        await eventually(empty)


@asynccontextmanager
async def admin_of(bus: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bus)
    await client.start()
    try:
        yield client
    finally:
        await client.close()
