"""Pages of review queues for reviewers: the form that creates one, and the agreement of its raters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from headrace_console.agreement import COMMON_MIN, Coefficient, agreement_of
from headrace_console.pages.page import Page, Visit
from headrace_console.pages.review import queue_of_path
from headrace_console.pages.sessions import CHOICES, FILTERS, chosen_tenant, parse_filter
from headrace_console.read_model import queues
from headrace_console.read_model.queues import QUEUES_MAX, QueueRules
from headrace_console.read_model.ratings import ITEMS_MAX, AnsweredItem, random_items
from headrace_console.read_model.verdicts import BOTH_BAD, QUEUE_NAME, SAME, sides_of
from headrace_console.review_feedback import SIDES
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.values.ids import is_name
from headrace_schemas.values.text import printable, storable
from headrace_statistics.intervals import wilson

_FIELDS = ("tenant", "name", "question", "about", "rubric", "labels", "ratings", "reserved_s", "items_max", "raters")
_LABELS_MAX = 9
"""Largest number of labels: each has a digit key."""
_RATERS_MAX = 100
_RESERVED_LABELS = frozenset({SAME, BOTH_BAD, "skip", "undo", *SIDES})


async def form(visit: Visit) -> Response:
    """Show the form for a new review queue, filled with the filter of the URL query."""
    parameters = visit.parameters("tenant", *FILTERS)
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, parameters)
    return visit.render(
        "review_new.html",
        tenants=list(tenants),
        tenant=tenant,
        parameters=parameters,
        filters=[name for name in FILTERS if name not in CHOICES],
        choices=CHOICES,
    )


async def make(visit: Visit) -> Response:
    """Create a review queue from a form, draw its first items, and redirect to its page."""
    form = await visit.fields((*_FIELDS, *FILTERS))
    name = form.get("name", "").strip()
    if QUEUE_NAME.fullmatch(name) is None:
        raise _refusal("name", name, "must have 1 to 64 lower-case letters, digits, - and _, with no - or _ first")
    rules = rules_of(form)
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, form)
        if tenant is None:
            raise _refusal("tenant", "", "has no session yet; a queue needs sessions to draw from")
        now_ms = epoch_ms(visit.parts.clock.now())
        number = await queues.add_queue(tx, tenants[tenant], name, rules, now_ms)
        if number is None:
            raise _refusal("name", name, f"is used, or tenant {tenant} has {QUEUES_MAX} queues; choose another name")
        queue = await queues.queue_of(tx, visit.user, number, locked=True)
        if queue is not None:
            await queues.draw_items(tx, queue, parse_filter(rules.filter))
    return RedirectResponse(f"/review/{number}", 303)


def rules_of(form: Mapping[str, str]) -> QueueRules:
    """Return the rules of a new review queue from the fields of its form. Raises `Refused` 400 for an invalid value."""
    selection = {name: form[name] for name in FILTERS if form.get(name)}
    parse_filter(selection)
    labels, raters = (_list(form.get(field, "")) for field in ("labels", "raters"))
    if form.get("question") == "label" and not 2 <= len(labels) <= _LABELS_MAX:
        raise _refusal("labels", form.get("labels", ""), f"must name 2 to {_LABELS_MAX} different labels, with commas")
    wrong = [label for label in labels if not is_name(label) or len(label) > 64 or label in _RESERVED_LABELS]
    if wrong:
        raise _refusal(
            "labels", wrong[0], f"must have 1 to 64 characters and be none of {', '.join(sorted(_RESERVED_LABELS))}"
        )
    if len(raters) > _RATERS_MAX:
        raise _refusal("raters", form.get("raters", ""), f"must name at most {_RATERS_MAX} users")
    numbers = {field: form[field] for field in ("ratings", "reserved_s", "items_max") if form.get(field)}
    if form.get("question") in ("pair", "edit") and form.get("about") == "session":
        raise _refusal("about", "session", "must be answer, because pairs and edits are of answers")
    try:
        return QueueRules.model_validate(
            {
                "question": form.get("question", ""),
                "about": form.get("about") or "answer",
                "rubric": storable(form.get("rubric", "").strip()),
                "labels": labels if form.get("question") == "label" else (),
                "raters": raters,
                "filter": selection,
                **numbers,
            }
        )
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])
        raise _refusal(field, form.get(field, ""), problem["msg"]) from None


def _list(text: str) -> tuple[str, ...]:
    """Return the entries of a list that is separated by commas or line breaks, without duplicates."""
    return tuple(dict.fromkeys(entry for part in re.split(r"[,\n]", text) if (entry := part.strip())))


def _refusal(field: str, text: str, problem: str) -> Refused:
    return Refused(400, "invalid_form", f"{field} = {printable(text[:200])!r}: {problem}", field)


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
    """Show how far raters and judges agree on the items that were drawn at random, and the items on which they
    differ.
    """
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
    """Return a coefficient and its 95 % interval as text, or the reason why it has none."""
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
    """Return, for each rater of pairs, how often A was chosen and how often repeated pairs got equal answers."""
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
    """Return the address and the answers of each item with different answers, the most recently drawn item first."""
    entries = []
    for item in items:
        answers = {**item.by_rater, **item.by_judge}
        if len(set(answers.values())) > 1:
            address = f"/s/{item.session_key}" + (f"#t-{item.turn}" if item.turn else "")
            entries.append((address, [(name, answer_label(answer)) for name, answer in sorted(answers.items())]))
    return entries[:_LISTED_MAX]


PAGES = (
    Page("/review/new", form, role="reviewer"),
    Page("/review/new", make, role="reviewer", method="POST"),
    Page("/review/{queue}/agreement", agreement),
)
