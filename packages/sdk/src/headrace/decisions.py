"""Follows the decisions of the registry and describes each in a line. Needs the extra `headrace[topics]`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

from headrace.errors import HeadraceError
from headrace.figures import figure
from headrace.topics import Range, Topics, connected
from headrace_schemas import ModelEvent

_POLL_S = 1.0
_AGAIN_S = 5.0


class Listener:
    """Reads new `model-events` in a thread, and reconnects when the bus was away."""

    def __init__(
        self,
        bus: str,
        hear: Callable[[ModelEvent], None],
        after_scores: Callable[[Topics], Awaitable[None]] | None = None,
    ) -> None:
        """`after_scores` is called whenever a version was measured, and may read the topics."""
        self._bus = bus
        self._hear = hear
        self._after_scores = after_scores
        self._at: dict[int, int] | None = None
        """The next offset of each partition; None: the ends of now."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._began = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-decisions", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._began.wait()

    def stop(self) -> None:
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._listen())

    async def _listen(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._began.set()
        while True:
            with contextlib.suppress(HeadraceError, asyncio.TimeoutError):  # no bus, or no topic yet
                async with connected(self._bus) as topics:
                    while True:
                        scored = False
                        async for event in self._new(topics):
                            self._hear(event)
                            scored = scored or event.decision == "evaluated"
                        if scored and self._after_scores is not None:
                            await self._after_scores(topics)
                        await asyncio.sleep(_POLL_S)
            await asyncio.sleep(_AGAIN_S)

    async def _new(self, topics: Topics) -> AsyncIterator[ModelEvent]:
        ends = (await topics.ends([ModelEvent.topic]))[ModelEvent.topic]
        if self._at is None:
            self._at = dict(ends)
        for partition, end in ends.items():
            at = self._at.setdefault(partition, 0)
            if end <= at:
                continue
            wanted = Range(ModelEvent.topic, partitions=[partition], from_offset=at)
            async for entry in topics.read(wanted, ends={partition: end}):
                self._at[partition] = entry.offset + 1
                if isinstance(entry.event, ModelEvent):
                    yield entry.event
            self._at[partition] = end


def line(event: ModelEvent) -> str | None:
    """A line about a decision, None for an intermediate step."""
    because = f": {event.reason}" if event.reason else ""
    if event.rollout is not None and event.decision in ("probed", "skipped"):
        return f"{event.version} has {event.rollout.share} of the traffic{because}"
    match event.decision:
        case "evaluated":
            return f"{event.version} is measured: {_measured(event.statistics)}"
        case "promoted":
            over = f" from {event.previous}" if event.previous else ""
            return f"{event.version} takes over{over}{because}{_compared(event.statistics)}"
        case "rejected":
            return f"{event.version} is refused{because}{_compared(event.statistics)}"
        case "rolled_back":
            return f"{event.version} is taken back, {event.previous} serves again{because}"
        case "withdrawn":
            return f"{event.version} is withdrawn{because}"
        case _:
            return None


def _measured(numbers: dict[str, float]) -> str:
    words = [f"score {figure(numbers, 'score', 'score_standard_error', '.3f')}" if "score" in numbers else "no score"]
    if "tasks" in numbers:
        words.append(f"on {numbers['tasks']:.0f} audit tasks")
    return " ".join(words)


def _compared(numbers: dict[str, float]) -> str:
    if "difference" not in numbers:
        return ""
    tasks = f" on {numbers['tasks']:.0f} gate tasks" if "tasks" in numbers else ""
    return f" ({figure(numbers, 'difference', 'standard_error', '+.3f')}{tasks})"
