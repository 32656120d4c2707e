"""Builds the row of an example: the exact tokens of the branch, and the written tokens that follow them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headrace_schemas import Branch, Experience
from headrace_trainer.batches.batch import Hindsight, Row
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.pending_updates import CorrectionRules
from headrace_trainer.experiences.replies import CONTRADICTED, ReplyReader
from headrace_trainer.experiences.restrictions import SetBuilder
from headrace_trainer.experiences.trained_experience import TrainedExperience


def row_of(
    record: TrainedExperience,
    current: str | None,
    pairs: Mapping[tuple[str, str], str],
    rules: CorrectionRules,
    *,
    by_sequence: bool = False,
    replies: ReplyReader | None = None,
    sets: SetBuilder | None = None,
) -> Row:
    """Build the row of an example.

    Args:
        one: The example and its training.
        current: The version whose weights equal the present ones.
        pairs: The pair of each answer that is trained together with another one.
        rules: Whether answers without logprobs are trained.
        by_sequence: Whether sequences are averaged, so that a branch counts by its share of its run.
        replies: Finds users' replies, where they are trained.
        sets: Builds the sets of tokens that answers were sampled from.
    """
    experience, example = record.waiting.experience, record.example
    trained = None if example.tokens else rules.trained_branch(_branch(experience))
    if trained is not None:
        experience = experience.model_copy(update={"branch": trained})
    token_sets = None if sets is None else sets.build(_branch(experience))
    row = Row.of(experience, record.advantage, current, record.token_weight, token_sets)
    if example.part:
        row = _answer_row(row, experience, example)
        row = replace(row, part=example.part, hindsight=_hindsight(experience, example, replies))
        pair = "" if row.correction else pairs.get((experience.experience_id, example.part), "")
        return replace(row, together=pair)
    if by_sequence and experience.weight != 1.0:
        row = replace(row, share=experience.weight)
    return _with_turn_advantages(row, experience, record.turns) if record.turns else row


def _answer_row(row: Row, experience: Experience, example: Example) -> Row:
    """Return the sequence up to the end of one answer, with that answer alone in the loss."""
    span = example.span(_branch(experience))
    assert span is not None, "examples of answers outside the branch are dropped earlier"
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
            unsampled_T=None if row.unsampled_T is None else row.unsampled_T[: span.stop] & mask,
            sets=None if row.sets is None else row.sets.between(span.start, span.stop),
        )
    length = span.start + len(example.tokens)
    return replace(
        row,
        token_ids_T=np.concatenate([row.token_ids_T[: span.start], np.array(example.tokens, np.int32)]),
        loss_mask_T=np.arange(length) >= span.start,
        behaviour_T=np.zeros(length, np.float32),
        temperature_T=np.ones(length, np.float32),
        fresh_T=np.zeros(length, np.bool_),
        unsampled_T=None,
        sets=None,
        written=True,
    )


def _hindsight(experience: Experience, example: Example, replies: ReplyReader | None) -> Hindsight | None:
    if replies is None or not example.part.startswith(CONTRADICTED):
        return None
    branch = _branch(experience)
    span = example.span(branch)
    assert span is not None
    reply = replies.read(branch, span)
    assert reply is not None, "only an answer with a reply can be contradicted"
    prompt_T, reply_T, next_T = (
        np.array(token_ids, np.int32)
        for token_ids in (reply.prompt, reply.reply, branch.token_ids[reply.next_span.start : reply.next_span.stop])
    )
    earlier_K = np.array([answer.start for answer in replies.earlier(branch, span)], np.int32)
    return Hindsight(prompt_T, reply_T, next_T, reply.next_span.temperature, earlier_K)


def _with_turn_advantages(row: Row, experience: Experience, turns: tuple[float, ...]) -> Row:
    advantage_T = np.zeros(row.length, np.float32)
    for span, advantage in zip(_branch(experience).spans, turns, strict=True):
        advantage_T[span.start : span.stop] = advantage
    mean = np.float32(advantage_T[row.loss_mask_T].astype(np.float64).mean())
    return replace(row, advantage=mean, advantage_T=advantage_T)


def _branch(experience: Experience) -> Branch:
    assert experience.branch is not None
    return experience.branch
