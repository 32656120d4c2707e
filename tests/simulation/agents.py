"""Agents that call models through a gateway, send feedback and revise it, and retry every request until it succeeds.

An agent that gets no answer makes the same call again, as an SDK does: that is a new turn with the same request. The
ledger records requests, acknowledgements and feedback from outside; the checkers compare the services' data with it.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, Protocol

from headrace_schemas import Event, Feedback, Message, Reward, SessionEnd, Trajectory, Turn
from headrace_schemas.values.ids import response_id, session_key
from tests.support.turns import after, ask, tool, user

EndedBy = Literal["end_call", "feedback", "commit", "idle"]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Acknowledged feedback, and the last turn of its run that had been acknowledged before."""

    feedback: Feedback
    after: Turn


@dataclass(slots=True)
class Run:
    """One run of an agent."""

    name: str
    session_id: str
    session_key: str
    tenant: str
    implied: bool
    """Whether the run shares its session with another run; feedback that lists its turns then distinguishes them."""
    ends_by: EndedBy
    turns: list[Turn] = field(default_factory=list)
    """Acknowledged turns, in order."""
    feedback: list[Acknowledged] = field(default_factory=list)
    """Acknowledged feedback about the run, in the order of acknowledgement."""
    follows_an_end: bool = False
    """Whether the run's session had been ended before the run began."""
    over: bool = False
    """Whether all requests of the run have been acknowledged."""


@dataclass(slots=True)
class Ledger:
    """Requests, acknowledgements and runs by id."""

    runs: list[Run] = field(default_factory=list)
    requested: dict[str, Turn] = field(default_factory=dict)
    """Every turn that was given to a gateway, acknowledged or not."""
    acked: dict[str, Turn] = field(default_factory=dict)
    order: dict[str, list[str]] = field(default_factory=dict)
    """Ids of the acknowledged events of each run, in the order of acknowledgement."""
    critic: list[Reward] = field(default_factory=list)
    """Rewards that a third party published for trajectories."""
    unsaid: int = 0
    """Number of rewards that the third party has not sent yet."""
    poison: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """Reason for which each record that is no event must be dead-lettered, by topic, partition and offset."""
    astray: set[str] = field(default_factory=set)
    """Ids of feedback that refers to turns that do not exist."""


_ENDS: tuple[tuple[EndedBy, float], ...] = (("end_call", 0.35), ("feedback", 0.35), ("idle", 0.22), ("commit", 0.08))


class Publisher(Protocol):
    """Interface of a gateway as its clients see it."""

    async def version(self) -> str:
        """Return the version for a new session; wait until there is one."""

    async def publish(self, event: Event) -> bool:
        """Send an event. Return whether the gateway acknowledged it; False means that the gateway died first."""

    @property
    def settled(self) -> bool:
        """Return whether the spool holds none of the events that the gateway acknowledged."""

    def now(self) -> datetime:
        """Return the time of the gateway's clock."""


class Agent:
    """An agent that plays one run, from its first call to its last feedback."""

    def __init__(
        self, run: Run, publishers: Sequence[Publisher], ledger: Ledger, draw: random.Random, *, evaluation: bool
    ) -> None:
        self._run = run
        self._name = run.name
        self._doors = publishers
        self._publisher = draw.choice(publishers)
        self._ledger = ledger
        self._draw = draw
        self._evaluation = evaluation
        self._feedback_count = 0
        ledger.runs.append(run)

    async def work(self, begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        await self._episode()
        if self._run.ends_by == "end_call" and self._draw.random() < 0.4:
            await self._again()
        self._run.over = True
        for _ in range(self._draw.choice([0, 0, 1, 1, 2, 3])):
            await asyncio.sleep(self._draw.choice([self._draw.uniform(0.1, 1.0), self._draw.uniform(0.5, 15.0)]))
            await self._judge(ends=False)

    async def _again(self) -> None:
        """Continue the session after its end, which starts another run with the same session id."""
        old = self._run
        await asyncio.sleep(self._draw.expovariate(1.0))
        old.over = True
        again = Run(f"{old.name} again", old.session_id, old.session_key, old.tenant, old.implied, old.ends_by)
        again.follows_an_end = True
        self._run = again
        self._ledger.runs.append(again)
        await self._episode()

    async def _episode(self) -> None:
        version = await self._publisher.version()
        messages = [user("the same question" if self._run.implied else f"question {self._run.name}")]
        count = self._draw.randint(1, 3)
        word = self._draw.choice(["right", "right", "wrong", "maybe"])
        for number in range(count):
            text = f"{word} {self._run.name}" if number == count - 1 else f"look {self._run.name} {number}"
            turn = await self._call(messages, text, version)
            messages = after(turn, tool(f"result {number}"))
            await asyncio.sleep(self._draw.expovariate(1.5))
        await self._finish()

    async def _call(self, messages: list[Message], text: str, version: str) -> Turn:
        retry = 0
        while True:
            self._choose_publisher()
            turn = self._turn(messages, text, version, retry)
            self._ledger.requested[turn.turn_id] = turn
            if await self._publisher.publish(turn):
                self._run.turns.append(turn)
                self._ledger.acked[turn.turn_id] = turn
                self._note(turn)
                return turn
            retry += 1

    def _turn(self, messages: list[Message], text: str, version: str, retry: int) -> Turn:
        run, now = self._run, self._publisher.now()
        return ask(
            messages,
            text,
            session=run.session_id,
            tenant=run.tenant,
            turn_id=response_id(run.session_key, uuid.UUID(int=self._draw.getrandbits(128))),
            time=now,
            started_at=now - timedelta(milliseconds=self._draw.randint(1, 200)),
            version=version,
            retry=retry,
            session_source="implicit" if run.implied else "header",
            purpose="eval" if self._evaluation else "train",
            task_id=None if run.implied else f"task {run.name[-1]}",
        )

    async def _finish(self) -> None:
        run = self._run
        if run.implied or run.ends_by == "feedback":
            await self._judge(ends=True)
        elif run.ends_by == "end_call":
            first = self._draw.random() < 0.5
            if first:
                await self._judge(ends=False)
            await self._send(self._end("session"))
            if not first and self._draw.random() < 0.7:
                await self._judge(ends=False)
        elif run.ends_by == "commit":
            await self._judge(ends=False)
            await self._send(self._end("tenant"))
        elif self._draw.random() < 0.7:
            await self._judge(ends=False)

    def _end(self, scope: str) -> SessionEnd:
        run = self._run
        named = {"session_key": run.session_key, "session_id": run.session_id} if scope == "session" else {}
        fields = {"time": self._publisher.now(), "end_id": f"end {run.name}", "scope": scope, "tenant": run.tenant}
        return SessionEnd.model_validate(fields | named | ({"reason": "commit"} if scope == "tenant" else {}))

    async def _judge(self, *, ends: bool) -> None:
        """Send feedback several times, of which the last counts; sometimes withdraw it."""
        run = self._run
        self._choose_publisher()
        self._feedback_count += 1
        withdrawn = self._feedback_count > 1 and self._draw.random() < 0.2
        feedback = Feedback(
            time=self._publisher.now(),
            feedback_id=f"{self._name}/{self._feedback_count}",
            session_key=run.session_key,
            session_id=run.session_id,
            tenant=run.tenant,
            msg_ids=tuple(turn.turn_id for turn in run.turns) if run.implied else (),
            run_id=run.name if run.implied else None,
            value=None if withdrawn else self._draw.choice([-1.0, 0.0, 0.5, 1.0]),
            withdrawn=withdrawn,
            ends_session=ends,
        )
        await self._send(feedback)
        run.feedback.append(Acknowledged(feedback, run.turns[-1]))

    def _choose_publisher(self) -> None:
        """Choose any gateway, or keep the last one while it has spooled events, because two gateways guarantee no
        common order.
        """
        if self._publisher.settled:
            self._publisher = self._draw.choice(self._doors)

    async def _send(self, event: Event) -> None:
        """Send an event until it is acknowledged; a repeated event has no effect."""
        while not await self._publisher.publish(event):
            self._choose_publisher()
        self._note(event)

    def _note(self, event: Event) -> None:
        self._ledger.order.setdefault(self._name, []).append(event.event_id)


def runs(draw: random.Random, count: int) -> list[Run]:
    """Return the agents' runs. The last few runs share sessions in pairs."""
    all_runs = []
    for number in range(count):
        ends_by = draw.choices([name for name, _ in _ENDS], [share for _, share in _ENDS])[0]
        implied = number % 5 == 4
        tenant = f"tenant {number}" if ends_by == "commit" and not implied else "default"
        session_id = f"s{number - number % 10 // 5 * 5}" if implied else f"s{number}"
        session_id = f"shared {number // 10}" if implied else session_id
        key = session_key(tenant, session_id)
        all_runs.append(Run(f"run{number}", session_id, key, tenant, implied, "feedback" if implied else ends_by))
    return all_runs


def verdict(trajectory: Trajectory, revision: int, draw: random.Random, now: datetime) -> Reward:
    """Return the reward that a third party gives a trajectory, or a revision of it."""
    outcome = draw.choices(["scored", "abstained", "parse_error", "withdrawn"], [6, 1, 1, 1])[0]
    return Reward.model_validate(
        {
            "time": now,
            "trajectory_id": trajectory.trajectory_id,
            "session_key": trajectory.session_key,
            "tenant": trajectory.tenant,
            "source": "critic",
            "revision": revision,
            "outcome": outcome,
            "value": draw.choice([0.0, 0.25, 1.0]) if outcome == "scored" else None,
        }
    )
