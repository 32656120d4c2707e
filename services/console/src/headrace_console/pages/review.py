"""Review pages: the list of queues, and the form with which a rater rates one item after the other.

A rater sees only the texts of an item: no version, arm, score or verdict of others, and no id from which the session
could be found.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import tuple_
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.responses import RedirectResponse, Response

from headrace_console.pages.feedback import editable_answer, edited_answer
from headrace_console.pages.page import NotFound, Page, Visit
from headrace_console.pages.session import message_text
from headrace_console.pages.sessions import parse_filter
from headrace_console.pages.turns import NUMBER
from headrace_console.read_model import queues, ratings, tables
from headrace_console.read_model.packing import pack_id
from headrace_console.read_model.queries import Row, captured_turns, position_of, read_rows
from headrace_console.read_model.queues import SCORES, Queue
from headrace_console.read_model.ratings import Item
from headrace_console.read_model.verdicts import BOTH_BAD, EDITED, SAME, SOURCE_PREFIX, VERDICTS_MAX, Verdict
from headrace_console.review_feedback import SIDES, feedback_bodies, sides, stored_answer
from headrace_console.settings import User
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values.errors import InvalidEvent

TURNS_MAX = 20
_MESSAGES_MAX = 40


@dataclass(frozen=True, slots=True)
class Transcript:
    """Conversation up to a turn, and the answers of the turn. Raters may see it: it has only roles and texts."""

    messages: Sequence[tuple[str, str]]
    """Role and text of each message."""
    answers: Sequence[str]
    editable: tuple[str, str] | None
    """Text and tool calls of the first answer for the form of an edit, or None if it is too long for a form."""
    is_cut: bool
    """Whether earlier messages are left out."""


async def turns_until(tx: AsyncConnection, turn: Row) -> Sequence[Row]:
    """Return the rows of the last `TURNS_MAX` turns of a session up to a turn, the oldest first."""
    table = tables.turns
    is_earlier = tuple_(table.c.at_ms, table.c.id) <= tuple_(turn["at_ms"], turn["id"])
    newest = captured_turns(turn["session"]).where(is_earlier).limit(TURNS_MAX)
    return (await read_rows(tx, newest))[::-1]


def transcript_of(rows: Sequence[Row], events: Mapping[tuple[int, int], object]) -> Transcript | None:
    """Return the conversation that the turns' events contain, or None if the event of the last turn has expired.

    Args:
        rows: turns of one session, the oldest first.
        events: events by partition and offset.
    """
    events = {position_of(row): events.get(position_of(row)) for row in rows}
    turns = [event for event in events.values() if isinstance(event, Turn)]
    if not turns or events[position_of(rows[-1])] is not turns[-1]:
        return None
    history, last = TurnHistory(), turns[-1]
    for turn in turns:
        with contextlib.suppress(InvalidEvent):  # the turn with the beginning of the prompt is not among the rows
            last = history.whole_turn(turn)
    if last.turn_id != turns[-1].turn_id:
        last = turns[-1]
    messages = [(message.role, message_text(message)) for message in last.messages]
    answers = [message_text(choice.message) for choice in last.choices]
    is_cut = len(messages) > _MESSAGES_MAX or last.extends is not None
    return Transcript(messages[-_MESSAGES_MAX:], answers, editable_answer(last.choices[0].message), is_cut)


_ITEM = re.compile(r"[0-9a-f]{32}")
_SCORE_NAMES = dict(zip(SCORES, ("bad", "rather bad", "between", "rather good", "good"), strict=True))


async def list_queues(visit: Visit) -> Response:
    """List the queues of the user's tenants."""
    visit.parameters()
    async with visit.transaction() as tx:
        entries = [(queue, await queues.progress_of(tx, queue)) for queue in await queues.queues_of(tx, visit.user)]
    return visit.render("review.html", entries=entries)


async def show_queue(visit: Visit) -> Response:
    """Show the page of a review queue: its question and its progress. Users who may rate can begin there."""
    visit.parameters()
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit)
        progress = await queues.progress_of(tx, queue)
        skipped = await ratings.count_skipped(tx, queue, visit.user.name)
    return visit.render(
        "review_queue.html", queue=queue, progress=progress, skipped=skipped, may_rate=may_rate(visit.user)
    )


async def close(visit: Visit) -> Response:
    """Close a queue, so that it offers no more items."""
    await visit.fields(())
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit, locked=True)
        await queues.close_queue(tx, queue)
    return RedirectResponse(f"/review/{queue.id}", 303)


async def next_item(visit: Visit) -> Response:
    """Reserve the next item for the user and show it."""
    form = await visit.fields(("skipped",))
    _check_rights(visit.user)
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit, locked=True)
        if "skipped" in form:
            await ratings.offer_skipped(tx, queue, visit.user.name)
        return await _redirect_to_next(visit, tx, queue)


async def show_item(visit: Visit) -> Response:
    """Show an item that the user has reserved or rated."""
    visit.parameters()
    _check_rights(visit.user)
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit)
        item = await _item(visit, tx, queue)
        rows = await turns_until(tx, item.turn) if item.turn is not None else []
        progress = await queues.progress_of(tx, queue)
        last = await ratings.last_rated(tx, queue, visit.user.name)
    events = await visit.parts.records.read_rows("turns", rows)
    transcript = await asyncio.to_thread(transcript_of, rows, events)
    return visit.render(
        "review_item.html",
        queue=queue,
        item=item,
        transcript=transcript,
        answers=_answers_of(queue, item, transcript, visit.user.name),
        edited=_editable_answer(queue, transcript),
        buttons=_buttons(queue),
        own=_own_answer(queue, item, visit.user.name),
        rated=progress.by_rater.get(visit.user.name, 0),
        items=progress.items,
        last=_last_item(last, item),
    )


async def rate(visit: Visit) -> Response:
    """Store the rating in the form, send it as feedback, then show the next item.

    The buttons `skip` and `undo` send this form too.
    """
    form = await visit.fields(("answer", "number", "text", "tool_calls"))
    _check_rights(visit.user)
    answer = form.get("answer", "")
    edit = edited_answer(form) if answer == EDITED else None
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit, locked=True)
        item = await _item(visit, tx, queue)
        if answer == "skip":
            await ratings.skip(tx, item.name, visit.user.name)
            return await _redirect_to_next(visit, tx, queue)
        verdict, previous, is_stored = _verdict(visit, queue, item, form)
        if not is_stored:
            await ratings.store_verdict(tx, verdict, item.session["id"])
    try:
        for body in feedback_bodies(queue.rules, item, verdict, previous, edit):
            await visit.parts.gateway.send(visit.user, queue.tenant_name, body, SOURCE_PREFIX + queue.name)
    except Refused:
        async with visit.transaction() as tx:
            await ratings.remove_verdict(tx, verdict)
            await ratings.reserve(tx, queue, item.name, visit.user.name, _now_ms(visit), repeated=verdict.repeated)
        raise
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit, locked=True)
        if verdict.answer is None:
            await ratings.reserve(tx, queue, item.name, visit.user.name, _now_ms(visit))
            return RedirectResponse(f"/review/{queue.id}/{item.name.hex()}", 303)
        return await _redirect_to_next(visit, tx, queue)


def _verdict(visit: Visit, queue: Queue, item: Item, form: dict[str, str]) -> tuple[Verdict, str | None, bool]:
    """Return the verdict that a form sends, the rater's answer before it, and whether the verdict is stored already.

    A form that is sent twice returns the stored verdict.
    """
    number = int(form["number"]) if NUMBER.fullmatch(form.get("number", "")) else 0
    earlier = {verdict["number"]: verdict for verdict in item.verdicts}
    previous = earlier[number - 1]["answer"] if number - 1 in earlier else None
    if number in earlier:
        stored = earlier[number]
        repeated, answer = stored["repeated"], stored["answer"]
    elif number == item.number and number <= VERDICTS_MAX:
        repeated, answer = item.repeated, _answer(visit, queue, item, form.get("answer", ""), previous)
    else:
        raise Refused(409, "stale_form", "This form is not the newest one of the item. Open the item again.")
    verdict = Verdict(item.id, queue.name, visit.user.name, number, repeated, answer, _now_ms(visit))
    return verdict, previous, number in earlier


def _answer(visit: Visit, queue: Queue, item: Item, text: str, previous: str | None) -> str | None:
    if text == "undo" and previous is not None:
        return None
    answer = stored_answer(queue.rules, item, text, visit.user.name, repeated=item.repeated)
    if answer is None:
        raise Refused(400, "invalid_form", "answer: must be one of the buttons of the page", "answer")
    return answer


async def _redirect_to_next(visit: Visit, tx: AsyncConnection, queue: Queue) -> Response:
    """Reserve the next item and redirect to it.

    If the queue has no free item, draw new items; if there are none to draw, redirect to the page of the queue.
    """
    name = await ratings.reserve_next(tx, queue, visit.user.name, _now_ms(visit))
    if name is None and not queue.closed and await queues.draw_items(tx, queue, parse_filter(queue.rules.filter)):
        name = await ratings.reserve_next(tx, queue, visit.user.name, _now_ms(visit))
    return RedirectResponse(f"/review/{queue.id}" + (f"/{name.hex()}" if name is not None else ""), 303)


async def _item(visit: Visit, tx: AsyncConnection, queue: Queue) -> Item:
    text = visit.path("item")
    name = pack_id(str(uuid.UUID(hex=text))) if _ITEM.fullmatch(text) else b""
    item = await ratings.item_of(tx, queue, name, visit.user.name)
    if item is None:
        raise NotFound
    return item


def _now_ms(visit: Visit) -> int:
    return epoch_ms(visit.parts.clock.now())


async def queue_of_path(tx: AsyncConnection, visit: Visit, *, locked: bool = False) -> Queue:
    """Return the review queue whose number is in the path of the request.

    Raises `NotFound` if there is no such queue, or if the user may not see it.

    Args:
        tx: the transaction.
        visit: the request and its user.
        locked: whether to lock the queue until the transaction ends.
    """
    text = visit.path("queue")
    queue = await queues.queue_of(tx, visit.user, int(text), locked=locked) if NUMBER.fullmatch(text) else None
    if queue is None:
        raise NotFound
    return queue


def may_rate(user: User) -> bool:
    """Return whether a user may rate: raters and reviewers do, viewers only read."""
    return user.role == "rater" or user.has_role("reviewer")


def _check_rights(user: User) -> None:
    if not may_rate(user):
        raise Refused(403, "role", f"This needs the role rater or reviewer; {user.name} has the role {user.role}.")


def _answers_of(queue: Queue, item: Item, transcript: Transcript | None, rater: str) -> list[tuple[str, str]]:
    """Return the heading and the text of each answer that a rater compares or judges."""
    if transcript is None:
        return []
    if queue.rules.question == "pair":
        choices = sides(item, rater, repeated=_is_repeated(item))
        if max(choices) >= len(transcript.answers):
            return []
        return [(name, transcript.answers[choice]) for name, choice in zip(SIDES, choices, strict=True)]
    is_single = len(transcript.answers) == 1
    return [("Answer" if is_single else f"Answer {at}", text) for at, text in enumerate(transcript.answers, 1)]


def _editable_answer(queue: Queue, transcript: Transcript | None) -> tuple[str, str] | None:
    """Return text and tool calls for the form of an edit, or None for a queue without edits."""
    if queue.rules.question != "edit" or transcript is None:
        return None
    return transcript.editable or ("", "")


def _is_repeated(item: Item) -> bool:
    """Return whether the rater sees the item for the second time, with swapped sides.

    The rater's reservation records this or, if there is none, the rater's last verdict.
    """
    return item.repeated if item.is_reserved or not item.verdicts else bool(item.verdicts[-1]["repeated"])


def _buttons(queue: Queue) -> list[tuple[str, str, str]]:
    """Return the value, the text and the keyboard key of each answer button."""
    rules = queue.rules
    if rules.question == "pair":
        names = {
            "A": ("A is better", "1"),
            "B": ("B is better", "2"),
            SAME: ("the same", "0"),
            BOTH_BAD: ("both bad", "x"),
        }
        return [(value, *name) for value, name in names.items()]
    if rules.question == "edit":
        return [(EDITED, "send the edit", "Control+Enter"), (SAME, "good as it is", "0")]
    names_of_answers = _SCORE_NAMES if rules.question == "score" else {label: label for label in rules.labels}
    return [(value, name, str(at)) for at, (value, name) in enumerate(names_of_answers.items(), 1)]


def _own_answer(queue: Queue, item: Item, rater: str) -> str:
    """Return the text of the button that the rater has pressed, or an empty text."""
    answer = item.answer
    if answer is None:
        return ""
    if queue.rules.question == "pair" and answer not in (SAME, BOTH_BAD) and item.turn is not None:
        choices = sides(item, rater, repeated=_is_repeated(item))
        answer = SIDES[choices.index(int(answer))] if answer in map(str, choices) else answer
    return next((text for value, text, _ in _buttons(queue) if value == answer), answer)


def _last_item(last: Row | None, item: Item) -> dict[str, object] | None:
    """Return the address of the item that the rater rated before `item`, and the number of its next verdict, for an
    undo.
    """
    if last is None or bytes(last["item"]) == item.name:
        return None
    return {"item": bytes(last["item"]).hex(), "number": last["number"] + 1}


PAGES = (
    Page("/review", list_queues, role="rater"),
    Page("/review/{queue}", show_queue, role="rater"),
    Page("/review/{queue}/next", next_item, role="rater", method="POST"),
    Page("/review/{queue}/close", close, role="reviewer", method="POST"),
    Page("/review/{queue}/{item}", show_item, role="rater"),
    Page("/review/{queue}/{item}", rate, role="rater", method="POST"),
)
