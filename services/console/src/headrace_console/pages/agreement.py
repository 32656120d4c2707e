"""Page with the agreement of a queue's raters with each other and with judges."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from starlette.responses import Response

from headrace_console.agreement import COMMON_MIN, Coefficient, agreement_of
from headrace_console.pages.page import Page, Visit
from headrace_console.pages.review import queue_of_path
from headrace_console.read_model.answers import ITEMS_MAX, AnsweredItem, random_items
from headrace_console.read_model.verdicts import sides_of
from headrace_statistics.intervals import wilson

_LISTED_MAX = 50


@dataclass(frozen=True, slots=True)
class RaterHabit:
    """Consistency of a rater of pairs: preference for the side A, and equal verdicts when a pair is repeated."""

    rater: str
    decided: int
    """Number of pairs with A or B as the answer."""
    left: int
    """Number of pairs with A as the answer."""
    left_interval: tuple[float, float] | None
    repeated: int
    """Number of pairs that were rated a second time."""
    consistent: int
    """Number of these pairs with equal answers."""


async def agreement(visit: Visit) -> Response:
    """Show coefficients of the items that were drawn at random, shares of answers, and items with different answers."""
    visit.parameters()
    async with visit.transaction() as tx:
        queue = await queue_of_path(tx, visit)
        items = await random_items(tx, queue)
    judges = sorted({judge for item in items for judge in item.by_judge})
    answers = {item.id: {**item.by_rater, **item.by_judge} for item in items}
    async with visit.parts.computation:
        agreement = await asyncio.to_thread(
            agreement_of, answers, judges, are_scores=queue.rules.question == "score", seed=queue.id
        )
    values = sorted({value for column in agreement.columns.values() for value in column}, key=str)
    return visit.render(
        "review_agreement.html",
        queue=queue,
        items=len(items),
        items_max=ITEMS_MAX,
        common_min=COMMON_MIN,
        alpha=coefficient_text(agreement.alpha),
        pairs=[(pair, coefficient_text(pair.kappa)) for pair in agreement.pairs],
        columns=agreement.columns,
        values=values,
        names={value: answer_label(value) for value in values},
        habits=habits_of(items) if queue.rules.question == "pair" else [],
        differing=_differing_items(items),
    )


def coefficient_text(coefficient: Coefficient) -> str:
    """Return a coefficient with its interval in words."""
    if coefficient.has_too_few_items:
        return f"too few ({coefficient.items} of {COMMON_MIN} items)"
    if coefficient.value is None:
        return f"undefined: all answers to the {coefficient.items} items are the same"
    if coefficient.interval is None:
        return f"{coefficient.value:.3f}"
    lower, upper = coefficient.interval
    return f"{coefficient.value:.3f} (95 %: {lower:.3f} to {upper:.3f})"


def answer_label(answer: Hashable) -> str:
    """Return the label of an answer. The choices of a pair are numbered from 1."""
    if isinstance(answer, float):
        return f"{answer:g}"
    text = str(answer)
    return f"answer {int(text) + 1}" if text.isascii() and text.isdigit() else text


def habits_of(items: Sequence[AnsweredItem]) -> list[RaterHabit]:
    """Return the habits of the raters of pairs."""
    sides: dict[str, list[bool]] = {}
    again: dict[str, list[bool]] = {}
    for item in items:
        for rater, answer in item.by_rater.items():
            verdicts = [verdict for verdict in item.verdicts if verdict["rater"] == rater]
            repeated = bool(verdicts[-1]["repeated"])
            if str(answer).isdigit():
                left, _ = sides_of(item.id, item.choices, rater, repeated=repeated)
                sides.setdefault(rater, []).append(int(str(answer)) == left)
            if repeated and len(verdicts) > 1:
                again.setdefault(rater, []).append(verdicts[-2]["answer"] == verdicts[-1]["answer"])
    return [
        RaterHabit(
            rater,
            len(sides.get(rater, ())),
            sum(sides.get(rater, ())),
            wilson(sum(sides[rater]), len(sides[rater])) if sides.get(rater) else None,
            len(again.get(rater, ())),
            sum(again.get(rater, ())),
        )
        for rater in sorted(sides.keys() | again.keys())
    ]


def _differing_items(items: Sequence[AnsweredItem]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return address and answers of the items with different answers, the items that were drawn last first."""
    entries = []
    for item in items:
        answers = {**item.by_rater, **item.by_judge}
        if len(set(answers.values())) > 1:
            address = f"/s/{item.session_key}" + (f"#t-{item.turn}" if item.turn else "")
            entries.append((address, [(name, answer_label(answer)) for name, answer in sorted(answers.items())]))
    return entries[:_LISTED_MAX]


PAGES = (Page("/review/{queue}/agreement", agreement),)
