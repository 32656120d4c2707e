"""Verdicts of raters, and their form as feedback events.

The feedback of a verdict has the source `review:QUEUE`, and its id is a hash of the item, the rater and the number of
the verdict. A request that is sent twice therefore counts once, and the verdict can be restored from the event alone.
"""

from __future__ import annotations

import random
import re
import uuid
from dataclasses import dataclass
from typing import Any

from headrace_console.read_model.packing import pack_id
from headrace_runtime.clock import epoch_ms
from headrace_schemas import Feedback
from headrace_schemas.values.ids import derived_id

SOURCE_PREFIX = "review:"
QUEUE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
VERDICTS_MAX = 50
"""Largest number of verdicts of one rater about one item, including withdrawn and revised ones."""
SAME, BOTH_BAD = "same", "bad"
"""Verdicts about a pair if neither answer is better, and the labels of their feedback. The labels abstain unless
`scorer.labels` gives them a value. `SAME` is also the verdict that an answer needs no edit."""
EDITED = "edited"
"""Verdict that an answer needs an edit. The text of the edit is only in the event."""
_RANDOM_ONE_IN = 5
_REPEATED_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rater's answer to the question about an item, or its withdrawal (`answer` None)."""

    item: str
    queue: str
    rater: str
    number: int
    repeated: bool
    answer: str | None
    at_ms: int

    @property
    def name(self) -> bytes:
        """Id of the reviewed item in its packed (binary) form."""
        return pack_id(self.item)

    def row(self, session: int, offset: int) -> dict[str, Any]:
        """Return the row of the verdict. `offset` is -1 until its event was read."""
        values = {name: getattr(self, name) for name in ("rater", "number", "answer", "repeated", "at_ms")}
        return {"item": self.name, **values, "session": session, "log_offset": offset}


def item_id(tenant: str, queue: str, session_key: str) -> str:
    """Return the item id of a session in a queue: a hash from which the session cannot be found."""
    return derived_id("review-item", tenant, queue, session_key)


def feedback_id(item: str, rater: str, number: int, *, repeated: bool, part: int = 0) -> str:
    """Return the id of a feedback event that sends a verdict. It is a hash, so a repeated request has no second effect.

    Args:
        item: id of the item of the review queue.
        rater: name of the rater.
        number: number of the verdict among the rater's verdicts on the item.
        repeated: whether the rater compares the same pair a second time.
        part: number of the event, if a verdict sends several.
    """
    return derived_id("review-verdict", item, rater, number, int(repeated), part)


def belongs_to_the_random_part(item: str) -> bool:
    """Return whether an item belongs to the fifth of all items, chosen by hash, that a queue draws without its
    filter.
    """
    return uuid.UUID(item).int % _RANDOM_ONE_IN == 0


def is_repeated_pair(item: str, rater: str) -> bool:
    """Return whether a rater must rate a pair a second time. This holds for one pair in twenty, chosen by hash."""
    return uuid.UUID(derived_id("review-again", item, rater)).int % _REPEATED_ONE_IN == 0


def has_swapped_sides(item: str, rater: str, *, repeated: bool) -> bool:
    """Return whether a rater sees the second answer of a pair as A."""
    return bool(uuid.UUID(derived_id("review-side", item, rater)).int % 2) != repeated


def pair_of(item: str, choices: int) -> tuple[int, int]:
    """Return the indices of the two answers that all raters of an item compare.

    Args:
        item: id of the item, the seed of the random choice.
        choices: number of answers of the item's turn.
    """
    first, second = sorted(random.Random(item).sample(range(choices), 2))
    return first, second


def sides_of(item: str, choices: int, rater: str, *, repeated: bool) -> tuple[int, int]:
    """Return the indices of the answers that a rater sees as A and as B."""
    first, second = pair_of(item, choices)
    return (second, first) if has_swapped_sides(item, rater, repeated=repeated) else (first, second)


def is_verdict(event: Feedback) -> bool:
    """Return whether feedback has the form of a verdict: the source is a review queue and it names a rater. Whether its
    id is that of a verdict is not checked.
    """
    queue = event.source.removeprefix(SOURCE_PREFIX)
    return queue != event.source and event.rater is not None and QUEUE_NAME.fullmatch(queue) is not None


def verdict_of(event: Feedback) -> Verdict | None:
    """Return the verdict that a feedback event carries, or None if it comes from elsewhere or only continues a
    verdict.
    """
    if not is_verdict(event) or event.rater is None:
        return None
    queue = event.source.removeprefix(SOURCE_PREFIX)
    item = item_id(event.tenant, queue, event.session_key)
    for number in range(1, VERDICTS_MAX + 1):
        for repeated in (False, True):
            if event.feedback_id == feedback_id(item, event.rater, number, repeated=repeated):
                return Verdict(item, queue, event.rater, number, repeated, _answer_of(event), epoch_ms(event.time))
    return None


def _answer_of(event: Feedback) -> str | None:
    if event.withdrawn:
        return None
    if event.edit is not None:
        return EDITED
    if event.preference is not None:
        return str(event.preference.chosen.choice)
    if event.label is not None:
        return event.label
    return None if event.value is None else f"{event.value:g}"
