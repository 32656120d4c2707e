"""Reading of new records: an incremental reader of topics, the trajectory of a session, and a listener for decisions of
the registry with a text for each.

Needs the extra `headrace-client[topics]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TypeVar

from headrace.blocking import blocking
from headrace.errors import HeadraceError, UsageError
from headrace.topics import Range, Topics, connected
from headrace_schemas import Event, ModelEvent, Trajectory
from headrace_schemas.values import ids
from headrace_schemas.values.ids import decode_name

E = TypeVar("E", bound=Event)
_POLL_S = 0.1


class Follower:
    """Incremental reader of topics. Each call yields the records since the call before. It begins at the start of each
    topic, or after `begin` at the topics' ends at that time."""

    def __init__(self, *topics: str) -> None:
        self._next_offsets: dict[str, dict[int, int]] = {topic: {} for topic in topics}

    async def begin(self, topics: Topics) -> None:
        """Skip all records that the topics contain now."""
        self._next_offsets = await topics.ends(list(self._next_offsets))

    async def events(self, topics: Topics, kind: type[E], keys: Collection[str] = ()) -> AsyncIterator[E]:
        """Yield the events of one type that were not yielded before. Records without a valid event are skipped, because
        the consumers of the topic dead-letter them."""
        async for unread, end in self._ranges(topics, kind.topic, keys):
            async for entry in topics.read(unread, ends=end):
                if isinstance(entry.event, kind):
                    yield entry.event

    async def keys(self, topics: Topics, topic: str) -> AsyncIterator[str]:
        """Yield the keys of records that were not yielded before, without decoding their values."""
        async for unread, end in self._ranges(topics, topic, ()):
            async for record in topics.records(unread, ends=end):
                yield decode_name(record.key or b"")

    async def _ranges(
        self, topics: Topics, topic: str, keys: Collection[str]
    ) -> AsyncIterator[tuple[Range, dict[int, int]]]:
        """Yield the unread range of each partition, with its end offsets. Reading continues after the range once the
        caller has read it."""
        at = self._next_offsets[topic]
        for partition, end in (await topics.ends([topic]))[topic].items():
            start = at.setdefault(partition, 0)
            if end > start:
                yield Range(topic, partitions=[partition], from_offset=start, keys=keys), {partition: end}
                at[partition] = end


def newest_trajectory(bus: str, session_id: str, *, tenant: str = "default", timeout_s: float = 30.0) -> Trajectory:
    """Return the newest trajectory of a session. If there is none yet, wait for it, because the session may just have
    ended.

    Raises:
        UsageError: there is no trajectory within `timeout_s`.
    """
    return blocking(find_trajectory(bus, session_id, tenant, timeout_s))


async def find_trajectory(bus: str, session_id: str, tenant: str, timeout_s: float) -> Trajectory:
    """Return the newest trajectory of a session. This is `newest_trajectory` for callers on an event loop."""
    key, follower, trajectory = ids.session_key(tenant, session_id), Follower(Trajectory.topic), None
    deadline = time.monotonic() + timeout_s
    async with connected(bus) as topics:
        while True:
            async for event in follower.events(topics, Trajectory, keys=[key]):
                trajectory = event
            if trajectory is not None:
                return trajectory
            if time.monotonic() > deadline:
                raise UsageError(
                    f"session {session_id!r} has no trajectory after {timeout_s:g} s: it has not ended, made no call, "
                    "or belongs to another tenant"
                )
            await asyncio.sleep(_POLL_S)


_RETRY_S = 1.0
_RECONNECT_S = 5.0


class Listener:
    """Background thread that reads new `model-events`, and reconnects if the bus was unreachable."""

    def __init__(
        self,
        bus: str,
        on_event: Callable[[ModelEvent], None],
        after_scores: Callable[[Topics], Awaitable[None]] | None = None,
    ) -> None:
        """Create a listener. `start` begins reading.

        Args:
            bus: address of the bus.
            on_event: function that is called in the listener's thread with each new event.
            after_scores: function that is called after each evaluation of a version. It may read topics.
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
                        await asyncio.sleep(_RETRY_S)
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
    """Describe a decision about a version in one line, or return None for an intermediate step such as a probe."""
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
