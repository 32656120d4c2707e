"""A console with the middleware of its server but without network, and HTTP clients that are logged in."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2

from headrace_console.access.headers import SecurityHeaders
from headrace_console.app import Console
from headrace_console.settings import ConsoleSettings, UserSettings
from headrace_console.users import Role
from headrace_runtime.clock import SystemClock
from headrace_runtime.http.guard import WebGuard
from headrace_runtime.settings.sections import BusSettings, Common, DatabaseSettings, SecuritySettings
from tests.support.remembered import make_tables

ORIGIN = "http://127.0.0.1:8040"
BY_PAGE = {"origin": ORIGIN, "sec-fetch-site": "same-origin"}
"""Headers of a request that a page of the console causes."""


class TestClock(SystemClock):
    """Clock that a test advances."""

    __test__ = False

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._began_at = datetime.now(UTC) - timedelta(seconds=self.now_s)

    def monotonic_s(self) -> float:
        return self.now_s

    def now(self) -> datetime:
        return self._began_at + timedelta(seconds=self.now_s)


@dataclass
class Stand:
    """Console of one test, with one user for each role; the token of a user is the name of the role.

    `async with` creates the tables and closes the console after the block.
    """

    data_dir: Path
    read_only: bool = False
    urls: dict[str, str] = field(default_factory=dict)
    clock: TestClock = field(default_factory=TestClock)
    bus: BusSettings = field(default_factory=BusSettings)
    tenants: tuple[str, ...] = ()
    database: DatabaseSettings = field(default_factory=DatabaseSettings)

    def __post_init__(self) -> None:
        (self.data_dir / "run").mkdir(parents=True, exist_ok=True)
        roles: tuple[Role, ...] = ("rater", "viewer", "reviewer", "operator")
        users = tuple(
            UserSettings(name=role, sha256=hashlib.sha256(role.encode()).hexdigest(), role=role, tenants=self.tenants)
            for role in roles
        )
        self.settings = ConsoleSettings(users=users, read_only=self.read_only, urls=self.urls)
        self.console = Console(
            Common(data_dir=self.data_dir, bus=self.bus, database=self.database), self.settings, self.clock
        )

    async def __aenter__(self) -> Stand:
        await make_tables(self.console.database, "headrace_console")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.console.close()

    def client(self) -> httpx2.AsyncClient:
        """Return a client without a session, which follows no redirects."""
        guarded = WebGuard(SecurityHeaders(self.console.app), self.settings, SecuritySettings(), accepts_forms=True)
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=guarded), base_url=ORIGIN)

    async def signed_in(self, role: Role = "viewer") -> httpx2.AsyncClient:
        """Return a client that is logged in as the user with `role`."""
        await make_tables(self.console.database, "headrace_console")
        client = self.client()
        reply = await client.post("/login", data={"token": role}, headers=BY_PAGE)
        assert reply.status_code == 303, reply.text
        return client


async def form_token(client: httpx2.AsyncClient) -> str:
    """Return the form token of the client's session, as a page contains it."""
    match = re.search(r'name="form_token" value="([0-9a-f]{64})"', (await client.get("/")).text)
    assert match is not None
    return match[1]
