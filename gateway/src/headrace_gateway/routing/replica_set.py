"""Status of the replicas, from their heartbeats and this gateway's own calls, the selection of one for a call, and the
detection of hung replicas.

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
    """Status of one replica. Times are in seconds of this process's monotonic clock."""

    replica: Replica
    heartbeat_s: float
    """Time of its last heartbeat."""
    responded_s: float
    """Time at which it last sent data over HTTP."""
    calls_since_s: float = 0.0
    """Time since when the replica has had at least one call in progress."""
    in_flight: int = 0
    strikes: int = 0
    shunned_until_s: float = 0.0
    missing: set[str] = field(default_factory=set)
    """Versions that the replica announced, but answered with 404."""
    hung: bool = False
    """Whether the replica hangs. A hung replica gets no calls until it sends data."""
    is_probed: bool = False
    """Whether a health check is in progress."""
    failed_probes: int = 0
    next_probe_s: float = 0.0
    calls: set[UpstreamCall] = field(default_factory=set)
    """Calls of this gateway to the replica that are in progress."""

    @property
    def silent_since_s(self) -> float:
        """Time since when no calls in progress at the replica have received a byte."""
        return max(self.responded_s, self.calls_since_s)

    @property
    def load(self) -> float:
        """Calls in flight at the replica divided by its capacity.

        The number in its heartbeat includes calls of other gateways but is older than this process's own count, so the
        larger of both is used.
        """
        return max(self.in_flight, self.replica.in_flight) / self.replica.capacity


class ReplicaSet:
    """Replicas of the topic `replicas`. `loaded` returns whether all existing rows of the topic have been read.

    A replica without recent heartbeats is called only if there is no other, because the bus may be the cause. A replica
    that hangs (see `ReplicaWatch`) is not called at all.
    """

    def __init__(self, clock: Clock, loaded: Callable[[], bool]) -> None:
        self._clock = clock
        self._loaded = loaded
        self._members: dict[str, ReplicaStatus] = {}
        self._news = asyncio.Event()

    def update(self, key: str, replica: Replica | None) -> None:
        """Apply a row of the topic. A heartbeat also ends the pause of a replica that failed."""
        if replica is None:
            self._members.pop(key, None)
        else:
            heartbeat_s = self._clock.monotonic_s()
            if not self._loaded():  # a row from before the start: its age by the clocks of both processes
                heartbeat_s -= max(0.0, (self._clock.now() - replica.time).total_seconds())
            member = self._members.setdefault(key, ReplicaStatus(replica, heartbeat_s, heartbeat_s))
            member.replica, member.heartbeat_s, member.shunned_until_s = replica, heartbeat_s, 0.0
            member.next_probe_s = 0.0
            member.missing.clear()
            if len(self._members) > _MEMBERS_MAX:  # a killed replica leaves its last heartbeat on the topic
                del self._members[min(self._members, key=lambda replica_id: self._members[replica_id].heartbeat_s)]
        self.changed()

    def changed(self) -> None:
        """Wake all callers of `wait`."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the set of replicas has changed, or until a replica that failed may be tried
        again. Callers that wait for the same replica return at different times."""
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
        """Choose the replica for one more call. Return None if no replica can accept it now.

        Rendezvous hashing keeps a session at the replica that has its KV cache. When a replica is added or removed, at
        most its own sessions move. A full replica passes its calls to the least loaded one.

        Args:
            needs: The abilities that the replica must announce.
            begun: Whether another replica has begun the answer with this version, so that a draining replica suffices.
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
        """Return the number of slots of all replicas that could accept a call for a version of `model` now."""
        now = self._clock.monotonic_s()
        holders = [member for member in self._members.values() if _versions_of(member, model)]
        able = [member for member in holders if not member.hung and member.shunned_until_s <= now]
        fresh = [member for member in able if now - member.heartbeat_s <= member.replica.ttl_s] or able
        return sum(member.replica.capacity for member in fresh)

    def holders(self, version: str) -> list[Replica]:
        """Return the replicas that have loaded `version` or are loading it, including busy ones."""
        members = [member for member in self._members.values() if version not in member.missing]
        return [member.replica for member in members if member.replica.state_of(version) in _HELD]

    def missing_abilities(self, model: str, needs: frozenset[str]) -> frozenset[str]:
        """Return the abilities in `needs` that no replica with a version of `model` announces together with the others.

        Of all these replicas, the one that lacks the fewest counts. The result is empty without such replicas.
        """
        holders = [m.replica for m in self._members.values() if any(map(m.replica.ready, _versions_of(m, model)))]
        return min((needs.difference(holder.abilities) for holder in holders), key=len, default=frozenset())

    @contextlib.contextmanager
    def calling(self, member: ReplicaStatus, elsewhere: Callable[[], bool]) -> Iterator[UpstreamCall]:
        """Count one call as in progress at the replica inside the context, and yield the object that controls its
        waits."""
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
        """Record that bytes of the replica arrived over HTTP, so it does not hang."""
        member.responded_s = self._clock.monotonic_s()
        member.failed_probes, member.next_probe_s = 0, 0.0
        if member.hung:
            member.hung = False
            self.changed()

    def note_hung(self, member: ReplicaStatus) -> None:
        """Record that the replica failed its health checks, so it hangs.

        Further checks follow at growing intervals, and at its next heartbeat.
        """
        member.next_probe_s = self._clock.monotonic_s() + min(
            _PROBE_RETRY_MAX_S, _PROBE_RETRY_S * 2**member.failed_probes
        )
        member.failed_probes = min(member.failed_probes + 1, 10)
        if not member.hung:
            member.hung = True
            self.changed()

    def members_to_probe(self, silence_s: float) -> list[ReplicaStatus]:
        """Return the replicas that need a health check now: no bytes for `silence_s`, although calls are in progress or
        a heartbeat is due.

        A replica whose last heartbeat is long ago, because it was shut down, is not checked.
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
        """Record that the replica has no free slot. It gets no calls for a short time."""
        self._shun(member, _FULL_BACKOFF_MAX_S)

    def note_missing_version(self, member: ReplicaStatus, version: str) -> None:
        """Record that the replica does not have `version`, although it announced it. This holds until its next
        heartbeat."""
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
"""Seconds without bytes of a replica after which its health is checked (`GET /health`)."""

log = get_logger(__name__)
_TICK_S = 0.25
_ATTEMPTS = 2
"""Attempts of a health check, because this process may be the cause of a single failure."""


class ReplicaWatch:
    """Task that checks the health of silent replicas and cancels the calls of hung ones."""

    def __init__(self, replica_set: ReplicaSet, engines: Engines, settings: UpstreamSettings, clock: Clock) -> None:
        self._replica_set = replica_set
        self._engines = engines
        self._settings = settings
        self._clock = clock

    async def run(self) -> None:
        """Check the health of silent replicas and cancel the calls of hung ones, until the task is cancelled."""
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
        """Cancel the calls of a hung replica that another replica can accept. Its other calls are cancelled after
        `hold_s` without bytes."""
        is_hold_over = self._clock.monotonic_s() - member.silent_since_s > self._settings.hold_s
        for call in list(member.calls):
            if is_hold_over or call.elsewhere():
                call.cancel()
