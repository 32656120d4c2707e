"""SIGKILL of PostgreSQL and all its children; it is started again at once and recovers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis
from tests.support import postgres_node


class KillPostgres(Nemesis):
    """The database under the stream services and the registry."""

    name: ClassVar[str] = "postgres"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        return postgres_node.missing() if bus == "kafka" else "on the embedded bus the databases are SQLite files"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return ("postgres",)

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        await self.stack.kill_postgres()
        return "killed"
