"""Turns of owners at a resource with a few slots: each owner has its own queue, and the queues alternate."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from headrace_inference.errors import Overloaded

Owner = TypeVar("Owner")


class Turns(Generic[Owner]):
    """Slots that owners use in turn. Called from one event loop."""

    def __init__(self, places: int, waiting_max: int) -> None:
        """Create the places.

        Args:
            places: number of owners that may have a turn at once.
            waiting_max: number of turns that wait. Owners share it equally, and each may have one.
        """
        self._free = places
        self._waiting_max = waiting_max
        self._lines: OrderedDict[Owner, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, owner: Owner) -> None:
        """Wait for a turn. The caller must call `give_back` afterwards.

        Raises:
            Overloaded: the owner has its share of the waiting turns.
        """
        if self._free and not self._lines:
            self._free -= 1
            return
        owners = len(self._lines.keys() | {owner})
        waiting = len(self._lines.get(owner, ()))
        if waiting >= max(1, self._waiting_max // owners):
            raise Overloaded(f"{waiting} grammars wait to be compiled; try again")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            else:
                self._remove(owner, turn)
            raise

    def give_back(self) -> None:
        """End a turn. The next owner in order gets it."""
        self._free += 1
        while self._free and self._lines:
            owner, line = next(iter(self._lines.items()))
            turn = line.popleft()
            self._lines.move_to_end(owner)
            if not line:
                del self._lines[owner]
            if not turn.done():
                self._free -= 1
                turn.set_result(None)

    def _remove(self, owner: Owner, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(owner)
        if line is not None and turn in line:
            line.remove(turn)
            if not line:
                del self._lines[owner]
