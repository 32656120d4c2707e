"""List of sessions with filters, and redirects from a response id, a session id, a version or a task to its page."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import get_args
from urllib.parse import quote, urlencode

from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import RedirectResponse, Response

from headrace_console.pages.page import InvalidParameter, NotFound, Page, Visit, choice_of
from headrace_console.read_model import queries, tables
from headrace_console.read_model.queries import SESSION_TURNS_MAX
from headrace_console.read_model.session_list import Filter, Position, SessionPage, session_page
from headrace_console.settings import User
from headrace_runtime.clock import epoch_ms, from_epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.events.feedback import Outcome
from headrace_schemas.values.ids import session_key
from headrace_schemas.values.text import plain_number, printable

FILTERS = ("model", "version", "arm", "thumb", "reward_max", "outcome", "status", "edited", "task", "since")
THUMBS = {"up": 1, "neutral": 0, "down": -1}
CHOICES = {
    "arm": ("candidate", "control"),
    "thumb": tuple(THUMBS),
    "outcome": tuple(name for name in get_args(Outcome) if name in tables.FLAGS),
    "status": tables.STATUSES,
    "edited": ("yes",),
}
LIST_CHOICES = {**CHOICES, "evaluation": ("hidden", "shown")}
"""Choices of the list's filters. A review queue cannot hide evaluation sessions, so `CHOICES` has no such filter."""
_POSITIONS = ("after", "before")
_POSITION = re.compile(r"([0-9]{1,15})\.([0-9]{1,18})")
_KEY = re.compile(r"[a-z2-7]{16}")
_TAIL = re.compile(r"[0-9a-f]{32}")


async def sessions(visit: Visit) -> Response:
    """List the sessions of a tenant, the newest first."""
    query = visit.parameters(*FILTERS, "evaluation", "tenant", *_POSITIONS)
    parameters = {name: text for name, text in query.items() if text}
    evaluation = parameters.setdefault("evaluation", "hidden")
    selection = problem = None
    try:
        selection = parse_filter(parameters)
    except InvalidParameter as error:
        problem = str(error)
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, parameters)
        page = SessionPage((), None, None, None)
        if tenant is not None and selection is not None:
            page = await session_page(tx, tenants[tenant], selection)
        texts = await queries.texts_of(tx, {row[name] for row in page.rows for name in ("model", "version")})
    return visit.render(
        "sessions.html",
        status=200 if problem is None else 400,
        problem=problem,
        rows=[_session(row, texts) for row in page.rows],
        tenants=list(tenants),
        tenant=tenant,
        choices=LIST_CHOICES,
        parameters=parameters,
        is_filtered=any(name in parameters for name in FILTERS),
        with_evaluation=_first_page(parameters, evaluation="shown") if evaluation == "hidden" else None,
        following=_page_at(parameters, after=page.after),
        previous=_page_at(parameters, before=page.before),
        newest=_first_page(parameters) if any(name in parameters for name in _POSITIONS) else None,
        is_backward="before" in parameters,
        queue_query=_queue_query(parameters) if visit.user.has_role("reviewer") else None,
        searched_until=from_epoch_ms(page.searched_until_ms) if page.searched_until_ms is not None else None,
    )


async def turn(visit: Visit) -> Response:
    """Redirect from a response id to the page of its session, at the turn."""
    visit.parameters()
    async with visit.transaction() as tx:
        address = await _turn_address(tx, visit.user, visit.path("turn_id"))
    if address is None:
        raise NotFound
    return RedirectResponse(address, 303)


async def find(visit: Visit) -> Response:
    """Redirect to the page of the turn, session, version, task or model that the parameter `q` names.

    Raises:
        Refused: the user may see no record of this name (404).
    """
    text = visit.parameters("q").get("q", "").strip()
    if not text:
        return RedirectResponse("/sessions", 303)
    async with visit.transaction() as tx:
        address = await _turn_address(tx, visit.user, text)
        tenants = await queries.tenants(tx, visit.user.scope)
        keys = [text] if _KEY.fullmatch(text) else []
        keys += [session_key(tenant, text) for tenant in tenants]
        for key in keys:
            if address is None and await queries.session_of(tx, visit.user.scope, key) is not None:
                address = f"/s/{key}"
        if address is None:
            address = await _version_address(tx, text)
        for tenant, number in tenants.items():
            if address is None and await queries.has_task(tx, number, text):
                address = f"/sessions?{urlencode({'task': text, 'evaluation': 'shown', 'tenant': tenant})}"
    if address is None:
        address = await _model_address(visit, text)
    if address is None:
        searched = "response ids, sessions, models, versions (12 digits or more) and tasks"
        raise Refused(404, "not_found", f"{printable(text)!r}: not found among {searched}", "q")
    return RedirectResponse(address, 303)


def _first_page(parameters: Mapping[str, str], **changed: str) -> str:
    """Return the URL query of the first page of the session list, with some parameters changed."""
    selection = {name: text for name, text in parameters.items() if name not in _POSITIONS}
    return f"?{urlencode(selection | changed)}"


def _page_at(parameters: Mapping[str, str], **positions: Position | None) -> str | None:
    """Return the URL query for the page of the list that begins or ends at a position, or None if there is no such
    page.

    Args:
        parameters: query parameters of the current page, for example its filters.
        positions: `after` or `before`, with the position in the list; None where the list ends.
    """
    texts = {name: "{}.{}".format(*position) for name, position in positions.items() if position is not None}
    return _first_page(parameters, **texts) if texts else None


def _queue_query(parameters: Mapping[str, str]) -> str:
    """Return the URL query that prefills the form of a new review queue with the filter of the session list."""
    selection = {name: text for name, text in parameters.items() if name not in ("evaluation", *_POSITIONS)}
    return f"?{urlencode(selection)}" if selection else ""


async def _model_address(visit: Visit, text: str) -> str | None:
    """Return the address of the model of this name, or None if the registry has no such model or does not answer."""
    with contextlib.suppress(Refused):
        if any(model.id == text for model in await visit.parts.registry.models()):
            return f"/models/{quote(text, safe='')}"
    return None


async def _version_address(tx: AsyncConnection, text: str) -> str | None:
    """Return the address of the version that `text` names, or None if there is none.

    If several versions match, return the address of the list of their sessions.
    """
    versions = await queries.texts_of(tx, await queries.numbers_of_versions(tx, text))
    if len(versions) == 1:
        model, _, digest = versions.popitem()[1].partition("@")
        return f"/models/{quote(model, safe='')}/{quote(digest, safe='')}"
    return f"/sessions?{urlencode({'version': text, 'evaluation': 'shown'})}" if versions else None


async def _turn_address(tx: AsyncConnection, user: User, turn_id: str) -> str | None:
    """Return the URL path of the session page that shows a turn, or None if this user may see no turn of that id.

    Args:
        turn_id: response id, or its last 32 hexadecimal digits.
    """
    target = await queries.turn_of(tx, user.scope, turn_id)
    if target is None and _TAIL.fullmatch(turn_id):
        target = await queries.turn_of_tail(tx, user.scope, turn_id)
    if target is None:
        return None
    session, turn = target
    address = f"/s/{quote(session['session_key'])}"
    is_earlier = await queries.has_turns_after(tx, turn, SESSION_TURNS_MAX)
    query = f"?before={turn['at_ms']}.{turn['id'] + 1}" if is_earlier else ""
    return f"{address}{query}#t-{turn['id']}"


async def chosen_tenant(
    tx: AsyncConnection, user: User, parameters: Mapping[str, str]
) -> tuple[dict[str, int], str | None]:
    """Return the tenants that a user may see, and the tenant that the parameter `tenant` names, by default the first.

    The second value is None if there is no tenant yet.

    Raises:
        NotFound: the user may not see the tenant of the parameter.
    """
    tenants = await queries.tenants(tx, user.scope)
    tenant = parameters.get("tenant") or next(iter(tenants), None)
    if tenant is not None and tenant not in tenants:
        raise NotFound
    return tenants, tenant


def parse_position(text: str) -> tuple[int, int]:
    """Parse a position in a list, which has the form `<ms>.<number>`. Raises `Refused` 400."""
    match = _POSITION.fullmatch(text)
    if match is None:
        raise Refused(
            400, "invalid_position", f"{printable(text)!r}: is no position in the list; follow a link of the page"
        )
    return int(match[1]), int(match[2])


def parse_filter(parameters: dict[str, str]) -> Filter:
    """Return the filter of the session list that URL query parameters describe.

    Raises:
        Refused: 400 for a value that is not permitted.
    """
    for name, choices in LIST_CHOICES.items():
        choice_of(parameters, name, choices)
    since = reward = None
    if "since" in parameters:
        try:
            since = epoch_ms(parse_time(parameters["since"]))
        except ValueError:
            problem = "must be a time in UTC such as 27 Nov 2026 07:30 or 2026-11-27T07:30"
            raise InvalidParameter("began since", parameters["since"], problem) from None
    if "reward_max" in parameters:
        try:
            reward = plain_number(float(parameters["reward_max"]))
        except ValueError:
            raise InvalidParameter("reward at most", parameters["reward_max"], "must be a finite number") from None
    positions = {name: parse_position(parameters[name]) for name in _POSITIONS if name in parameters}
    if len(positions) > 1:
        raise InvalidParameter("before", parameters["before"], "must not be combined with after")
    return Filter(
        model=parameters.get("model"),
        version=parameters.get("version"),
        arm=parameters.get("arm"),
        thumb=THUMBS.get(parameters.get("thumb", "")),
        reward_max=reward,
        outcome=parameters.get("outcome"),
        status=parameters.get("status"),
        task=parameters.get("task"),
        since_ms=since,
        edited="edited" in parameters,
        hides_evaluation=parameters.get("evaluation") == "hidden",
        **positions,
    )


def parse_time(text: str) -> datetime:
    """Parse a time in UTC, in the format of the pages or in ISO 8601. Raises `ValueError` for other texts."""
    plain = text.strip().removesuffix("UTC").strip()
    for form in ("%d %b %Y %H:%M:%S", "%d %b %Y %H:%M", "%d %b %Y"):
        with contextlib.suppress(ValueError):
            return datetime.strptime(plain, form).replace(tzinfo=UTC)
    time = datetime.fromisoformat(plain)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _session(row: queries.Row, texts: dict[int, str]) -> dict[str, object]:
    """Return the values that the template of the session list shows for one session."""
    thumb = next((name for name, value in THUMBS.items() if value == row["thumb"]), "")
    statuses = [f"{row[kind]} {kind}" for kind in tables.STATUSES if row[kind]]
    return {
        **row,
        "began": from_epoch_ms(row["began_ms"]),
        "last": from_epoch_ms(row["last_ms"]),
        "title": row["title"] or row["session_id"] or row["session_key"],
        "version": texts.get(row["version"], ""),
        "thumb": thumb,
        "status": ", ".join(statuses),
        "flags": ", ".join(_flag_label(name, row) for name, bit in tables.FLAGS.items() if row["flags"] & bit),
    }


def _flag_label(flag: str, row: queries.Row) -> str:
    """Return the label of a flag of a session.

    That of edits has their number, and that of an outcome of a reward source begins with "reward source: ".
    """
    if flag == "edited" and (edits := json.loads(row["edits"] or "[]")):
        return f"{len(edits)} edit{'' if len(edits) == 1 else 's'}"
    words = "evaluation" if flag == "eval" else flag.replace("_", " ")
    return f"reward source: {words}" if flag in CHOICES["outcome"] else words


PAGES = (
    Page("/sessions", sessions),
    Page("/find", find),
    Page("/r/{turn_id:path}", turn),
)
