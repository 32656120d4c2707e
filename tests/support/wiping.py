"""A bus without topics again, for the next test."""

from __future__ import annotations

from tests.contract.bus.clients import administering, eventually


async def wipe(bus: str) -> None:
    async with administering(bus) as admin:

        async def topics() -> list[str]:
            return [name for name in await admin.list_topics() if not name.startswith("__")]

        async def empty() -> bool:
            return not await topics()

        await admin.delete_topics(await topics())
        await eventually(empty)
