"""List of the sessions that a version was trained on, ordered by advantage."""

from __future__ import annotations

from starlette.responses import Response

from headrace_console.advantages import direction, is_undone
from headrace_console.pages.models import find_version
from headrace_console.pages.page import Page, Visit, choice_of
from headrace_console.read_model.packing import unpack_numbers
from headrace_console.read_model.queries import PAGE_ROWS, Row
from headrace_console.read_model.status import history_of
from headrace_console.read_model.training_queries import Runs, runs_of, version_training

ORDERS = ("up", "down")
"""Values of the parameter `first`: order by descending (`up`) or ascending (`down`) advantage."""


async def learned(visit: Visit) -> Response:
    """Show the page of the sessions on which a version was trained, beyond those of the version before it."""
    first = choice_of(visit.parameters("first"), "first", ORDERS)
    version = (await find_version(visit)).id
    async with visit.transaction() as tx:
        training = await version_training(tx, visit.user.scope, version, is_ascending=first == "down")
        runs = await runs_of(tx, {row["session"] for row in training.rows} if training is not None else ())
    return visit.render(
        "learned.html",
        version=version,
        training=training,
        rows=[_row(row, runs) for row in training.rows] if training is not None else [],
        first=first,
        rows_max=PAGE_ROWS,
    )


def _row(row: Row, runs: Runs) -> dict[str, object]:
    """Return the values of one row of the page: a revision of an experience that the version was trained on.

    Args:
        row: the stored experience and the advantage that it was trained with.
        runs: runs of the listed sessions, by which the row names its run.
    """
    history, turns = history_of(row["history"]), unpack_numbers(row["turns"])
    entry = next(
        (
            entry
            for entry in history
            if entry.kind == "trained"
            and (entry.lineage, entry.save, entry.revision) == (row["lineage"], row["save"], row["revision"])
        ),
        None,
    )
    return {
        "key": row["session_key"],
        "title": row["title"] or row["session_id"] or row["session_key"],
        "revision": row["revision"],
        "first_turn": min(turns, default=0),
        "run": runs.of_turn.get(min(turns, default=0), ""),
        "turns": len(turns),
        "reward": row["reward"],
        "advantage": row["advantage"],
        "direction": direction(row["advantage"]),
        "is_undone": entry is not None and is_undone(entry, history),
    }


PAGES = (Page("/models/{model}/{digest}/learned", learned),)
