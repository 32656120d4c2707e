"""Invariants of a rollout, whichever process dies, and users whose calls are checked.

The invariants are about single routings, their sequence, the decisions, the calls, and the bus compared with the
database. Each function returns the violations as texts. `Visitors` plays new sessions and regular ones and gives
feedback by the answering version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx2

from headrace_registry.storage import rollout_store, store
from headrace_registry.versions import routing as routings
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import decode
from headrace_runtime.storage.database import Database
from headrace_schemas import ModelEvent, Reward, Routing, Turn
from headrace_schemas.events.routing import TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.rollouts.rig import RolloutRig

_USERS = 4
_REGULARS = 4
"""Number of sessions that start in the rollout and return again and again, so that some meet any withdrawn version."""
_PAUSE_S = 0.05
_AGAIN_S = 0.2
_PATIENCE_S = 120.0
"""Seconds for which a client retries after a refused or broken connection, as clients of such a gateway do."""


@dataclass(frozen=True, slots=True)
class Call:
    """An answered call, with its times on the clock `time.monotonic`."""

    session: str
    began_s: float
    ended_s: float
    version: str


class Visitors:
    """Users of a model; they make calls during the block `visiting()`.

    `rewards` returns the share of successful sessions of a version.
    """

    def __init__(self, rig: RolloutRig, model: str, rewards: Callable[[str], float]) -> None:
        self._rig = rig
        self._model = model
        self._rewards = rewards
        self._open = True
        self._begun = False
        self.calls: list[Call] = []
        self.failed: list[str] = []
        """Errors of failed calls."""
        self.tried_again = 0
        self.turns: dict[str, Turn] = {}
        """First captured turn of each session, including the sessions of shadows."""

    @contextlib.asynccontextmanager
    async def visiting(self) -> AsyncIterator[None]:
        async with httpx2.AsyncClient(timeout=_PATIENCE_S) as http:
            tasks = [asyncio.create_task(self._regular(http, n)) for n in range(_REGULARS)]
            tasks += [asyncio.create_task(self._user(http, n)) for n in range(_USERS)]
            judge = asyncio.create_task(self._judge())
            try:
                yield
            finally:
                self._open = False
                await asyncio.gather(*tasks)
                judge.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await judge

    async def _user(self, http: httpx2.AsyncClient, number: int) -> None:
        count = 0
        while self._open:
            count += 1
            await self._call(http, f"{self._model}-{number}-{count}")
            await asyncio.sleep(_PAUSE_S)

    async def _regular(self, http: httpx2.AsyncClient, number: int) -> None:
        while self._open:
            routing = self._rig.routing(self._model)
            self._begun = self._begun or bool(routing and routing.split)
            if self._begun:
                await self._call(http, f"{self._model}-regular-{number}")
            await asyncio.sleep(4 * _PAUSE_S)

    async def _call(self, http: httpx2.AsyncClient, session: str) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": f"hello from {session}"}]}
        url, headers = f"{self._rig.gateway.url}/v1/chat/completions", {"X-Session-Id": session}
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            began_s = time.monotonic()
            try:
                answer = await http.post(url, json=body, headers=headers)
            except httpx2.TransportError as error:
                if began_s > until_s:
                    self.failed.append(f"{session}: {error!r}")
                    return
                self.tried_again += 1
                await asyncio.sleep(_AGAIN_S)
                continue
            if answer.status_code == 200:
                self.calls.append(Call(session, began_s, time.monotonic(), answer.json()["model"]))
            else:
                self.failed.append(f"{session}: {answer.status_code} {answer.text[:300]}")
            return

    async def _judge(self) -> None:
        """Send a reward for each session once its turn is on the bus."""
        reader = consumer(self._rig.common.bus, "test-turns")
        await reader.start()
        try:
            await reader.seek_to_end(*await assign_all(reader, Turn.topic))
            async for message in reader:
                event = (await decode(record_of(message), self._rig.blobs)).event
                if isinstance(event, Turn) and event.model == self._model and event.session_key not in self.turns:
                    self.turns[event.session_key] = event
                    await self._rig.producer.send(self._verdict(event))
        finally:
            await reader.stop()

    def _verdict(self, turn: Turn) -> Reward:
        dice = int.from_bytes(hashlib.sha256(turn.session_key.encode()).digest()[:4], "big") / 2**32
        value = float(dice < self._rewards(turn.version))
        about = {"trajectory_id": f"t-{turn.session_key}", "session_key": turn.session_key, "source": "function:f"}
        return Reward.model_validate({"time": utcnow(), "value": value, **about})


def key_of(session: str) -> str:
    """Return the session key that the gateway computes for `session`."""
    return ids.session_key("default", session)


SOON_S = 10.0
"""Seconds within which every process must have received a decision, on a busy machine."""


def contradictions(routing: Routing) -> list[str]:
    """Return contradictions between champion, arms, withdrawn and served versions of one routing."""
    arms = [arm.version for arm in routing.split.arms] if routing.split else []
    served = {routed.version for routed in routing.serve}
    canary = routing.aliases.get("canary")
    by_problem: dict[str, set[str | None]] = {
        "an arm or an alias is withdrawn": {
            routed for routed in (*arms, *routing.aliases.values()) if routed in routing.withdrawn
        },
        "the champion is an arm": {routing.champion} & set(arms),
        "somebody who has users is not served": {
            routed for routed in (*arms, *routing.aliases.values()) if routed not in served
        },
        "a name is of somebody who is not served": {
            routed for routed in routing.names.values() if routed not in served
        },
        "arms without a canary": {routed for routed in arms if canary is None},
        "the canary is the champion": {routing.champion} & {canary or ""},
        "the canary has no arm": {routed for routed in (canary,) if arms and canary not in arms},
    }
    return [
        f"revision {routing.revision}: {problem}: {sorted(map(str, versions))}"
        for problem, versions in by_problem.items()
        if versions
    ]


def in_a_row(seen: Sequence[Routing]) -> list[str]:
    """Check the routings of one model in their order: the revision grows, each new champion was a candidate before, and
    a withdrawal is final.
    """
    problems = [problem for routing in seen for problem in contradictions(routing)]
    by_revision: dict[int, Routing] = {}
    for routing in seen:
        before = by_revision.setdefault(routing.revision, routing)
        if before != routing:
            problems.append(f"revision {routing.revision} was said twice and differently")
    distinct = list(by_revision.values())
    for routing, then in pairwise(distinct):
        if then.revision <= routing.revision:
            problems.append(f"revision {then.revision} came after {routing.revision}")
        if routing.champion and then.champion != routing.champion and then.champion != routing.aliases.get("canary"):
            problems.append(f"revision {then.revision}: {then.champion} is champion and was not on trial")
        back = set(routing.withdrawn) - set(then.withdrawn)
        if back:
            problems.append(f"revision {then.revision}: {sorted(back)} were withdrawn and are back")
        problems += _moved(routing, then)
    return problems


def _moved(later: Routing, then: Routing) -> list[str]:
    """Return a problem for each candidate whose sessions changed between two routings: salt and slot must stay the
    same.
    """
    before = {arm.version: arm for arm in later.split.arms} if later.split else {}
    after = {arm.version: arm for arm in then.split.arms} if then.split else {}
    return [
        f"revision {then.revision}: {version} has other users"
        for version in before.keys() & after.keys()
        if later.split is not None
        and then.split is not None
        and (later.split.salt, before[version].slot) != (then.split.salt, after[version].slot)
    ]


def repeated_decisions(decisions: Sequence[ModelEvent]) -> list[str]:
    """Return a problem for each step or decision that several different events record."""
    steps = Counter(
        (decision.version, decision.rollout.kind, decision.rollout.stage) for decision in decisions if decision.rollout
    )
    plain = Counter(
        (decision.version, decision.decision)
        for decision in decisions
        if not decision.rollout and decision.decision != "evaluated"
    )
    return [f"{number} times: {action}" for counts in (steps, plain) for action, number in counts.items() if number > 1]


def heard_by(calls: Iterable[Call], split: TrafficSplit, champion: str, withdrawn: str, told_s: float) -> float | None:
    """Return the time at which the gateway had applied the decision to withdraw a version, or None.

    This is the end of the first call after `told_s` of a new session that the old split assigns to the withdrawn
    version but that another version answers. Sessions from before the rollout do not count.
    """
    sessions: set[str] = set()
    delays_s = []
    for call in calls:
        fresh = call.session not in sessions and call.began_s > told_s
        if fresh and call.version != withdrawn and assign_unit(split, champion, key_of(call.session))[0] == withdrawn:
            delays_s.append(call.ended_s)
        sessions.add(call.session)
    return min(delays_s, default=None)


def answered_by(calls: Iterable[Call], withdrawn: str, heard_s: float) -> list[str]:
    """Return a problem for each call that began after `heard_s` and that the withdrawn version answered."""
    late = [call for call in calls if call.version == withdrawn and call.began_s > heard_s]
    return [f"{call.session} was answered by {withdrawn} {call.began_s - heard_s:.1f} s after" for call in late]


async def as_stored(
    database: Database, model: str, ended: str, routing: Routing | None, decisions: Sequence[ModelEvent]
) -> list[str]:
    """Check that bus and database agree at the end, and that the rollout of the version `ended` is over."""
    if not decisions:
        return [f"nothing was decided about {model}"]
    async with database.transaction() as tx:
        record = await store.load_model(tx, model)
        versions = [version for version in await store.all_versions(tx) if version.model == model]
        under_way = await rollout_store.rollouts_under_way(tx, model)
        decided = await store.decisions(tx, [version.version for version in versions])
        expected = await routings._current_routing(tx, decisions[-1].time, record) if record else None
    if record is None or routing is None or expected is None:
        return [f"nothing is known of {model}"]
    problems = []
    if routings._comparable(routing) != routings._comparable(expected):
        problems.append(f"the bus has {routing}, the tables say {expected}")
    if {version.decision_id for version in decided} != {version.decision_id for version in decisions}:
        problems.append(f"{len(decided)} decisions are stored, {len(decisions)} were told")
    if ended in {version.version for version in under_way}:
        problems.append(f"{ended} is still under way")
    promoted = [version.version for version in decisions if version.decision == "promoted"]
    if promoted and promoted[-1] != record.champion:
        problems.append(f"{promoted[-1]} was promoted last, and {record.champion} is champion")
    out = {version.version for version in versions if version.state == "withdrawn"}
    if out != set(routing.withdrawn):
        problems.append(f"withdrawn are {sorted(out)}, the bus says {sorted(routing.withdrawn)}")
    return problems
