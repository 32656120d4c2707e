"""Pages of dead letters by group, with dry run, retry and discard of many letters at once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from urllib.parse import urlencode

from starlette.responses import Response

from headrace_console.dead_letters import (
    GROUPED_MAX,
    LetterGroup,
    PlannedLetter,
    letter_groups,
    letter_of,
    letters_of,
)
from headrace_console.pages.page import NotFound, Page, Visit, choice_of
from headrace_console.pages.sessions import parse_position
from headrace_console.read_model import tables
from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queries import Row, position_of
from headrace_runtime.clock import from_epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas import DeadLetter

PORTION = 200
"""Largest number of letters that one request retries or discards."""
PLANNED_MAX = 10_000
_LIST_ROWS = 100
_GROUP = ("service", "topic", "reason")
_FORM_FIELDS = frozenset({*_GROUP, "kind", "after"})
_DIGITS = re.compile(r"[0-9]+")


async def groups(visit: Visit) -> Response:
    """List the groups of dead letters in one state, with the number of letters in each group."""
    _check_scope(visit)
    state = choice_of(visit.parameters("state"), "state", tables.LETTER_STATES)
    async with visit.transaction() as tx:
        groups = await letter_groups(tx, state)
    return visit.render(
        "dead_letters.html",
        state=state,
        states=tables.LETTER_STATES,
        groups=[(group, _address(group, state=state), _period(group)) for group in groups],
        is_cut=sum(group.letters for group in groups) >= GROUPED_MAX,
    )


async def group(visit: Visit) -> Response:
    """List the dead letters of a group, the oldest first."""
    _check_scope(visit)
    parameters = visit.parameters(*_GROUP, "state", "after")
    group, state = _group(parameters), choice_of(parameters, "state", tables.LETTER_STATES)
    after = parse_position(parameters["after"]) if parameters.get("after") else None
    async with visit.transaction() as tx:
        rows = await letters_of(tx, group, state, after=after, limit=_LIST_ROWS + 1)
    following = None
    if len(rows) > _LIST_ROWS:
        following = _address(group, state=state, after=_position(rows[_LIST_ROWS - 1]))
    return visit.render(
        "dead_letter_group.html",
        group=group,
        state=state,
        letters=[_letter(row) for row in rows[:_LIST_ROWS]],
        following=following,
        plan=f"/dead-letters/plan?{urlencode(_query(group))}",
        can_change=visit.user.has_role("operator") and state == "open",
    )


async def letter(visit: Visit) -> Response:
    """Show a dead letter with the refused record."""
    _check_scope(visit)
    visit.parameters()
    async with visit.transaction() as tx:
        row = await letter_of(tx, visit.path("letter"))
    if row is None:
        raise NotFound
    event = await visit.parts.records.read_row(DeadLetter.topic, row)
    return visit.render(
        "dead_letter.html",
        row=_letter(row),
        letter=event if isinstance(event, DeadLetter) else None,
        value=event.value.decode("utf-8", "replace") if isinstance(event, DeadLetter) else "",
    )


async def plan(visit: Visit) -> Response:
    """Show the dry run of a retry: how many letters of a group can be retried, and the problems of the others."""
    _check_scope(visit)
    group = _group(visit.parameters(*_GROUP))
    async with visit.transaction() as tx:
        rows = await letters_of(tx, group, "open", after=None, limit=PLANNED_MAX)
    problems: Counter[str] = Counter()
    retriable = 0
    # Sorted by partition and offset, so that each read is of one partition: letters of one time are on all partitions.
    async for planned in visit.parts.letters.plan_retry(sorted(rows, key=position_of)):
        if planned.problem is None:
            retriable += 1
        else:
            problems[_DIGITS.sub("0", planned.problem)[:200]] += 1
    return visit.render(
        "dead_letter_plan.html",
        group=group,
        letters=len(rows),
        retriable=retriable,
        problems=problems.most_common(20),
        planned_max=PLANNED_MAX,
        portion=PORTION,
    )


async def retry(visit: Visit) -> Response:
    """Retry the next letters of a group: publish their records again."""
    group, rows = await _next_letters(visit)
    planned = [letter async for letter in visit.parts.letters.plan_retry(rows)]
    await visit.parts.letters.retry([letter for letter in planned if letter.problem is None], visit.user.name)
    return _result(visit, "retry", group, planned)


async def discard(visit: Visit) -> Response:
    """Discard the next letters of a group: record that they will not be retried."""
    reason = await visit.reason()
    group, rows = await _next_letters(visit)
    await visit.parts.letters.discard(rows, reason, visit.user.name)
    return _result(visit, "discard", group, [PlannedLetter(row) for row in rows], reason)


async def _next_letters(visit: Visit) -> tuple[LetterGroup, list[Row]]:
    """Return the dead letters that a submitted form retries or discards.

    Returns:
        The group in the form, and at most `PORTION` of its open letters, after the position in the form.
    """
    _check_scope(visit)
    form = await visit.fields(_FORM_FIELDS)
    group = _group({**form, "reason": form.get("kind", "")})
    after = parse_position(form["after"]) if form.get("after") else None
    async with visit.transaction() as tx:
        return group, list(await letters_of(tx, group, "open", after=after, limit=PORTION))


def _result(
    visit: Visit,
    action: str,
    group: LetterGroup,
    planned: list[PlannedLetter],
    reason: str = "",
) -> Response:
    held_back = [(unpack_id(letter.row["name"]), letter.problem) for letter in planned if letter.problem]
    return visit.render(
        "dead_letter_result.html",
        action=action,
        group=group,
        changed=len(planned) - len(held_back),
        held_back=held_back[:20],
        held_back_number=len(held_back),
        reason=reason,
        after=_position(planned[-1].row) if len(planned) == PORTION else None,
    )


def _check_scope(visit: Visit) -> None:
    if visit.user.scope.tenants is not None:
        raise Refused(403, "tenants", "A dead letter may be of any tenant. This needs a user of all tenants.")


def _group(values: Mapping[str, str]) -> LetterGroup:
    missing = [name for name in _GROUP if not values.get(name)]
    if missing:
        raise Refused(400, "invalid_parameter", f"{missing[0]}: is required; follow a link of the page", missing[0])
    return LetterGroup(values["service"], values["topic"], values["reason"])


def _query(group: LetterGroup) -> dict[str, str]:
    return {"service": group.service, "topic": group.topic, "reason": group.reason}


def _address(group: LetterGroup, **more: str) -> str:
    return f"/dead-letters/group?{urlencode({**_query(group), **more})}"


def _period(group: LetterGroup) -> tuple[object, object]:
    return from_epoch_ms(group.first_ms), from_epoch_ms(group.last_ms)


def _position(row: Row) -> str:
    return f"{row['at_ms']}.{row['id']}"


def _letter(row: Row) -> dict[str, object]:
    return {
        "id": unpack_id(row["name"]),
        "at": from_epoch_ms(row["at_ms"]),
        "error": row["error"],
        "state": tables.LETTER_STATES[row["state"]],
    }


PAGES = (
    Page("/dead-letters", groups),
    Page("/dead-letters/group", group),
    Page("/dead-letters/plan", plan, role="operator"),
    Page("/dead-letters/retry", retry, role="operator", method="POST"),
    Page("/dead-letters/discard", discard, role="operator", method="POST"),
    Page("/dead-letters/{letter}", letter),
)
