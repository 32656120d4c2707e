"""Order in which calls are sent to replicas: fair between tenants and sessions, users before evaluations.

A gateway keeps about `WINDOW` times as many choices in flight as all replicas have slots. So a replica always has work,
and a later call does not wait behind all earlier ones. Calls of tenants and sessions with little in flight are sent at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from headrace_gateway.requests.chat_call import ChatCall

WINDOW = 2
BACKGROUND_SHARE = 0.5
"""Load of the replicas (choices per slot) up to which evaluations are sent while calls of users are in progress."""
_LOOK_AHEAD = 32
_RECHECK_S = 0.5
"""Seconds after which a waiting call is checked again, because the number of slots may have changed."""
Tenant = tuple[bool, str]
"""Queue of a tenant: whether it contains evaluations, and the tenant. Queues of users are served first."""


@dataclass(slots=True, eq=False)
class _WaitingCall:
    choices: int
    turn: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    """Waiting calls of one tenant: a queue for each session, served round robin."""

    sessions: OrderedDict[str, deque[_WaitingCall]] = field(default_factory=OrderedDict)

    def add(self, session: str, waiting: _WaitingCall) -> None:
        self.sessions.setdefault(session, deque()).append(waiting)

    def next_session(self, may_send: Callable[[str, int], bool]) -> str | None:
        """Return the waiting session whose next call may be sent to a replica, or None.

        Sessions are tried in the order in which they wait, and only the first `_LOOK_AHEAD` of them.

        Args:
            may_send: function of a session and the number of choices of its next call: whether that may be sent now.
        """
        line = itertools.islice(self.sessions.items(), _LOOK_AHEAD)
        return next((session for session, queue in line if may_send(session, queue[0].choices)), None)

    def pop(self, session: str) -> _WaitingCall:
        queue = self.sessions[session]
        waiting = queue.popleft()
        self.sessions.move_to_end(session)
        if not queue:
            del self.sessions[session]
        return waiting

    def remove(self, session: str, waiting: _WaitingCall) -> None:
        queue = self.sessions.get(session)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self.sessions[session]


class Dispatchers:
    """One dispatcher for each model, because each model has its own replicas. `capacity` returns the number of slots of
    a model's replicas."""

    def __init__(self, capacity: Callable[[str], int]) -> None:
        self._capacity = capacity
        self._by_model: dict[str, Dispatcher] = {}

    def admit(self, call: ChatCall) -> contextlib.AbstractAsyncContextManager[None]:
        """Wait until the call may be sent to a replica, then count it as in flight while the body runs."""
        model = call.target.model
        dispatcher = self._by_model.get(model)
        if dispatcher is None:  # bounded: routing names the models
            dispatcher = self._by_model[model] = Dispatcher(functools.partial(self._capacity, model))
        return dispatcher.admit(call)


class Dispatcher:
    """Queue of one model's calls that wait for a free slot of a replica. Tenants are served in turn.

    `capacity` returns the number of slots of all replicas that can accept calls. If it is 0, calls do not wait here but
    in the relay. The limits of a tenant bound the number of its waiting calls.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._in_flight: Counter[Tenant] = Counter()
        self._sessions: Counter[tuple[Tenant, str]] = Counter()
        self._lines: dict[Tenant, _Line] = {}

    @contextlib.asynccontextmanager
    async def admit(self, call: ChatCall) -> AsyncIterator[None]:
        """Wait until the call may be sent to a replica, then count it as in flight while the body runs."""
        identity, choices = call.identity, call.request.choices
        tenant, session = (call.is_background, identity.tenant), identity.session_key
        await self._wait(tenant, session, choices)
        try:
            yield
        finally:
            self._add(tenant, session, -choices)
            self._dispatch()

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return sum(len(queue) for line in self._lines.values() for queue in line.sessions.values())

    async def _wait(self, tenant: Tenant, session: str, choices: int) -> None:
        if tenant not in self._lines and self._may_send(tenant, session, choices):
            self._add(tenant, session, choices)
            return
        waiting = _WaitingCall(choices, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(tenant, _Line())
        line.add(session, waiting)
        try:
            while not waiting.turn.done():
                self._dispatch()
                await asyncio.wait([waiting.turn], timeout=_RECHECK_S)
        except asyncio.CancelledError:
            if waiting.turn.done():
                self._add(tenant, session, -choices)
            line.remove(session, waiting)
            if not line.sessions and self._lines.get(tenant) is line:
                del self._lines[tenant]
            self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Release all waiting calls that may be sent now, each time one of the tenant with the fewest choices in
        flight."""
        blocked: set[Tenant] = set()
        while True:
            tenants = [tenant for tenant in self._lines if tenant not in blocked]
            if not tenants:
                return
            tenant = min(tenants, key=lambda name: (name[0], self._in_flight[name]))
            line = self._lines[tenant]
            session = line.next_session(functools.partial(self._may_send, tenant))
            if session is None:
                blocked.add(tenant)
                continue
            waiting = line.pop(session)
            if not line.sessions:
                del self._lines[tenant]
            self._add(tenant, session, waiting.choices)
            waiting.turn.set_result(None)

    def _may_send(self, tenant: Tenant, session: str, choices: int) -> bool:
        capacity = self._capacity()
        if not capacity:
            return True
        users = sum(count for (background, _), count in self._in_flight.items() if not background)
        background = self._in_flight.total() - users
        if tenant[0]:
            return self._may_send_evaluation(capacity, users, background, choices)
        window = WINDOW * capacity
        if users + choices <= window:
            return True
        tenants = {name for name in (*self._in_flight, *self._lines) if not name[0]} | {tenant}
        if len(tenants) > 1:
            return self._in_flight[tenant] + choices <= max(choices, window // len(tenants))
        return not self._sessions[tenant, session] and users + choices <= 2 * window

    def _may_send_evaluation(self, capacity: int, users: int, background: int, choices: int) -> bool:
        """Return whether an evaluation call may be sent now, given the choices in flight of users and of evaluations.

        If no evaluation call is in flight, one is always sent, so that a gate run also ends under permanent load.
        """
        if not background:
            return True
        waiting_users = any(not name[0] for name in self._lines)
        if users or waiting_users:
            return not waiting_users and users + background + choices <= capacity * BACKGROUND_SHARE
        return background + choices <= WINDOW * capacity

    def _add(self, tenant: Tenant, session: str, choices: int) -> None:
        self._in_flight[tenant] += choices
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]
        self._sessions[tenant, session] += choices
        if not self._sessions[tenant, session]:
            del self._sessions[tenant, session]
