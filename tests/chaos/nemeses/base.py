"""What every nemesis has in common: whom it can strike, and that what it broke is whole again in the end."""

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
    """`prepare` before the stack starts, `strike` as often as the schedule says, `heal` once at the end."""

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
        """Whom it can strike."""

    def prepare(self, machine: str) -> Mapping[str, str]:
        """What the processes of a machine get into their environment."""
        return {}

    @abc.abstractmethod
    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        """Returns what was done, in a few words, as soon as it is done; what lasts goes on in the background."""

    async def heal(self) -> None:
        """Returns when nothing is broken any more."""
        await asyncio.gather(*self._lasting.values())

    def struck(self, victim: str) -> bool:
        """Whether the victim still suffers from an earlier strike."""
        task = self._lasting.get(victim)
        return task is not None and not task.done()

    def lasting(self, victim: str, work: Coroutine[None, None, None]) -> None:
        """Let `work` go on beside the schedule; it ends what the strike began."""
        self._lasting[victim] = asyncio.create_task(work)
