"""A registry that dies at given points, as by kill -9: `python -m tests.rollouts.mortal`.

The file `deaths` in the folder `$MORTAL_FOLDER` has a line for each death to come, for example `promote committed`: the
step of a rollout and the point within the step. The leader that reaches the first line removes it and dies.
`$MORTAL_FAULT` names a planted fault.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_registry.__main__ import SERVICE
from headrace_registry.storage.tables import MODELS
from headrace_registry.versions.transition import Transition
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing
from headrace_runtime.stream.delivery import Outbox
from headrace_schemas import Arm, ModelEvent, Routing, TrafficSplit

FOLDER, FAULT = "MORTAL_FOLDER", "MORTAL_FAULT"
MOMENTS = ("before commit", "committed", "half sent", "sent")
"""Points of a step: within its transaction, after the commit, with the decision but no routing on the bus, with both.
"""
_MOVES_AFTER_S = 0.5


def sentence(folder: Path, deaths: Iterable[str]) -> None:
    """Write the points at which leaders die, in this order."""
    draft = folder / "deaths.draft"
    draft.write_text("".join(f"{death}\n" for death in deaths), encoding="utf-8")
    draft.rename(folder / "deaths")


def sentenced(folder: Path) -> list[str]:
    """Return the deaths to come."""
    path = folder / "deaths"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _steps(records: Sequence[Outgoing]) -> set[str]:
    """Return the kinds of rollout steps in the records."""
    decisions = [
        ModelEvent.from_json(record.value) for record in records if record.topic == ModelEvent.topic and record.value
    ]
    return {event.rollout.kind for event in decisions if event.rollout is not None}


def _is_death_due(folder: Path, kinds: set[str], point: str) -> bool:
    """Return whether the next death is due at this point, and remove it from the file."""
    first, *rest = sentenced(folder) or [""]
    if first not in {f"{kind} {point}" for kind in kinds}:
        return False
    sentence(folder, rest)
    return True


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_mortal(folder: Path) -> None:
    """Let this process die at the points in the file, by replacing methods of the outbox and the producer."""
    add, send = Outbox.add, EventProducer.send_raw

    async def adding(self: Outbox, tx: AsyncConnection, records: Sequence[Outgoing]) -> None:
        await add(self, tx, records)
        if _is_death_due(folder, _steps(records), "before commit"):
            _die()

    async def sending(self: EventProducer, records: Iterable[Outgoing]) -> None:
        batch = list(records)
        kinds = _steps(batch)
        if _is_death_due(folder, kinds, "committed"):
            _die()
        if _is_death_due(folder, kinds, "half sent"):
            await send(self, [record for record in batch if record.topic == ModelEvent.topic])
            _die()
        await send(self, batch)
        if _is_death_due(folder, kinds, "sent"):
            _die()

    Outbox.add = adding  # type: ignore[method-assign]
    EventProducer.send_raw = sending  # type: ignore[method-assign]


def _alias_outside_the_transaction() -> None:
    """Plant a fault: the champion's alias changes in a separate transaction, a moment after the promotion."""
    promote, committed = Transition.promote, Outbox.mark_committed
    moves: list[tuple[str, str]] = []
    tasks: set[asyncio.Task[None]] = set()

    async def promoting(self: Transition, model: Any, version: str, *rest: Any, **more: Any) -> None:
        await promote(self, model, version, *rest, **more)
        if model.champion:
            stays = {"champion": model.champion, "previous": model.previous}
            await self.tx.execute(update(MODELS).where(MODELS.c.model == model.model).values(stays))
            moves.append((model.model, version))

    async def move(outbox: Outbox, model: str, version: str) -> None:
        await asyncio.sleep(_MOVES_AFTER_S)
        async with outbox._database.transaction() as tx:
            await tx.execute(update(MODELS).where(MODELS.c.model == model).values(champion=version))

    def commit(self: Outbox) -> None:
        committed(self)
        while moves:
            task = asyncio.create_task(move(self, *moves.pop()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    Transition.promote = promoting  # type: ignore[method-assign]
    Outbox.mark_committed = commit  # type: ignore[method-assign]


def _half_a_routing() -> None:
    """Plant a fault: a routing that withdraws a version is sent with the version's arm first, and then without it."""
    send = EventProducer.send_raw

    async def sending(self: EventProducer, records: Iterable[Outgoing]) -> None:
        for record in records:
            routing = Routing.from_json(record.value) if record.topic == Routing.topic and record.value else None
            if routing is not None and routing.withdrawn and routing.split is None:
                arm = Arm(rollout_id="r", version=routing.withdrawn[0], slot=0, share="1/2")
                split = TrafficSplit(unit="session", salt="s", slots=1, arms=(arm,))
                await send(self, [await self.encode(routing.model_copy(update={"split": split}))])
            await send(self, [record])

    EventProducer.send_raw = sending  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "an alias moves outside the transaction": (_alias_outside_the_transaction, "was promoted last, and"),
    "a routing goes out in halves": (_half_a_routing, "an arm or an alias is withdrawn"),
}
"""Function that plants each fault, and the text of the violation that it must cause."""

if __name__ == "__main__":
    if os.environ[FAULT]:
        FAULTS[os.environ[FAULT]][0]()
    make_mortal(Path(os.environ[FOLDER]))
    SERVICE.main()
