"""The form with which a reviewer creates a review queue."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from headrace_console.pages.page import Page, Visit
from headrace_console.pages.sessions import CHOICES, FILTERS, chosen_tenant, parse_filter
from headrace_console.read_model import queues
from headrace_console.read_model.queues import QUEUES_MAX, QueueRules
from headrace_console.read_model.verdicts import BOTH_BAD, QUEUE_NAME, SAME
from headrace_console.review_feedback import SIDES
from headrace_runtime.clock import epoch_ms
from headrace_runtime.errors import Refused
from headrace_schemas.values.ids import is_name
from headrace_schemas.values.text import printable, storable

_FIELDS = ("tenant", "name", "question", "about", "rubric", "labels", "ratings", "reserved_s", "items_max", "raters")
_LABELS_MAX = 9
"""Largest number of labels: each has a digit key."""
_RATERS_MAX = 100
_RESERVED_LABELS = frozenset({SAME, BOTH_BAD, "skip", "undo", *SIDES})


async def form(visit: Visit) -> Response:
    """Show the form, filled with the filter of the query."""
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
    """Store a queue, draw its first items, and redirect to it."""
    form = await visit.fields((*_FIELDS, *FILTERS))
    name = form.get("name", "").strip()
    if QUEUE_NAME.fullmatch(name) is None:
        raise _refused("name", name, "must have 1 to 64 lower-case letters, digits, - and _, with no - or _ first")
    rules = rules_of(form)
    async with visit.transaction() as tx:
        tenants, tenant = await chosen_tenant(tx, visit.user, form)
        if tenant is None:
            raise _refused("tenant", "", "has no session yet; a queue needs sessions to draw from")
        now_ms = epoch_ms(visit.parts.clock.now())
        number = await queues.add_queue(tx, tenants[tenant], name, rules, now_ms)
        if number is None:
            raise _refused("name", name, f"is used, or tenant {tenant} has {QUEUES_MAX} queues; choose another name")
        queue = await queues.queue_of(tx, visit.user, number, locked=True)
        if queue is not None:
            await queues.draw_items(tx, queue, parse_filter(rules.filter))
    return RedirectResponse(f"/review/{number}", 303)


def rules_of(form: Mapping[str, str]) -> QueueRules:
    """Return the rules of a form. Raises `Refused` 400 for a field that has a value that is not permitted."""
    selection = {name: form[name] for name in FILTERS if form.get(name)}
    parse_filter(selection)
    labels, raters = (_list(form.get(field, "")) for field in ("labels", "raters"))
    if form.get("question") == "label" and not 2 <= len(labels) <= _LABELS_MAX:
        raise _refused("labels", form.get("labels", ""), f"must name 2 to {_LABELS_MAX} different labels, with commas")
    wrong = [label for label in labels if not is_name(label) or len(label) > 64 or label in _RESERVED_LABELS]
    if wrong:
        raise _refused(
            "labels", wrong[0], f"must have 1 to 64 characters and be none of {', '.join(sorted(_RESERVED_LABELS))}"
        )
    if len(raters) > _RATERS_MAX:
        raise _refused("raters", form.get("raters", ""), f"must name at most {_RATERS_MAX} users")
    numbers = {field: form[field] for field in ("ratings", "reserved_s", "items_max") if form.get(field)}
    if form.get("question") in ("pair", "edit") and form.get("about") == "session":
        raise _refused("about", "session", "must be answer, because pairs and edits are of answers")
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
        raise _refused(field, form.get(field, ""), problem["msg"]) from None


def _list(text: str) -> tuple[str, ...]:
    """Return the entries of a list that is separated by commas or line breaks, without duplicates."""
    return tuple(dict.fromkeys(entry for part in re.split(r"[,\n]", text) if (entry := part.strip())))


def _refused(field: str, text: str, problem: str) -> Refused:
    return Refused(400, "invalid_form", f"{field} = {printable(text[:200])!r}: {problem}", field)


PAGES = (
    Page("/review/new", form, role="reviewer"),
    Page("/review/new", make, role="reviewer", method="POST"),
)
