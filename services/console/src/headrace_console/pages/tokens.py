"""Page with the tokens of one turn: how each was sampled, its probability then and now, and whether it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from headrace_console.advantages import TurnTraining, trains_answer, turn_training
from headrace_console.pages.page import InvalidParameter, Page, Visit, choice_of
from headrace_console.pages.turns import NUMBER, find_session, find_turn, read_turn, whole_turn
from headrace_console.read_model.packing import unpack_id, unpack_numbers
from headrace_console.read_model.queries import Row
from headrace_console.sources.replicas import TOKENS_MAX
from headrace_console.token_lens import CHANGE_LEGEND, COLOURS, LEGEND, TABLE_ROWS, WINDOW, Lens
from headrace_runtime.errors import Refused
from headrace_schemas import Experience, Turn
from headrace_schemas.http.replica_api import TokensToScore
from headrace_schemas.values.text import printable


@dataclass(frozen=True, slots=True)
class _Target:
    """Turn that the user may see, with its session and the outcomes of its training."""

    session: Row
    row: Row
    training: TurnTraining

    @property
    def path(self) -> str:
        return f"/s/{self.session['session_key']}/turns/{self.row['id']}"


async def tokens(visit: Visit) -> Response:
    """Show a window of the tokens of a turn, and a table of its sampled tokens."""
    parameters = visit.parameters("choice", "from", "row", "colour", "now")
    target = await _target(visit)
    turn = await read_turn(visit, target.row)
    common: dict[str, Any] = {
        "session": target.session,
        "row": target.row,
        "response_id": unpack_id(target.row["name"]),
    }
    if turn is None:
        return visit.render("tokens.html", lens=None, **common)
    choice = _number(parameters, "choice", 0, len(turn.choices) - 1)
    now = parameters.get("now", "")
    logprobs = visit.parts.replicas.cached((target.session["tenant_name"], turn.turn_id, choice, now)) if now else ()
    texts, problem = await visit.parts.tokenizers.read(turn.version)
    lens = Lens(turn, choice, texts, logprobs)
    start = _number(parameters, "from", lens.first_window(), lens.length)
    first_row = _number(parameters, "row", 0, lens.length)
    colour = choice_of(parameters, "colour", COLOURS)
    rows_start = lens.prompt_length + first_row
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
        sentences=target.training.sentences,
        trained=await _trained(visit, target, turn, choice),
        served=visit.parts.replicas.versions(turn.model),
        too_long=turn.usage.prompt_tokens + len(turn.choices[choice].token_ids) > TOKENS_MAX,
        tokens_max=TOKENS_MAX,
    )


async def compute(visit: Visit) -> Response:
    """Request the logprobs of an answer from a replica, and show them."""
    form = await visit.fields(("choice", "version"))
    target = await _target(visit)
    turn = await read_turn(visit, target.row)
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
        (target.session["tenant_name"], turn.turn_id, choice, version),
        TokensToScore(
            prompt_token_ids=complete_turn.prompt_token_ids,
            token_ids=answer.token_ids,
            temperature=turn.sampling.temperature or 1.0,
        ),
    )
    return RedirectResponse(f"{target.path}?{_query(choice=choice, now=version, colour='change')}", 303)


async def _target(visit: Visit) -> _Target:
    """Return the turn of the path. Raises `NotFound`, also if the user may not see its tenant."""
    session = await find_session(visit)
    row = await find_turn(visit, session, visit.path("turn"))
    async with visit.transaction() as tx:
        return _Target(session, row, await turn_training(tx, row))


async def _trained(visit: Visit, target: _Target, turn: Turn, choice: int) -> bool | None:
    """Return whether an answer is in the loss of a trained experience, or None if that cannot be read."""
    for row, history in zip(target.training.experiences, target.training.histories, strict=True):
        turns = unpack_numbers(row["turns"])
        trained = [entry for entry in history if trains_answer(entry, turns, target.row["id"])]
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


PAGES = (
    Page("/s/{key}/turns/{turn}", tokens),
    Page("/s/{key}/turns/{turn}/now", compute, method="POST"),
)
