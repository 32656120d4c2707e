"""From an example to a row: the exact tokens of the branch, and what was written after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace_schemas import Branch, Experience
from headrace_trainer.batches.batch import Hindsight, Row
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.replies import CONTRADICTED, ReplyReader
from headrace_trainer.experiences.trained_experience import TrainedExperience


def row_of(
    one: TrainedExperience,
    current: str | None,
    pairs: Mapping[tuple[str, str], str],
    *,
    by_sequence: bool = False,
    replies: ReplyReader | None = None,
) -> Row:
    """`current` is the version that the weights equal now. `pairs`: which answers are trained together. `by_sequence`:
    sequences are averaged, so a branch counts as much as it is of its run. `replies`: reads what users said next, where
    that is trained."""
    experience, example = one.waiting.experience, one.example
    row = Row.of(experience, one.advantage, current, one.token_weight)
    if example.part:
        row = _answer(row, experience, example)
        row = replace(row, part=example.part, hindsight=_hindsight(experience, example, replies))
        pair = "" if row.correction else pairs.get((experience.experience_id, example.part), "")
        return replace(row, together=pair)
    if by_sequence and experience.weight != 1.0:
        row = replace(row, share=experience.weight)
    return _by_turn(row, experience, one.turns) if one.turns else row


def _answer(row: Row, experience: Experience, example: Example) -> Row:
    """The sequence up to the end of one answer, with that alone in the loss."""
    span = example.span(_branch(experience))
    assert span is not None, "an example of an answer that is not in the branch is none"
    if not example.tokens:
        mask = np.zeros(span.stop, np.bool_)
        mask[span.start :] = True
        behaviour, temperature = np.zeros(span.stop, np.float32), np.ones(span.stop, np.float32)
        behaviour[span.start :] = row.behaviour_T[span.start : span.stop]
        temperature[span.start :] = row.temperature_T[span.start : span.stop]
        return replace(
            row,
            token_ids_T=row.token_ids_T[: span.stop],
            loss_mask_T=mask,
            behaviour_T=behaviour,
            temperature_T=temperature,
            fresh_T=row.fresh_T[: span.stop] & mask,
        )
    length = span.start + len(example.tokens)
    return replace(
        row,
        token_ids_T=np.concatenate([row.token_ids_T[: span.start], np.array(example.tokens, np.int32)]),
        loss_mask_T=np.arange(length) >= span.start,
        behaviour_T=np.zeros(length, np.float32),
        temperature_T=np.ones(length, np.float32),
        fresh_T=np.zeros(length, np.bool_),
        written=True,
    )


def _hindsight(experience: Experience, example: Example, replies: ReplyReader | None) -> Hindsight | None:
    if replies is None or not example.part.startswith(CONTRADICTED):
        return None
    branch = _branch(experience)
    span = example.span(branch)
    assert span is not None
    found = replies.read(branch, span)
    assert found is not None, "an answer without a reply was never contradicted"
    prompt_T, reply_T, next_T = (
        np.array(one, np.int32)
        for one in (found.prompt, found.reply, branch.token_ids[found.next.start : found.next.stop])
    )
    earlier_K = np.array([one.start for one in replies.earlier(branch, span)], np.int32)
    return Hindsight(prompt_T, reply_T, next_T, found.next.temperature, earlier_K)


def _by_turn(row: Row, experience: Experience, turns: tuple[float, ...]) -> Row:
    advantage_T = np.zeros(row.length, np.float32)
    for span, advantage in zip(_branch(experience).spans, turns, strict=True):
        advantage_T[span.start : span.stop] = advantage
    mean = np.float32(advantage_T[row.loss_mask_T].astype(np.float64).mean())
    return replace(row, advantage=mean, advantage_T=advantage_T)


def _branch(experience: Experience) -> Branch:
    assert experience.branch is not None
    return experience.branch
