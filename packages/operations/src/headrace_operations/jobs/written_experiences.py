"""Conversion of a tokenized row to the experiences that train it. Pure: the same row always gives the same bytes.

Ids are derived from the digest of the file, the row number and the epoch, so they are unique, and a row that is
published again after a crash is a redelivery.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import datetime

from headrace_operations.jobs.checking import CheckedRow
from headrace_schemas import Branch, Experience
from headrace_schemas.events.experience import PreferenceSide
from headrace_schemas.events.trajectory import Span
from headrace_schemas.programs.models import WrittenBranch
from headrace_schemas.values.ids import derived_id, session_key

_TENANT = "default"
_SIDES = ("chosen", "rejected")


def row_order(rows: int, epoch: int, seed: int, *, shuffle: bool) -> list[int]:
    """Return the positions of an epoch's rows in training order."""
    positions = list(range(rows))
    if shuffle:
        random.Random(f"rows {seed} {epoch}").shuffle(positions)
    return positions


def experiences(row: CheckedRow, epoch: int, *, model: str, version: str, time: datetime) -> Iterator[Experience]:
    """Yield the experiences of one row in one epoch. `version` is the first version of the lineage."""
    pair = derived_id("written-preference", row.file, row.row, epoch) if len(row.answers) > 1 else None
    for side, branches in enumerate(row.answers):
        run = derived_id("written-run", row.file, row.row, epoch, side)
        session = f"{row.file[:16]}-{row.row}-{epoch}-{side}"
        for index, written in enumerate(branches):
            branch = _branch(written, run, version)
            preferences = (_preference_side(pair, side, branch),) if pair else ()
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
    """Return the reward of a row: its number, or 1 or 0 for a good or bad label; otherwise None.

    A missing reward is not invented (P6); the field `origin` shows that the row was written for training. Rows with a
    preference have no reward, because only the comparison counts.
    """
    if paired:
        return None
    if row.reward is not None:
        return row.reward
    return None if row.label is None else float(row.label)


def _preference_side(pair: str, index: int, branch: Branch) -> PreferenceSide:
    last = branch.spans[-1]
    return PreferenceSide(preference_id=pair, side=_SIDES[index], turn_id=last.turn_id, source="written")


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
