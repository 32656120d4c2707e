"""Tests of every console route: lower roles, cross-site requests, other hosts, and records of other tenants."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import httpx2
import pytest

from headrace_console.pages.page import Page
from headrace_console.read_model import tables
from headrace_console.users import Role
from headrace_schemas.values.ids import response_id, session_key
from tests.support.account_events import letter
from tests.unit.console.review import Bus, bus, make_queue, next_item, session_of, token_of
from tests.unit.console.support import BY_PAGE, ORIGIN, Stand, form_token

__all__ = ["bus"]
ROLES: tuple[Role, ...] = get_args(Role)
_PARAMETER = re.compile(r"\{([a-z_]+)(?::path)?\}")
_FOREIGN_PAGES: tuple[dict[str, str], ...] = (
    {"origin": "http://evil.example", "sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {},
    {"sec-fetch-site": "same-site"},
    {"origin": "http://127.0.0.1:9", "sec-fetch-site": "same-site"},
)


@pytest.fixture
async def stand(tmp_path: Path, bus: Bus) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as opened:
        bus.stand = opened
        yield opened


def pages(stand: Stand) -> list[Page]:
    """Return every page that needs a session, except the page for unknown addresses and the event stream."""
    return [page for page in stand.console.pages if page.path not in ("/{path:path}", "/live")]


def address(page: Page, **values: str) -> str:
    return _PARAMETER.sub(lambda name: values.get(name[1], "x"), page.path)


async def request(client: httpx2.AsyncClient, page: Page, headers: dict[str, str], **values: str) -> httpx2.Response:
    token = await token_of(client)
    data = {"form_token": token} if page.method == "POST" else None
    return await client.request(page.method, address(page, **values), data=data, headers=headers)


async def test_every_route_refuses_every_lower_role(stand: Stand) -> None:
    refused = 0
    for role in ROLES:
        client = await stand.signed_in(role)
        token = re.search(r'name="form_token" value="([0-9a-f]{64})"', (await client.get("/review")).text)
        assert token is not None
        for page in pages(stand):
            if ROLES.index(page.role) > ROLES.index(role):
                data = {"form_token": token[1]} if page.method == "POST" else None
                reply = await client.request(page.method, address(page), data=data, headers=BY_PAGE)
                assert reply.status_code == 403, (role, page.path)
                refused += 1
    assert refused >= len([page for page in pages(stand) if page.role != "rater"])


async def test_every_route_refuses_another_host_and_every_change_of_a_foreign_page(stand: Stand) -> None:
    client, attempts = await stand.signed_in("operator"), 0
    data = {"form_token": await form_token(client), "reason": "x"}
    for page in pages(stand):
        body = data if page.method == "POST" else None
        for host in ("evil.example", "evil.example:8040", "127.0.0.1.evil.example"):
            headers = {**BY_PAGE, "host": host}
            reply = await client.request(page.method, address(page), data=body, headers=headers)
            assert reply.status_code in (400, 403, 421), (page.path, host)
            attempts += 1
        if page.method == "POST":
            for foreign in _FOREIGN_PAGES:
                assert (await client.post(address(page), data=body, headers=foreign)).status_code == 403, page.path
                attempts += 1
            replayed = {**data, "form_token": "0" * 64}
            assert (await client.post(address(page), data=replayed, headers=BY_PAGE)).status_code == 403, page.path
            reply = await client.get(address(page), headers={"origin": ORIGIN})
            assert reply.status_code in (404, 405, 200), "a change is never a GET"
    assert attempts > 3 * len(pages(stand))


async def test_foreign_and_unknown_ids_answer_alike_on_every_route(tmp_path: Path, bus: Bus) -> None:
    """Request records of another tenant, and records that do not exist, by every parameter of every route."""
    other_key, unknown = session_key("other", "private-1"), session_key("default", "nobody")
    async with Stand(tmp_path) as everywhere:
        bus.stand = everywhere
        events = session_of(1, tenant="other")
        await bus.add([*session_of(2), *events, letter(events[0], "collector")])
        reviewer, queue = await make_queue(everywhere, tenant="other")
        item = (await next_item(reviewer, queue)).rpartition("/")[2]
        turn = (await reviewer.get(f"/r/{events[0].event_id}")).headers["location"].partition("#t-")[2]
    foreign = {
        "key": other_key, "turn": turn, "turn_id": events[0].event_id, "queue": queue.rpartition("/")[2], "item": item,
    }  # fmt: skip
    absent = {"key": unknown, "turn": "999", "turn_id": response_id(unknown), "queue": "999", "item": "0" * 32}
    compared = 0
    async with Stand(tmp_path, tenants=("default",)) as stand:
        bus.stand = stand
        client = await stand.signed_in("operator")
        for page in pages(stand):
            names = _PARAMETER.findall(page.path)
            if not set(names) & foreign.keys():
                continue
            replies = [await request(client, page, BY_PAGE, **values) for values in (foreign, absent)]
            texts = {reply.text.replace(reply.url.path, "") for reply in replies}
            assert {reply.status_code for reply in replies} == {404}, page.path
            assert len(texts) == 1, page.path
            compared += 1
        for path in ("/find?q=", "/compare?left="):
            replies = [await client.get(path + values["turn_id"]) for values in (foreign, absent)]
            assert len({reply.status_code for reply in replies}) == 1
        listed = await client.get("/sessions")
        assert other_key not in listed.text
        assert (await client.get("/sessions?tenant=other")).status_code == 404
        assert (await client.get("/dead-letters")).status_code == 403, "letters are of all tenants"
    assert compared >= 10
    assert tables.LETTER_STATES
