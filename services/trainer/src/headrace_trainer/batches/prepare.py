"""Pure functions that compute the advantages of a batch's experiences and build the rows and arrays of its examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace_runtime.storage.isolation import is_fatal, reason_of
from headrace_schemas import Branch, Experience
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs
from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings
from headrace_trainer.batches.batch import Batch, Hindsight, Row
from headrace_trainer.experiences.admission import staleness_reason, versions_of
from headrace_trainer.experiences.examples import CorrectionRules, Example, PendingUpdate, SpanAdvantages, turns_of
from headrace_trainer.experiences.replies import CONTRADICTED, ReplyReader
from headrace_trainer.experiences.reports import TrainedExperience
from headrace_trainer.experiences.restrictions import SetBuilder
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience, match_answers, run_of, task_of

ComparedExample = tuple[WaitingExperience, Example]
"""An example whose advantage `compute` returns: a branch, or an answer with a graded reply."""


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
    """Build the row (the arrays for the learner) of one example of a batch.

    Args:
        record: the example with its advantage.
        current: version whose weights equal the present ones; None without one.
        pairs: name of the pair of each answer that is trained together with another one, by experience and part.
        rules: decide whether answers without logprobs are trained.
        by_sequence: whether sequences are averaged, so that a branch counts by its share of its run.
        replies: finds users' replies; None where they are not trained.
        sets: builds the sets of tokens that answers were sampled from; None where the back end cannot use them.
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
    """Return the training row for one answer: the conversation up to the answer's end, of which only the tokens of the
    answer are in the loss.
    """
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
    reply = replies.read_reply(branch, span)
    assert reply is not None, "only an answer with a reply can be contradicted"
    prompt_T, reply_T, next_T = (
        np.array(token_ids, np.int32)
        for token_ids in (reply.prompt, reply.reply, branch.token_ids[reply.next_span.start : reply.next_span.stop])
    )
    earlier_K = np.array([answer.start for answer in replies.earlier_answers(branch, span)], np.int32)
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


@dataclass(frozen=True)
class PreparedBatch:
    """A batch of rows for the learner, with the records and baselines to store once the step has succeeded."""

    batch: Batch
    trained: tuple[TrainedExperience, ...]
    baselines: Baselines


def prepare(
    items: Sequence[WaitingExperience],
    state: LineageState,
    settings: AdvantageSettings,
    decay: Decay,
    full_rows: int | None = None,
    loss: LossSettings | None = None,
) -> PreparedBatch:
    """Build a batch from waiting experiences, with its rows in the order of `items`.

    Corrections get the missing advantage. They neither depend on the baselines nor change them.

    Args:
        full_rows: number of experiences of a full batch; None: the number of `items`.
        loss: settings of the loss, for its aggregation; None for a mean over tokens.
    """
    for item in items:
        versions = versions_of(item.experience, state.limits.rules)
        assert staleness_reason(versions, state.history, state.limits.max_staleness) is None, "stale: not dropped"
    updates = [(item, update) for item in items for update in state.pending_updates(item)]
    pairs = match_answers(
        [(item.experience.experience_id, update.example) for item, update in updates if update.is_new]
    )
    trainable = [(item, update) for item, update in updates if _can_train(item, update, pairs)]
    compared = [(item, update.example) for item, update in trainable if update.advantage is None]
    past, new = _winsorise(compared, state, settings)
    advantages, baselines = _advantages(new, past, state, settings, decay)
    first = iter(
        [
            _first_training(item, example, index, advantages, state, settings)
            for index, (item, example) in enumerate(new)
        ]
    )
    trained = tuple(
        next(first) if update.advantage is None else _update_record(item, update, state) for item, update in trainable
    )
    assert {record.waiting.experience.experience_id for record in trained} == {
        item.experience.experience_id for item in items
    }
    agg_mode = loss.agg_mode if loss else "token-mean"
    by_sequence = agg_mode.startswith("seq-")
    replies = state.limits.replies
    rules, sets = state.limits.rules, state.limits.sets
    rows = tuple(
        row_of(record, state.current, pairs, rules, by_sequence=by_sequence, replies=replies, sets=sets)
        for record in trained
    )
    size = full_rows if full_rows is None or len(rows) == len(items) else full_rows * len(rows) / len(items)
    return PreparedBatch(Batch(rows, size, agg_mode, loss.horizon_tokens if loss else 1), trained, baselines)


@dataclass(frozen=True)
class IsolatedBatch:
    """A prepared batch without the experiences that make the preparation fail, and those experiences."""

    items: tuple[WaitingExperience, ...]
    prepared: PreparedBatch | None
    """None when no experience is left."""
    culprits: tuple[tuple[WaitingExperience, str], ...] = ()
    """The experiences that break the preparation, with the reasons."""


def prepare_isolated(
    items: Sequence[WaitingExperience], prepare_items: Callable[[Sequence[WaitingExperience]], PreparedBatch]
) -> IsolatedBatch:
    """Prepare a batch; if that fails, remove the experiences that cause the failure and prepare the others.

    Args:
        items: the experiences of the batch.
        prepare_items: function that prepares a batch of some of the items.

    Raises:
        Exception: the error of `prepare_items`, if no experience is at fault.
    """
    try:
        return IsolatedBatch(tuple(items), prepare_items(items))
    except Exception:
        culprits = find_failing_items(items, prepare_items)
        if not culprits:
            raise
    rest = tuple(item for item in items if all(item is not culprit for culprit, _ in culprits))
    return IsolatedBatch(rest, prepare_items(rest) if rest else None, tuple(culprits))


def find_failing_items(
    items: Sequence[WaitingExperience], prepare_items: Callable[[Sequence[WaitingExperience]], object]
) -> list[tuple[WaitingExperience, str]]:
    """Return the items that make `prepare_items` fail, with the reasons; empty if no single item causes the failure.

    An item causes it if the preparation succeeds without this item. If there is no such item, all items are returned
    whose preparation fails even alone.
    """
    for index, item in enumerate(items):
        if len(items) > 1 and _preparation_error([*items[:index], *items[index + 1 :]], prepare_items) is None:
            return [(item, _preparation_error([item], prepare_items) or "the batch cannot be prepared with it")]
    results = [(item, _preparation_error([item], prepare_items)) for item in items]
    return [(item, reason) for item, reason in results if reason is not None]


def _preparation_error(
    items: Sequence[WaitingExperience], prepare_items: Callable[[Sequence[WaitingExperience]], object]
) -> str | None:
    try:
        prepare_items(items)
    except Exception as error:
        if is_fatal(error) or isinstance(error, OSError | MemoryError):
            raise
        return reason_of(error)
    return None


def _can_train(item: WaitingExperience, update: PendingUpdate, pairs: dict[tuple[str, str], str]) -> bool:
    """Return whether the batch contains everything that an update of the experience `item` needs.

    The first training of one example of a pair (an edit and the answer that it replaces, or the two sides of a
    preference) needs the other example of the pair. All other updates can be trained alone.

    Args:
        item: the waiting experience.
        update: an update that the weights still lack for it.
        pairs: name of the pair of each example whose other example is in the batch, by experience id and part.
    """
    return not (update.is_new and update.example.pair) or (item.experience.experience_id, update.example.part) in pairs


def _first_training(
    item: WaitingExperience,
    example: Example,
    index: int,
    advantages: Advantages,
    state: LineageState,
    settings: AdvantageSettings,
) -> TrainedExperience:
    """Return the record of an example that is trained for the first time, with its computed advantage.

    Args:
        item: the waiting experience of the example.
        example: the example.
        index: position of the example in `advantages`.
        advantages: advantages of all examples that the estimator compared.
        state: the lineage.
        settings: settings of the advantages.
    """
    value = _clip(advantages.values_B[index], settings.limit)
    terms = (advantages.baselines_B[index], advantages.scales_B[index])
    record = TrainedExperience(item, value, *terms, example=example)
    credit = state.limits.rules.credit
    if credit is None or not advantages.turn_scales_B or not example.is_branch:
        return record
    turn_terms = (advantages.turn_baselines_B[index], advantages.turn_scales_B[index])
    turns = credit(advantages.values_B[index], turns_of(item.experience, state.limits.rules), *turn_terms)
    bounded = tuple(_clip(turn, settings.limit) for turn in turns)
    return replace(record, turns=bounded, turn_terms=turn_terms if turn_terms[1] else None)


def _winsorise(
    compared: Sequence[ComparedExample], state: LineageState, settings: AdvantageSettings
) -> tuple[Baselines, list[ComparedExample]]:
    """Add the rewards of a batch to their ranges, and winsorise them.

    The ranges take in the whole batch before any of its rewards is compared with them. Grades of replies have no range.

    Returns:
        The baselines with the new ranges, and the examples with winsorised rewards.
    """
    limits = settings.range_limits
    branches = [item for item, example in compared if example.is_branch]
    if not branches or not limits.factor:
        return state.baselines, list(compared)
    experiences = [(run_of(item.experience), item.experience) for item in branches]
    ranges = state.baselines.ranges.add_batch(experiences, limits)
    bounded = [
        (item.model_copy(update={"experience": ranges.winsorise(item.experience, limits)}), example)
        if example.is_branch
        else (item, example)
        for item, example in compared
    ]
    rewards: dict[str, list[float]] = {}
    for item, example in bounded:
        task, reward = task_of(item.experience), item.experience.reward
        if example.is_branch and task is not None and reward is not None:
            rewards.setdefault(task, []).append(reward)
    return state.baselines.repair(ranges, limits, rewards), bounded


def _advantages(
    compared: Sequence[ComparedExample],
    past: Baselines,
    state: LineageState,
    settings: AdvantageSettings,
    decay: Decay,
) -> tuple[Advantages, Baselines]:
    if not compared:
        return Advantages((), (), ()), past
    rules, experiences_B = state.limits.rules, [item.experience for item, _ in compared]
    counts = Counter(experience.experience_id for experience in experiences_B)
    replies = state.limits.signals.replies
    batch = AdvantageInputs(
        [_compared_value(item.experience, example, rules) for item, example in compared],
        [experience.weight / counts[experience.experience_id] for experience in experiences_B],
        [run_of(experience) for experience in experiences_B],
        [task_of(experience) for experience in experiences_B],
        [turns_of(item.experience, rules) if example.is_branch else () for item, example in compared],
        [example.reply for _, example in compared] if replies else (),
    )
    return settings.estimator.compute(batch, past, decay, settings)


def _compared_value(experience: Experience, example: Example, rules: CorrectionRules) -> float:
    """Return the number that the estimator compares: the reward of a branch as the algorithm maps it, or a reply's
    grade."""
    if example.grade is not None:
        return example.grade
    assert experience.reward is not None, "only a correction may lack a reward"
    return experience.reward if rules.worth is None else rules.worth(experience.reward)


def _update_record(item: WaitingExperience, update: PendingUpdate, state: LineageState) -> TrainedExperience:
    """Return the record of an update whose advantage needs no estimator: a demonstration, one of two compared answers,
    or a correction after a changed reward.
    """
    entry = state.window.get(item.experience.experience_id)
    assert entry is not None
    assert update.advantage is not None
    correction = entry.trained and (not update.is_new or not update.example.part)
    baseline, scale = entry.terms_of(update.example.part)
    return TrainedExperience(
        item,
        float(np.float32(update.advantage)),
        baseline,
        scale,
        correction,
        update.token_weight,
        update.example,
        _round_to_single(update.turns),
        entry.turn_terms,
    )


def _round_to_single(turns: SpanAdvantages) -> SpanAdvantages:
    return tuple(float(np.float32(turn)) for turn in turns)


def _clip(advantage: float, limit: float) -> float:
    """Return the advantage as the loss uses it: clipped, and in single precision."""
    return float(np.float32(max(-limit, min(limit, advantage))))
