"""Pages of turns: the tokens of one, and two side by side with the form that requests an answer of another version."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from headrace_console.advantages import TurnTraining, trains_answer, turn_training
from headrace_console.pages.page import InvalidParameter, NotFound, Page, Visit, choice_of
from headrace_console.pages.session import message_values
from headrace_console.read_model import queries
from headrace_console.read_model.packing import unpack_id, unpack_numbers
from headrace_console.read_model.queries import Row
from headrace_console.sources.clients import ANSWER_TOKENS_MAX
from headrace_console.sources.replicas import TOKENS_MAX
from headrace_console.token_lens import CHANGE_LEGEND, COLOURS, LEGEND, TABLE_ROWS, WINDOW, Lens
from headrace_runtime.errors import Refused
from headrace_schemas import Experience, Turn
from headrace_schemas.http.replica_api import TokensToScore
from headrace_schemas.rules.turn_history import extend
from headrace_schemas.values.errors import InvalidEvent
from headrace_schemas.values.text import printable

NUMBER = re.compile(r"[0-9]{1,18}")
_EARLIER_TURNS_MAX = 256
"""Largest number of earlier turns that are read to complete a prompt of which the event has only the end."""


async def find_session(visit: Visit) -> Row:
    """Return the session that the URL path names. Raises `NotFound`, also if the user may not see its tenant."""
    async with visit.transaction() as tx:
        session = await queries.session_of(tx, visit.user.scope, visit.path("key"))
    if session is None:
        raise NotFound
    return session


async def find_turn(visit: Visit, session: Row, number: str) -> Row:
    """Return the captured turn of a session with this number. Raises `NotFound`."""
    turn = None
    if NUMBER.fullmatch(number):
        async with visit.transaction() as tx:
            turn = await queries.turn_in_session(tx, session["id"], int(number))
    if turn is None:
        raise NotFound
    return turn


async def read_turn(visit: Visit, row: Row) -> Turn | None:
    """Return the event of a turn, or None if it has expired or the bus does not answer."""
    event = await visit.parts.records.read_row("turns", row)
    return event if isinstance(event, Turn) else None


async def whole_turn(visit: Visit, turn: Turn) -> Turn:
    """Return a turn with its whole prompt, which may be in earlier turns. Raises `Refused` 409 if one has expired."""
    chain = [turn]
    problem = "The prompt cannot be put together: an earlier turn has expired, or the bus does not answer."
    while (reference := chain[-1].extends) is not None:
        async with visit.transaction() as tx:
            record = await queries.turn_of(tx, visit.user.scope, reference.turn_id)
        earlier = await read_turn(visit, record[1]) if record is not None else None
        if earlier is None or len(chain) > _EARLIER_TURNS_MAX:
            raise Refused(409, "expired", problem)
        chain.append(earlier)
    complete_turn = chain.pop()
    try:
        while chain:
            complete_turn = extend(complete_turn, chain.pop())
    except InvalidEvent:
        raise Refused(409, "expired", problem) from None
    return complete_turn


async def tokens(visit: Visit) -> Response:
    """Show a window of the tokens of a turn, and a table of its sampled tokens."""
    parameters = visit.parameters("choice", "from", "row", "colour", "now")
    session, row = await _target(visit)
    turn = await read_turn(visit, row)
    common: dict[str, Any] = {"session": session, "row": row, "response_id": unpack_id(row["name"])}
    if turn is None:
        return visit.render("tokens.html", lens=None, **common)
    choice = _number(parameters, "choice", 0, len(turn.choices) - 1)
    now = parameters.get("now", "")
    logprobs = visit.parts.replicas.cached_logprobs((session["tenant_name"], turn.turn_id, choice, now)) if now else ()
    texts, problem = await visit.parts.tokenizers.read(turn.version)
    lens = Lens(turn, choice, texts, logprobs)
    start = _number(parameters, "from", lens.first_window(), lens.length)
    first_row = _number(parameters, "row", 0, lens.length)
    colour = choice_of(parameters, "colour", COLOURS)
    rows_start = lens.prompt_length + first_row
    async with visit.transaction() as tx:
        training = await turn_training(tx, row)
    values = {"choice": choice, "from": start, "row": first_row, "colour": colour, "now": now}
    return visit.render(
        "tokens.html",
        **common,
        lens=lens,
        address=lambda **changes: _address(values, changes),
        tokens=lens.tokens(start, start + WINDOW, colour),
        start=start,
        window=WINDOW,
        rows=lens.tokens(rows_start, rows_start + TABLE_ROWS, colour),
        first_row=first_row,
        table_rows=TABLE_ROWS,
        choice=choice,
        choices=len(turn.choices),
        colour=colour,
        colours=COLOURS if logprobs else COLOURS[:1],
        legend=CHANGE_LEGEND if colour == "change" else LEGEND,
        now=now,
        has_now=bool(logprobs),
        problem=problem,
        sentences=training.sentences,
        trained=await _is_trained(visit, row["id"], training, turn, choice),
        served=visit.parts.replicas.versions(turn.model),
        too_long=turn.usage.prompt_tokens + len(turn.choices[choice].token_ids) > TOKENS_MAX,
        tokens_max=TOKENS_MAX,
    )


async def compute(visit: Visit) -> Response:
    """Request the logprobs of an answer from a replica, and show them."""
    form = await visit.fields(("choice", "version"))
    session, row = await _target(visit)
    turn = await read_turn(visit, row)
    if turn is None:
        raise Refused(409, "expired", "The text of this turn has expired, or the bus does not answer.")
    choice = _number(form, "choice", 0, len(turn.choices) - 1)
    version = form.get("version", "")
    if version not in visit.parts.replicas.versions(turn.model):
        raise Refused(409, "not_served", f"{printable(version)} is not served now.", "version")
    answer = turn.choices[choice]
    if turn.usage.prompt_tokens + len(answer.token_ids) > TOKENS_MAX:
        raise Refused(413, "too_long", f"Prompt and answer have more than {TOKENS_MAX:,} tokens.")
    complete_turn = await whole_turn(visit, turn)
    await visit.parts.replicas.compute(
        (session["tenant_name"], turn.turn_id, choice, version),
        TokensToScore(
            prompt_token_ids=complete_turn.prompt_token_ids,
            token_ids=answer.token_ids,
            temperature=turn.sampling.temperature or 1.0,
        ),
    )
    path = f"/s/{session['session_key']}/turns/{row['id']}"
    return RedirectResponse(f"{path}?{_query(choice=choice, now=version, colour='change')}", 303)


async def _target(visit: Visit) -> tuple[Row, Row]:
    """Return the session and the turn that the URL path names. Raises `NotFound`, also if the user may not see their
    tenant.
    """
    session = await find_session(visit)
    return session, await find_turn(visit, session, visit.path("turn"))


async def _is_trained(visit: Visit, number: int, training: TurnTraining, turn: Turn, choice: int) -> bool | None:
    """Return whether training included an answer of the turn, or None if the experience's event cannot be read."""
    for row, history in zip(training.experiences, training.histories, strict=True):
        turns = unpack_numbers(row["turns"])
        trained = [entry for entry in history if trains_answer(entry, turns, number)]
        if all(turn.turn_id in entry.left_out for entry in trained):
            continue
        experience = await visit.parts.records.read_row("experiences", row)
        if not isinstance(experience, Experience):
            return None
        spans = experience.branch.spans if experience.branch is not None else ()
        if any((span.turn_id, span.choice) == (turn.turn_id, choice) for span in spans):
            return True
    return False


def _number(parameters: Mapping[str, str], name: str, default: int, largest: int) -> int:
    """Return a parameter as a number from 0 to `largest`. Raises `Refused` 400."""
    text = parameters.get(name, str(default))
    if not NUMBER.fullmatch(text) or int(text) > largest:
        raise InvalidParameter(name, text, f"must be a number from 0 to {largest}")
    return int(text)


def _address(values: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    return "?" + _query(**{**values, **changes})


def _query(**values: Any) -> str:
    return urlencode({name: value for name, value in values.items() if value != ""})


SIDES = ("left", "right")
_READ_POLLS, _READ_POLL_S = 50, 0.2
"""Number of look-ups of a new answer, until the console has read it from its topic, and the seconds between them."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two compared turns. `turn` is None if its text has expired or the bus does not answer."""

    response_id: str
    session: Row
    row: Row
    version: str
    training: TurnTraining
    turn: Turn | None

    @property
    def answer(self) -> str:
        """Text of the turn's first answer."""
        return str(message_values(self.turn.choices[0].message)["text"]) if self.turn is not None else ""

    @property
    def mean_probability(self) -> float | None:
        """Geometric mean of the probabilities of the sampled tokens, or None if they are not known."""
        if self.turn is None or not Lens(self.turn, 0, None).has_logprobs:
            return None
        logprobs = self.turn.choices[0].logprobs
        return math.exp(fmean(logprobs)) if logprobs else None


async def compare(visit: Visit) -> Response:
    """Show the turns with the response ids `left` and `right`, or a form for the two ids."""
    parameters = visit.parameters(*SIDES)
    ids = {name: parameters.get(name, "").strip() for name in SIDES}
    sides = [await _side(visit, response_id) for response_id in ids.values() if response_id]
    turns = [side.turn for side in sides if side.turn is not None]
    return visit.render(
        "compare.html",
        ids=ids,
        sides=sides,
        has_equal_prompts=_have_equal_prompts(*turns) if len(turns) == len(SIDES) else None,
        can_try=bool(turns) and visit.user.has_role("reviewer"),
        served=visit.parts.replicas.served_versions(turns[0].model) if turns else [],
        tokens_max=ANSWER_TOKENS_MAX,
    )


async def try_version(visit: Visit) -> Response:
    """Call a version with the prompt of the turn `left`, and show both answers side by side."""
    form = await visit.fields(("left", "version"))
    left, version = form.get("left", ""), form.get("version", "")
    turn = (await _side(visit, left)).turn
    if turn is None:
        raise Refused(409, "expired", "The text of this turn has expired, or the bus does not answer.")
    if version not in visit.parts.replicas.served_versions(turn.model):
        raise Refused(409, "not_served", f"{printable(version)} is not served now.", "version")
    complete_turn = await whole_turn(visit, turn)
    right = await visit.parts.gateway.answer(visit.user, complete_turn, version)
    await _wait_until_read(visit, right)
    return RedirectResponse(f"/compare?{urlencode({'left': left, 'right': right})}", 303)


async def _wait_until_read(visit: Visit, response_id: str) -> None:
    """Wait until the console has read the event of a turn. Raises `Refused` 503 after ten seconds."""
    for _ in range(_READ_POLLS):
        async with visit.transaction() as tx:
            record = await queries.turn_of(tx, visit.user.scope, response_id)
        if record is not None and record[1]["log_offset"] >= 0:
            return
        await visit.parts.clock.sleep(_READ_POLL_S)
    problem = f"The answer {response_id} was captured, and the console has not read it yet. Find it in a moment."
    raise Refused(503, "not_read", problem)


async def _side(visit: Visit, response_id: str) -> _Side:
    """Return the turn with this response id as one side of a comparison.

    Raises:
        NotFound: the turn does not exist, or the user may not see its tenant.
    """
    async with visit.transaction() as tx:
        record = await queries.turn_of(tx, visit.user.scope, response_id)
        if record is None or record[1]["log_offset"] < 0:
            raise NotFound
        session, row = record
        training = await turn_training(tx, row)
        texts = await queries.texts_of(tx, [row["version"]])
    turn = await read_turn(visit, row)
    return _Side(response_id, session, row, texts.get(row["version"], ""), training, turn)


def _have_equal_prompts(left: Turn, right: Turn) -> bool | None:
    """Return whether two turns have the same prompt tokens, or None if their events do not contain enough to decide."""
    if left.usage.prompt_tokens != right.usage.prompt_tokens:
        return False
    if (left.extends is None) != (right.extends is None):
        return None
    digests = [turn.extends.digest if turn.extends is not None else "" for turn in (left, right)]
    return digests[0] == digests[1] and left.prompt_token_ids == right.prompt_token_ids


PAGES = (
    Page("/s/{key}/turns/{turn}", tokens),
    Page("/s/{key}/turns/{turn}/now", compute, method="POST"),
    Page("/compare", compare),
    Page("/compare/try", try_version, role="reviewer", method="POST"),
)
