"""The inference replicas as this gateway sees them: heartbeats, its own calls, and who gets the next one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace_gateway.lines import Line
from headrace_runtime.clock import Clock
from headrace_schemas import Replica

_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 2.0
_FULL_BACKOFF_MAX_S = 0.4
_MEMBERS_MAX = 1024
_ASK_AGAIN_S = 0.5
_ASK_AGAIN_MAX_S = 4.0


@dataclass(slots=True)
class Member:
    """One replica. Times are those of our monotonic clock."""

    replica: Replica
    heard_s: float
    """When its last heartbeat came."""
    answered_s: float
    """When anything came from it over HTTP."""
    owes_since_s: float = 0.0
    """When the oldest of the calls that are in flight without a pause began."""
    in_flight: int = 0
    strikes: int = 0
    shunned_until_s: float = 0.0
    missing: set[str] = field(default_factory=set)
    """Versions that it announced and then did not have."""
    hung: bool = False
    """It neither sends nor answers; it gets no calls until something comes from it."""
    asked: bool = False
    """A question whether it lives is on its way."""
    unanswered: int = 0
    ask_at_s: float = 0.0
    lines: set[Line] = field(default_factory=set)
    """Its calls."""

    @property
    def silent_since_s(self) -> float:
        """Since when calls have waited for a byte."""
        return max(self.answered_s, self.owes_since_s)

    @property
    def load(self) -> float:
        """Calls per place. What we have open is newer than what its heartbeat says, but not all there is."""
        return max(self.in_flight, self.replica.in_flight) / self.replica.capacity


class Fleet:
    """Fed by the `replicas` table; `loaded` tells whether its history has been read.

    A replica whose heartbeats stay away is only called when no other is left: the silence may be the bus's. One that
    hangs (see `watch`) is not called at all.
    """

    def __init__(self, clock: Clock, loaded: Callable[[], bool]) -> None:
        self._clock = clock
        self._loaded = loaded
        self._members: dict[str, Member] = {}
        self._news = asyncio.Event()

    def update(self, key: str, replica: Replica | None) -> None:
        """Follows the table. A heartbeat is a reason to try a replica again that failed us before."""
        if replica is None:
            self._members.pop(key, None)
        else:
            heard_s = self._clock.monotonic_s()
            if not self._loaded():  # history: trust its date; later on, arrival needs no equal clocks
                heard_s -= max(0.0, (self._clock.now() - replica.time).total_seconds())
            member = self._members.setdefault(key, Member(replica, heard_s, heard_s))
            member.replica, member.heard_s, member.shunned_until_s = replica, heard_s, 0.0
            member.ask_at_s = 0.0
            member.missing.clear()
            if len(self._members) > _MEMBERS_MAX:  # those that were killed leave their last heartbeat on the topic
                del self._members[min(self._members, key=lambda one: self._members[one].heard_s)]
        self.changed()

    def changed(self) -> None:
        """Wake everybody in `wait`."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until something changed, the pause of a shunned replica is over, or `timeout_s` passed.

        Those who wait for the same pause do not all come back at once.
        """
        now = self._clock.monotonic_s()
        pauses = [m.shunned_until_s - now for m in self._members.values() if m.shunned_until_s > now]
        pause_s = min(pauses, default=timeout_s) * random.uniform(1.0, 1.5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, pause_s)):
                await self._news.wait()

    def pick(
        self, version: str, session_key: str, avoid: frozenset[str] = frozenset(), *, resuming: bool = False
    ) -> Member | None:
        """The replica for one more call, None when nobody can take it now.

        Rendezvous hashing keeps a session where its keys and values are cached, at most the sessions of a replica that
        comes or goes move; a full replica passes its calls to the least loaded one.
        """
        now = self._clock.monotonic_s()
        able = [member for member in self._members.values() if _able(member, version, resuming, now)]
        if not able:
            return None
        able = [member for member in able if member.replica.replica_id not in avoid] or able
        candidates = [member for member in able if now - member.heard_s <= member.replica.ttl_s] or able
        first = max(candidates, key=lambda member: _weight(session_key, member.replica.replica_id))
        return first if first.load < 1 else min(candidates, key=lambda member: member.load)

    def can_resume(self, version: str) -> bool:
        """Whether any replica with `version`, even one that is busy now, could take over a broken stream."""
        holders = (m for m in self._members.values() if m.replica.ready(version))
        return any(member.replica.resumes for member in holders)

    @contextlib.contextmanager
    def calling(self, member: Member, elsewhere: Callable[[], bool]) -> Iterator[Line]:
        """Counts one call while the body runs, which waits for the replica on the line."""
        line = Line(lambda: self.heard(member), elsewhere)
        if not member.in_flight:  # it owed nobody an answer until now
            member.owes_since_s = self._clock.monotonic_s()
        member.in_flight += 1
        member.lines.add(line)
        try:
            yield line
        finally:
            member.in_flight -= 1
            member.lines.discard(line)

    def heard(self, member: Member) -> None:
        """Something came from it over HTTP: it lives."""
        member.answered_s = self._clock.monotonic_s()
        member.unanswered, member.ask_at_s = 0, 0.0
        if member.hung:
            member.hung = False
            self.changed()

    def hangs(self, member: Member) -> None:
        """It was asked in vain. It is asked again, less and less often, and at its next heartbeat."""
        member.ask_at_s = self._clock.monotonic_s() + min(_ASK_AGAIN_MAX_S, _ASK_AGAIN_S * 2**member.unanswered)
        member.unanswered = min(member.unanswered + 1, 10)
        if not member.hung:
            member.hung = True
            self.changed()

    def due(self, silence_s: float) -> list[Member]:
        """Replicas to be asked whether they live: silent for `silence_s`, and owing an answer or a heartbeat.

        One that was taken out of service long ago is left alone.
        """
        now = self._clock.monotonic_s()
        return [m for m in self._members.values() if not m.asked and m.ask_at_s <= now and _due(m, now, silence_s)]

    @contextlib.contextmanager
    def asking(self, member: Member) -> Iterator[None]:
        member.asked = True
        try:
            yield
        finally:
            member.asked = False

    def hanging(self) -> list[Member]:
        return [member for member in self._members.values() if member.hung]

    def served(self, member: Member) -> None:
        member.strikes = 0

    def failed(self, member: Member) -> None:
        """Leave it alone for a while, twice as long each time. Calls that fail together count once."""
        self._shun(member, _BACKOFF_MAX_S)

    def full(self, member: Member) -> None:
        """It is well and has no place; ask again soon."""
        self._shun(member, _FULL_BACKOFF_MAX_S)

    def lacks(self, member: Member, version: str) -> None:
        """It does not have `version`, whatever it announced; believe its next heartbeat."""
        member.missing.add(version)

    def _shun(self, member: Member, pause_max_s: float) -> None:
        now = self._clock.monotonic_s()
        if member.shunned_until_s <= now:
            member.shunned_until_s = now + min(pause_max_s, _BACKOFF_S * 2**member.strikes)
            member.strikes = min(member.strikes + 1, 10)


def _due(member: Member, now: float, silence_s: float) -> bool:
    if member.hung:
        return True
    if member.in_flight and now - member.silent_since_s > silence_s:
        return True  # heartbeats come another way, and prove nothing about this one
    silent_s = now - max(member.heard_s, member.answered_s)
    return silence_s < silent_s <= max(member.replica.ttl_s, 2 * silence_s)


def _able(member: Member, version: str, resuming: bool, now: float) -> bool:
    return (
        not member.hung
        and member.shunned_until_s <= now
        and version not in member.missing
        and member.replica.ready(version)
        and not (resuming and not member.replica.resumes)
    )


def _weight(session_key: str, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{session_key}\0{replica_id}".encode(), digest_size=8).digest()
