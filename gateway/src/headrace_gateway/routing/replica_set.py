"""Replicas as this gateway sees them: heartbeats, its own calls, the selection for the next call, and hung replicas.

A stopped process, or a machine without network, keeps its connections and sends no bytes. A replica that computes a
long prompt sends no bytes either, but it answers `GET /health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace_gateway.routing.engine import Engines, UpstreamCall
from headrace_gateway.settings import UpstreamSettings
from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_schemas import Replica
from headrace_schemas.events.routing import LoadState

_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 2.0
_FULL_BACKOFF_MAX_S = 0.4
_MEMBERS_MAX = 1024
_PROBE_RETRY_S = 0.5
_PROBE_RETRY_MAX_S = 4.0
_NEW: frozenset[LoadState] = frozenset({"ready"})
_BEGUN: frozenset[LoadState] = _NEW | {"draining"}
_HELD: frozenset[LoadState] = _BEGUN | {"loading"}


@dataclass(slots=True)
class ReplicaStatus:
    """Status of one replica. Times are those of our monotonic clock."""

    replica: Replica
    heartbeat_s: float
    """Time of its last heartbeat."""
    responded_s: float
    """Time at which it last sent data over HTTP."""
    calls_since_s: float = 0.0
    """Time since when it has had calls in progress without a pause."""
    in_flight: int = 0
    strikes: int = 0
    shunned_until_s: float = 0.0
    missing: set[str] = field(default_factory=set)
    """Versions that it announced but did not have."""
    hung: bool = False
    """Whether the replica hangs. A hung replica gets no calls until it sends data."""
    is_probed: bool = False
    """A health check is running."""
    failed_probes: int = 0
    next_probe_s: float = 0.0
    calls: set[UpstreamCall] = field(default_factory=set)
    """Calls of this gateway to it."""

    @property
    def silent_since_s(self) -> float:
        """Time since when the replica's calls have received no byte."""
        return max(self.responded_s, self.calls_since_s)

    @property
    def load(self) -> float:
        """Calls in flight divided by the replica's capacity.

        Own calls are counted by this process; the replica's heartbeat adds those of other gateways but is older, so the
        larger number counts.
        """
        return max(self.in_flight, self.replica.in_flight) / self.replica.capacity


class ReplicaSet:
    """Replicas of the table `replicas`. `loaded` returns whether the table has been read.

    A replica without heartbeats is only called if no other is left, because the bus may be the cause. A replica that
    hangs (see `ReplicaWatch`) is not called at all.
    """

    def __init__(self, clock: Clock, loaded: Callable[[], bool]) -> None:
        self._clock = clock
        self._loaded = loaded
        self._members: dict[str, ReplicaStatus] = {}
        self._news = asyncio.Event()

    def update(self, key: str, replica: Replica | None) -> None:
        """Apply a row of the table. After a heartbeat, a failed replica is tried again."""
        if replica is None:
            self._members.pop(key, None)
        else:
            heartbeat_s = self._clock.monotonic_s()
            if not self._loaded():  # old rows count by their date; new ones by arrival, which needs no equal clocks
                heartbeat_s -= max(0.0, (self._clock.now() - replica.time).total_seconds())
            member = self._members.setdefault(key, ReplicaStatus(replica, heartbeat_s, heartbeat_s))
            member.replica, member.heartbeat_s, member.shunned_until_s = replica, heartbeat_s, 0.0
            member.next_probe_s = 0.0
            member.missing.clear()
            if len(self._members) > _MEMBERS_MAX:  # a killed replica leaves its last heartbeat on the topic
                del self._members[min(self._members, key=lambda replica_id: self._members[replica_id].heartbeat_s)]
        self.changed()

    def changed(self) -> None:
        """Wake all waiters in `wait`."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the set of replicas has changed, or a replica that failed may be tried again, at most `timeout_s`.

        Callers that wait for the same replica do not all return at once.
        """
        now = self._clock.monotonic_s()
        pauses = [m.shunned_until_s - now for m in self._members.values() if m.shunned_until_s > now]
        pause_s = min(pauses, default=timeout_s) * random.uniform(1.0, 1.5)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, pause_s)):
                await self._news.wait()

    def pick(
        self,
        version: str,
        session_key: str,
        avoid: frozenset[str] = frozenset(),
        *,
        needs: frozenset[str] = frozenset(),
        begun: bool = False,
        resuming: bool = False,
    ) -> ReplicaStatus | None:
        """Return the replica for one more call, or None if no replica can accept it now.

        Rendezvous hashing keeps a session at the replica that caches its KV. When a replica is added or removed, at
        most its own sessions move. A full replica passes its calls to the least loaded one.

        Args:
            needs: The abilities that the replica must announce.
            begun: Whether the version has begun the answer elsewhere, so that a draining replica is sufficient.
            resuming: Whether tokens of the answer were already sampled.
        """
        now = self._clock.monotonic_s()
        states = _BEGUN if begun else _NEW
        able = [
            member for member in self._members.values() if _can_serve(member, version, states, needs, resuming, now)
        ]
        if not able:
            return None
        able = [member for member in able if member.replica.replica_id not in avoid] or able
        candidates = [member for member in able if now - member.heartbeat_s <= member.replica.ttl_s] or able
        first = max(candidates, key=lambda member: _weight(session_key, member.replica.replica_id))
        return first if first.load < 1 else min(candidates, key=lambda member: member.load)

    def capacity(self, model: str) -> int:
        """Return the slots of all replicas with a version of `model` that could accept a call now."""
        now = self._clock.monotonic_s()
        holders = [member for member in self._members.values() if _versions_of(member, model)]
        able = [member for member in holders if not member.hung and member.shunned_until_s <= now]
        fresh = [member for member in able if now - member.heartbeat_s <= member.replica.ttl_s] or able
        return sum(member.replica.capacity for member in fresh)

    def holders(self, version: str) -> list[Replica]:
        """Return the replicas that have loaded `version` or are loading it, also if they are busy."""
        members = [member for member in self._members.values() if version not in member.missing]
        return [member.replica for member in members if member.replica.state_of(version) in _HELD]

    def lacking(self, model: str, needs: frozenset[str]) -> frozenset[str]:
        """Return the part of `needs` that the replicas with a version of `model` do not announce.

        The result is empty without such replicas, and if one of them has all abilities.
        """
        holders = [m.replica for m in self._members.values() if any(map(m.replica.ready, _versions_of(m, model)))]
        return min((needs.difference(holder.abilities) for holder in holders), key=len, default=frozenset())

    @contextlib.contextmanager
    def calling(self, member: ReplicaStatus, elsewhere: Callable[[], bool]) -> Iterator[UpstreamCall]:
        """Count one call to the replica inside the context."""
        call = UpstreamCall(lambda: self.note_response(member), elsewhere)
        if not member.in_flight:  # it had no call in progress until now
            member.calls_since_s = self._clock.monotonic_s()
        member.in_flight += 1
        member.calls.add(call)
        try:
            yield call
        finally:
            member.in_flight -= 1
            member.calls.discard(call)

    def note_response(self, member: ReplicaStatus) -> None:
        """Record that the replica sent data over HTTP, so it is alive."""
        member.responded_s = self._clock.monotonic_s()
        member.failed_probes, member.next_probe_s = 0, 0.0
        if member.hung:
            member.hung = False
            self.changed()

    def note_hung(self, member: ReplicaStatus) -> None:
        """Record that the replica did not answer its health check.

        The next checks follow at growing intervals, and at its next heartbeat.
        """
        member.next_probe_s = self._clock.monotonic_s() + min(
            _PROBE_RETRY_MAX_S, _PROBE_RETRY_S * 2**member.failed_probes
        )
        member.failed_probes = min(member.failed_probes + 1, 10)
        if not member.hung:
            member.hung = True
            self.changed()

    def members_to_probe(self, silence_s: float) -> list[ReplicaStatus]:
        """Return the replicas that need a health check: silent for `silence_s`, with an overdue answer or heartbeat.

        A replica that was taken out of service long ago is not checked.
        """
        now = self._clock.monotonic_s()
        members = [member for member in self._members.values() if not member.is_probed and member.next_probe_s <= now]
        return [member for member in members if _needs_probe(member, now, silence_s)]

    @contextlib.contextmanager
    def probing(self, member: ReplicaStatus) -> Iterator[None]:
        member.is_probed = True
        try:
            yield
        finally:
            member.is_probed = False

    def hung_members(self) -> list[ReplicaStatus]:
        return [member for member in self._members.values() if member.hung]

    def note_success(self, member: ReplicaStatus) -> None:
        member.strikes = 0

    def note_failure(self, member: ReplicaStatus) -> None:
        """Record that a call to the replica failed.

        It gets no calls for a while, twice as long after each failure. Concurrent failures count once.
        """
        self._shun(member, _BACKOFF_MAX_S)

    def note_full(self, member: ReplicaStatus) -> None:
        """Record that the replica has no free slot, and try it again soon."""
        self._shun(member, _FULL_BACKOFF_MAX_S)

    def note_missing_version(self, member: ReplicaStatus, version: str) -> None:
        """Record that the replica does not have `version`, although it announced it, until its next heartbeat."""
        member.missing.add(version)

    def _shun(self, member: ReplicaStatus, pause_max_s: float) -> None:
        now = self._clock.monotonic_s()
        if member.shunned_until_s <= now:
            member.shunned_until_s = now + min(pause_max_s, _BACKOFF_S * 2**member.strikes)
            member.strikes = min(member.strikes + 1, 10)


def _needs_probe(member: ReplicaStatus, now: float, silence_s: float) -> bool:
    if member.hung:
        return True
    if member.in_flight and now - member.silent_since_s > silence_s:
        return True  # heartbeats arrive over the bus, so they do not show that HTTP works
    silent_s = now - max(member.heartbeat_s, member.responded_s)
    return silence_s < silent_s <= max(member.replica.ttl_s, 2 * silence_s)


def _can_serve(
    member: ReplicaStatus,
    version: str,
    states: frozenset[LoadState],
    needs: frozenset[str],
    resuming: bool,
    now: float,
) -> bool:
    return (
        not member.hung
        and member.shunned_until_s <= now
        and version not in member.missing
        and member.replica.state_of(version) in states
        and needs.issubset(member.replica.abilities)
        and not (resuming and not member.replica.resumes)
    )


def _versions_of(member: ReplicaStatus, model: str) -> list[str]:
    return [loaded.version for loaded in member.replica.versions if loaded.version.partition("@")[0] == model]


def _weight(session_key: str, replica_id: str) -> bytes:
    return hashlib.blake2b(f"{session_key}\0{replica_id}".encode(), digest_size=8).digest()


PROBE_AFTER_S = 2.0
"""Silence of a replica after which its health is checked (`GET /health`)."""

log = get_logger(__name__)
_TICK_S = 0.25
_ATTEMPTS = 2
"""Attempts of a health check: a single failure may be the fault of this process."""


class ReplicaWatch:
    """Watch that checks silent replicas and cancels the calls of hung ones."""

    def __init__(self, replica_set: ReplicaSet, engines: Engines, settings: UpstreamSettings, clock: Clock) -> None:
        self._replica_set = replica_set
        self._engines = engines
        self._settings = settings
        self._clock = clock

    async def run(self) -> None:
        """Check idle replicas and cancel hanging calls, until the owner cancels this."""
        async with asyncio.TaskGroup() as probes:
            while True:
                for member in self._replica_set.members_to_probe(PROBE_AFTER_S):
                    probes.create_task(self._probe(member))
                for member in self._replica_set.hung_members():
                    self._cut(member)
                await self._clock.sleep(_TICK_S)

    async def _probe(self, member: ReplicaStatus) -> None:
        with self._replica_set.probing(member):
            before_s = member.responded_s
            for _ in range(_ATTEMPTS):
                if await self._engines.answers(member.replica) or member.responded_s > before_s:
                    if member.hung:
                        log.info("replica_answers_again", replica=member.replica.replica_id)
                    self._replica_set.note_response(member)
                    return
            if not member.hung:
                silent_s = round(self._clock.monotonic_s() - member.responded_s, 1)
                log.warning(
                    "replica_hangs", replica=member.replica.replica_id, silent_s=silent_s, calls=member.in_flight
                )
            self._replica_set.note_hung(member)

    def _cut(self, member: ReplicaStatus) -> None:
        """Cancel the calls that another replica can accept. Other calls continue for `hold_s`, and may still be
        answered."""
        is_hold_over = self._clock.monotonic_s() - member.silent_since_s > self._settings.hold_s
        for call in list(member.calls):
            if is_hold_over or call.elsewhere():
                call.cancel()
