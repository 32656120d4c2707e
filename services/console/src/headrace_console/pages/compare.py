"""Page with two turns side by side, such as answers of two versions to one prompt, and the form that requests one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from urllib.parse import urlencode

from starlette.responses import RedirectResponse, Response

from headrace_console.advantages import TurnTraining, turn_training
from headrace_console.pages.page import NotFound, Page, Visit
from headrace_console.pages.session import message_values
from headrace_console.pages.turns import read_turn, whole_turn
from headrace_console.read_model import queries
from headrace_console.read_model.queries import Row
from headrace_console.sources.gateway import ANSWER_TOKENS_MAX
from headrace_console.token_lens import Lens
from headrace_runtime.errors import Refused
from headrace_schemas import Turn
from headrace_schemas.values.text import printable

SIDES = ("left", "right")
_READ_POLLS, _READ_POLL_S = 50, 0.2
"""Number of look-ups of a new answer, until the console has read it from its topic, and the seconds between them."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two turns. `turn` is None if its text has expired or the bus does not answer."""

    response_id: str
    session: Row
    row: Row
    version: str
    training: TurnTraining
    turn: Turn | None

    @property
    def answer(self) -> str:
        """Text of the first answer."""
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
        served=visit.parts.replicas.served(turns[0].model) if turns else [],
        tokens_max=ANSWER_TOKENS_MAX,
    )


async def try_version(visit: Visit) -> Response:
    """Call a version with the prompt of the turn `left`, and show both answers."""
    form = await visit.fields(("left", "version"))
    left, version = form.get("left", ""), form.get("version", "")
    turn = (await _side(visit, left)).turn
    if turn is None:
        raise Refused(409, "expired", "The text of this turn has expired, or the bus does not answer.")
    if version not in visit.parts.replicas.served(turn.model):
        raise Refused(409, "not_served", f"{printable(version)} is not served now.", "version")
    complete_turn = await whole_turn(visit, turn)
    right = await visit.parts.gateway.answer(visit.user, complete_turn, version)
    await _wait_until_read(visit, right)
    return RedirectResponse(f"/compare?{urlencode({'left': left, 'right': right})}", 303)


async def _wait_until_read(visit: Visit, response_id: str) -> None:
    """Return once the console has read a turn. Raises `Refused` 503 after ten seconds."""
    for _ in range(_READ_POLLS):
        async with visit.transaction() as tx:
            record = await queries.turn_of(tx, visit.user.scope, response_id)
        if record is not None and record[1]["log_offset"] >= 0:
            return
        await visit.parts.clock.sleep(_READ_POLL_S)
    problem = f"The answer {response_id} was captured, and the console has not read it yet. Find it in a moment."
    raise Refused(503, "not_read", problem)


async def _side(visit: Visit, response_id: str) -> _Side:
    """Return one side for a turn. Raises `NotFound`, also if the user may not see the turn's tenant."""
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
    Page("/compare", compare),
    Page("/compare/try", try_version, role="reviewer", method="POST"),
)
