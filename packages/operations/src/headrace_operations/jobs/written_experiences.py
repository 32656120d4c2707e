"""From a row with tokens to the experiences that train it. Pure: the same row makes the same bytes, however often.

Ids come from the digest of the row's file, its number there, and the epoch, so no two rows share one and a row that is
sent again, because a job was killed, is a redelivery.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import datetime

from headrace_operations.jobs.checking import CheckedRow
from headrace_schemas import Branch, Experience
from headrace_schemas.events.experience import PreferenceSide
from headrace_schemas.events.trajectory import Span
from headrace_schemas.ids import derived_id, session_key
from headrace_schemas.written import WrittenBranch

_TENANT = "default"
_SIDES = ("chosen", "rejected")


def order(rows: int, epoch: int, seed: int, *, shuffle: bool) -> list[int]:
    """The places of an epoch's rows, in the order in which they are trained."""
    places = list(range(rows))
    if shuffle:
        random.Random(f"rows {seed} {epoch}").shuffle(places)
    return places


def experiences(row: CheckedRow, epoch: int, *, model: str, version: str, time: datetime) -> Iterator[Experience]:
    """Those of one row in one epoch. `version` is the one that the lineage begins with."""
    pair = derived_id("written-preference", row.file, row.row, epoch) if len(row.answers) > 1 else None
    for side, branches in enumerate(row.answers):
        run = derived_id("written-run", row.file, row.row, epoch, side)
        session = f"{row.file[:16]}-{row.row}-{epoch}-{side}"
        for index, written in enumerate(branches):
            branch = _branch(written, run, version)
            preferences = (_side(pair, side, branch),) if pair else ()
            reward = _reward(row, paired=pair is not None)
            yield Experience(
                time=time,
                experience_id=Experience.id_of(run, index),
                trajectory_id=run,
                session_key=session_key(_TENANT, session),
                session_id=session,
                task_id=f"row-{row.prompt[:32]}-{epoch}",
                run_id=run,
                model=model,
                branch_index=index,
                branch=branch,
                turn_ids=branch.turn_ids,
                weight=1 / len(branches),
                reward=reward,
                no_reward="no_reward" if reward is None else None,
                preferences=preferences,
                origin="written",
            )


def _reward(row: CheckedRow, *, paired: bool) -> float | None:
    """What the row says: a number, or 1 or 0 for an answer that is good or bad. Else there is none, and none is made up
    (P6): that it was written to be learned, `origin` says. Of the sides of a pair only the comparison counts."""
    if paired:
        return None
    if row.reward is not None:
        return row.reward
    return None if row.label is None else float(row.label)


def _side(pair: str, side: int, branch: Branch) -> PreferenceSide:
    last = branch.spans[-1]
    return PreferenceSide(preference_id=pair, side=_SIDES[side], turn_id=last.turn_id, source="written")


def _branch(written: WrittenBranch, run: str, version: str) -> Branch:
    spans: Sequence[Span] = tuple(
        Span(
            start=span.start,
            logprobs=(0.0,) * span.length,
            turn_id=derived_id("written-turn", run, span.message),
            version=version,
        )
        for span in written.spans
    )
    return Branch(token_ids=written.token_ids, spans=tuple(spans))
