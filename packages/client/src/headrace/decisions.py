"""Follow the decisions of the registry and format each as one line. Needs the extra `headrace-client[topics]`."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from headrace.errors import HeadraceError
from headrace.topics import Range, Topics, connected
from headrace_schemas import ModelEvent

_POLL_S = 1.0
_RECONNECT_S = 5.0


class Listener:
    """Background thread that reads new `model-events` and reconnects after the bus was unreachable."""

    def __init__(
        self,
        bus: str,
        on_event: Callable[[ModelEvent], None],
        after_scores: Callable[[Topics], Awaitable[None]] | None = None,
    ) -> None:
        """Create a listener. `start` begins reading.

        Args:
            bus: address of the bus.
            on_event: called in the listener's thread with each new event.
            after_scores: called whenever a version was evaluated; it may read topics.
        """
        self._bus = bus
        self._on_event = on_event
        self._after_scores = after_scores
        self._next_offsets: dict[int, int] | None = None
        """Next offset of each partition. None until the first read, which starts at the end of the topic."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-decisions", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._started.wait()

    def stop(self) -> None:
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop may have ended in the meantime
                self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._listen())

    async def _listen(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._started.set()
        while True:
            with contextlib.suppress(
                HeadraceError, asyncio.TimeoutError
            ):  # the bus is unreachable or the topic does not exist yet
                async with connected(self._bus) as topics:
                    while True:
                        scored = False
                        async for event in self._new_events(topics):
                            self._on_event(event)
                            scored = scored or event.decision == "evaluated"
                        if scored and self._after_scores is not None:
                            await self._after_scores(topics)
                        await asyncio.sleep(_POLL_S)
            await asyncio.sleep(_RECONNECT_S)

    async def _new_events(self, topics: Topics) -> AsyncIterator[ModelEvent]:
        ends = (await topics.ends([ModelEvent.topic]))[ModelEvent.topic]
        if self._next_offsets is None:
            self._next_offsets = dict(ends)
        for partition, end in ends.items():
            start = self._next_offsets.setdefault(partition, 0)
            if end <= start:
                continue
            unread = Range(ModelEvent.topic, partitions=[partition], from_offset=start)
            async for entry in topics.read(unread, ends={partition: end}):
                self._next_offsets[partition] = entry.offset + 1
                if isinstance(entry.event, ModelEvent):
                    yield entry.event
            self._next_offsets[partition] = end


def describe_decision(event: ModelEvent) -> str | None:
    """Return one line of text about a decision, or None for an intermediate step."""
    because = f": {event.reason}" if event.reason else ""
    if event.rollout is not None and event.decision in ("probed", "skipped"):
        return f"{event.version} has {event.rollout.share} of the traffic{because}"
    match event.decision:
        case "evaluated":
            return f"{event.version} is measured: {_score_text(event.statistics)}"
        case "promoted":
            over = f" from {event.previous}" if event.previous else ""
            return f"{event.version} takes over{over}{because}{_difference_text(event.statistics)}"
        case "rejected":
            return f"{event.version} is refused{because}{_difference_text(event.statistics)}"
        case "rolled_back":
            return f"{event.version} is taken back, {event.previous} serves again{because}"
        case "withdrawn":
            return f"{event.version} is withdrawn{because}"
        case _:
            return None


def format_number(numbers: Mapping[str, float], name: str, error: str, form: str) -> str:
    """Format one of `numbers`, followed by its standard error if there is one.

    Args:
        numbers: the statistics of a decision by name.
        name: name of the number.
        error: name of its standard error.
        form: format of the number, such as `.3f`.
    """
    return f"{numbers[name]:{form}}" + (f" ± {numbers[error]:.3f}" if error in numbers else "")


def _score_text(numbers: dict[str, float]) -> str:
    words = [
        f"score {format_number(numbers, 'score', 'score_standard_error', '.3f')}" if "score" in numbers else "no score"
    ]
    if "tasks" in numbers:
        words.append(f"on {numbers['tasks']:.0f} audit tasks")
    return " ".join(words)


def _difference_text(numbers: dict[str, float]) -> str:
    if "difference" not in numbers:
        return ""
    tasks = f" on {numbers['tasks']:.0f} gate tasks" if "tasks" in numbers else ""
    return f" ({format_number(numbers, 'difference', 'standard_error', '+.3f')}{tasks})"
