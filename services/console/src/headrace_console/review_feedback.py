"""Conversion of raters' answers in review queues to request bodies of `POST /v1/feedback`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from headrace_console.read_model.packing import unpack_id
from headrace_console.read_model.queues import SCORES, QueueRules
from headrace_console.read_model.ratings import Item
from headrace_console.read_model.verdicts import BOTH_BAD, EDITED, SAME, Verdict, feedback_id, pair_of, sides_of

SIDES = ("A", "B")
Body = dict[str, JsonValue]


def compared_choices(item: Item) -> tuple[int, int]:
    """Return the indices of the two answers of an item's turn that raters compare."""
    return pair_of(item.id, _choices(item))


def sides(item: Item, rater: str, *, repeated: bool) -> tuple[int, int]:
    """Return the indices of the answers that a rater sees as A and as B.

    Args:
        item: an item of a queue that compares pairs.
        rater: name of the rater.
        repeated: whether the rater compares the pair a second time, with swapped sides.
    """
    return sides_of(item.id, _choices(item), rater, repeated=repeated)


def _choices(item: Item) -> int:
    assert item.turn is not None, "an item with a pair has a turn"
    return int(item.turn["choices"])


def stored_answer(rules: QueueRules, item: Item, text: str, rater: str, *, repeated: bool) -> str | None:
    """Return the value to store for the button that a rater pressed, or None if the queue has no such button.

    For a pair, the buttons A and B are converted to the index of the answer, because each rater may see the two answers
    in another order.

    Args:
        rules: the rules of the queue.
        item: the rated item.
        text: value of the button.
        rater: name of the rater.
        repeated: whether the rater compares the pair a second time.
    """
    if rules.question == "pair":
        if text in SIDES:
            return str(sides(item, rater, repeated=repeated)[SIDES.index(text)])
        return text if text in (SAME, BOTH_BAD) else None
    choices = {"score": SCORES, "label": rules.labels, "edit": (EDITED, SAME)}[rules.question]
    return text if text in choices else None


def feedback_bodies(
    rules: QueueRules, item: Item, verdict: Verdict, previous: str | None, edit: JsonValue = None
) -> list[Body]:
    """Return the request bodies that send a verdict to the gateway. The feedback id of the first body is the verdict's
    id.

    Args:
        rules: the rules of the queue.
        item: the reviewed item.
        verdict: the verdict.
        previous: the rater's answer that was valid until now, or None.
        edit: the edited answer as a message, for the verdict `EDITED`.
    """
    bodies = [] if verdict.answer is None else _answer_bodies(rules, item, verdict.answer, edit)
    if previous is not None and (verdict.answer is None or _kind(rules, previous) != _kind(rules, verdict.answer)):
        bodies += _withdrawal_bodies(rules, item, previous)
    ids = [
        feedback_id(verdict.item, verdict.rater, verdict.number, repeated=verdict.repeated, part=part)
        for part in range(len(bodies))
    ]
    return [{**body, "feedback_id": name} for body, name in zip(bodies, ids, strict=True)]


def _kind(rules: QueueRules, answer: str) -> str:
    """Return the kind of feedback that an answer becomes.

    Feedback replaces earlier feedback of the same kind. Feedback of another kind must be withdrawn.
    """
    return answer if rules.question in ("pair", "edit") and answer in (SAME, BOTH_BAD) else rules.question


def _target(rules: QueueRules, item: Item) -> Body:
    if rules.about == "session" or item.turn is None:
        return {"session_id": item.session["session_id"]}
    return {"response_id": unpack_id(item.turn["name"]), "level": "turn"}


def _pair_targets(item: Item) -> list[Body]:
    """Return, for each of the two compared answers, the fields of a feedback body that name this answer."""
    response: Mapping[str, JsonValue] = {"response_id": _response_id(item), "level": "response"}
    return [{**response, "choice": choice} for choice in compared_choices(item)]


def _response_id(item: Item) -> str:
    assert item.turn is not None, "an item about one answer has a turn"
    return unpack_id(item.turn["name"])


def _preference_body(item: Item, answer: str) -> Body:
    chosen = int(answer)
    rejected = next(choice for choice in compared_choices(item) if choice != chosen)
    return {"response_id": _response_id(item), "preference": {"chosen": chosen, "rejected": rejected}}


def _answer_bodies(rules: QueueRules, item: Item, answer: str, edit: JsonValue) -> list[Body]:
    kind = _kind(rules, answer)
    if kind == "pair":
        return [_preference_body(item, answer)]
    if kind == "edit":
        return [] if edit is None else [{"response_id": _response_id(item), "edit": edit}]
    if kind == BOTH_BAD and rules.question == "pair":
        return [{**target, "label": BOTH_BAD} for target in _pair_targets(item)]
    return [{**_target(rules, item), **({"value": float(answer)} if kind == "score" else {"label": answer})}]


def _withdrawal_bodies(rules: QueueRules, item: Item, answer: str) -> list[Body]:
    kind = _kind(rules, answer)
    if kind == "pair":
        return [{**_preference_body(item, answer), "withdrawn": True}]
    if kind == "edit":
        return [{"response_id": _response_id(item), "kind": "edit", "withdrawn": True}]
    targets = _pair_targets(item) if kind == BOTH_BAD and rules.question == "pair" else [_target(rules, item)]
    return [{**target, "withdrawn": True} for target in targets]
