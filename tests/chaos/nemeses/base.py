"""Common interface of the nemeses: possible victims, and the repair at the end."""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from tests.chaos.balancer import Balancer
    from tests.chaos.stack import Stack


class Nemesis(abc.ABC):
    """Interface of a kind of fault: `prepare` before the stack starts, `strike` on schedule, `heal` once at the end."""

    name: ClassVar[str]

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._lasting: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def missing(cls, bus: str) -> str | None:
        """Why it cannot be played here on this bus, None when it can."""
        return None

    @classmethod
    @abc.abstractmethod
    def victims(cls, bus: str) -> Sequence[str]:
        """Return the possible victims."""

    def prepare(self, machine: str) -> Mapping[str, str]:
        """Return environment variables for the processes of a machine."""
        return {}

    @abc.abstractmethod
    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        """Strike. Return a short description at once; lasting effects go on in the background."""

    async def heal(self) -> None:
        """Return when every effect is repaired."""
        await asyncio.gather(*self._lasting.values())

    def struck(self, victim: str) -> bool:
        """Whether the victim still suffers from an earlier strike."""
        task = self._lasting.get(victim)
        return task is not None and not task.done()

    def lasting(self, victim: str, work: Coroutine[None, None, None]) -> None:
        """Run `work` in the background. It ends the effect of the strike."""
        self._lasting[victim] = asyncio.create_task(work)
