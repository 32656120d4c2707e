"""Decides when a batch is complete and which experiences are in it. Training and its dry run share these rules."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from headrace_runtime.clock import from_epoch_ms
from headrace_runtime.kafka.wire import Record
from headrace_schemas.programs import BATCH_HEADER, LEFT_OUT_HEADER
from headrace_trainer.algorithms.baselines import Decay
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import (
    BatchRules,
    Selection,
    WaitingExperience,
    form_batch,
    form_parties,
    select,
)
from headrace_trainer.settings import TrainerSettings

_BASELINE_TASKS = 4096
"""Number of tasks with a baseline of their own; the least recently used one is removed first."""
_BASELINE_RUNS = 1024
"""Runs whose share in the baselines is remembered, so that a later branch is not compared with its own run."""

END_OF_TIME = datetime.max.replace(tzinfo=UTC)
"""A time at which every experience has waited long enough."""
BEGINNING_OF_TIME = datetime.min.replace(tzinfo=UTC)
"""A time at which no experience has waited yet."""


class Cutter:
    """Selection of batches: decides when enough experiences wait and which of them the next batch contains.

    Call `next_batch` after each record, and periodically while no record arrives.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self._recorded = settings.cut == "recorded"
        self._rules = BatchRules(
            experiences=settings.batch_experiences,
            experiences_min=min(settings.batch_experiences_min, settings.batch_experiences),
            wait=timedelta(seconds=settings.batch_wait_s),
            group_size=settings.group_size if settings.compares_groups else 0,
            group_wait=timedelta(seconds=settings.group_wait_s),
            equal_groups=settings.advantage.equal_groups == "train",
        )
        self._paired = settings.advantage.signals.paired
        self._pair_wait = timedelta(seconds=settings.group_wait_s)
        self._swept: tuple[str, int] | None = None

    def next_batch(
        self, state: LineageState, now: datetime, recorded_size: int | None = None, undecided: int = 0
    ) -> tuple[WaitingExperience, ...]:
        """Return the batch to train now, empty if no batch is complete.

        Experiences that have become too old, and runs whose group did not come in time, are dropped.

        Args:
            state: the lineage whose waiting experiences are selected.
            now: the present time, with which waiting times are computed.
            recorded_size: in a replay, the size of the batch that the original training formed after the record just
                read; None otherwise.
            undecided: size of a batch that was too small for a decision, 0 without one. The next batch has at least
                twice as many experiences, or all remaining ones at `END_OF_TIME`.
        """
        head = (state.history.head, state.history.head_step)
        if self._swept != head:
            state.sweep()
            self._swept = head
        if undecided and (recorded_size is not None or now == END_OF_TIME):
            recorded_size = undecided + (recorded_size or 0)
        selection = self._select(state, now, recorded_size, self._rules_for(now, undecided))
        for item in selection.singletons:
            state.drop(item, "singleton")
        for item in selection.equal:
            state.drop(item, "singleton", "equal_rewards")
        for item in selection.unpaired:
            state.drop(item, "singleton", "unpaired")
        return selection.batch

    def _rules_for(self, now: datetime, undecided: int) -> BatchRules:
        if not undecided:
            return self._rules
        experiences = max(self._rules.experiences, 2 * undecided)
        experiences_min = self._rules.experiences_min if now == END_OF_TIME else experiences
        return replace(self._rules, experiences=experiences, experiences_min=experiences_min)

    def _select(self, state: LineageState, now: datetime, recorded_size: int | None, rules: BatchRules) -> Selection:
        full = state.room == 0
        if self._recorded and recorded_size is not None:
            return self._select_recorded(state, recorded_size)
        if self._recorded and not full:
            return Selection()  # also at the end: the original had the same experiences waiting there
        selection = self._select_by_rules(state, rules, now, full)
        if full and selection == Selection():  # the queue is full, so the missing members can only come if some leave
            return self._select_by_rules(state, rules, self._half_late_time(state), full)
        return selection

    def _half_late_time(self, state: LineageState) -> datetime:
        """Return the time when half of the waiting experiences have waited for their pair or group too long."""
        since_ms = sorted(item.since_ms for item in state.waiting)
        begun = datetime.fromtimestamp(since_ms[(len(since_ms) - 1) // 2] / 1000, UTC)
        return begun + (self._pair_wait if self._paired else self._rules.group_wait)

    def _select_recorded(self, state: LineageState, recorded_size: int) -> Selection:
        """Return the first `recorded_size` experiences that the original training of a replay could have selected.

        The replay does not know which groups the original trained incomplete because they were late. So all groups
        count as late if too few are complete.
        """
        rules = replace(self._rules, experiences=recorded_size)
        ready = self._select_by_rules(state, rules, BEGINNING_OF_TIME, True).batch
        if len(ready) < recorded_size:
            ready = self._select_by_rules(state, rules, END_OF_TIME, True).batch
        return Selection(ready[:recorded_size])

    def _select_by_rules(self, state: LineageState, rules: BatchRules, now: datetime, full: bool) -> Selection:
        if not full and self._is_early(state, rules, now):
            return Selection()
        if not self._paired:
            return select(state.waiting, rules, now, full, state.is_correction)
        parties = form_parties(state.waiting, self._pair_wait, now, state.open_answers, state.has_corrections)
        batch = form_batch(parties.ready, lambda item: parties.party[item.experience_id], rules, now, full)
        return Selection(batch, unpaired=parties.unpaired)

    def _is_early(self, state: LineageState, rules: BatchRules, now: datetime) -> bool:
        """Return whether no batch is possible yet, a check that does not examine the waiting experiences one by one.

        No batch is possible while fewer experiences wait than a batch has, and none of them has waited for the
        shortest time after which a smaller batch is allowed, or an incomplete pair or group is dropped.
        """
        if len(state.queue) >= rules.experiences or (rules.group_size and not rules.equal_groups):
            return False
        waits = [rules.wait]
        if self._paired:
            waits.append(self._pair_wait)
        elif rules.group_size:
            waits.append(rules.group_wait)
        earliest_ms = state.queue.earliest_ms
        return earliest_ms is None or now - from_epoch_ms(earliest_ms) < min(waits)


def decay(settings: TrainerSettings) -> Decay:
    """Return the decay of the baselines according to the settings."""
    return Decay(
        task=settings.advantage.task_decay,
        model=settings.advantage.model_decay,
        tasks_max=_BASELINE_TASKS,
        runs_max=_BASELINE_RUNS,
    )


def left_out_of(record: Record) -> frozenset[str]:
    """Return the ids in `LEFT_OUT_HEADER` of a replayed record: experiences that the original training left out of the
    batches that it formed right after this record.
    """
    return frozenset(
        value.decode(errors="replace") for name, value in record.headers if name == LEFT_OUT_HEADER and value
    )


def recorded_sizes_of(record: Record) -> tuple[int, ...]:
    """Return the sizes of the batches that the original training formed right after it had read this record, in
    order.
    """
    values = [value for name, value in record.headers if name == BATCH_HEADER]
    return tuple(int(value) for value in values if value and value.isdigit())
