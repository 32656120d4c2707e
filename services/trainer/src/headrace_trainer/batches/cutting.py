"""When there is a batch and what is in it. Training and its dry run cut alike because both ask here."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from headrace_runtime.wire import Record
from headrace_schemas.replay import BATCH_HEADER, LEFT_OUT_HEADER
from headrace_trainer.algorithms.baselines import Decay
from headrace_trainer.experiences.pairing import parties
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import Rules, Selection, Waiting, select, timely
from headrace_trainer.settings import TrainerSettings

END_OF_TIME = datetime.max.replace(tzinfo=UTC)
"""Everything has waited for long enough by then."""
BEGINNING_OF_TIME = datetime.min.replace(tzinfo=UTC)
"""Nothing has waited yet."""


class Cutter:
    """Asked after each record and now and then without one."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._recorded = settings.cut == "recorded"
        self._rules = Rules(
            experiences=settings.batch_experiences,
            experiences_min=min(settings.batch_experiences_min, settings.batch_experiences),
            wait=timedelta(seconds=settings.batch_wait_s),
            group_size=settings.group_size if settings.grouped else 0,
            group_wait=timedelta(seconds=settings.group_wait_s),
            equal_groups=settings.advantage.equal_groups == "train",
        )
        self._paired = settings.advantage.signals.paired
        self._pair_wait = timedelta(seconds=settings.pair_wait_s)
        self._swept: tuple[str, int] | None = None

    def next(
        self, state: LineageState, now: datetime, mark: int | None = None, undecided: int = 0
    ) -> tuple[Waiting, ...]:
        """What to train now, empty when it is not time. Drops what has become too old to be trained (P5), and runs
        that waited for a group in vain. `mark` came with the record just read: a batch of so many was cut after it.
        `undecided`: a batch of so many waits for as many more, however long that takes, or until nothing more comes."""
        head = (state.history.head, state.history.head_step)
        if self._swept != head:
            state.sweep()
            self._swept = head
        if undecided and (mark is not None or now == END_OF_TIME):
            mark = undecided + (mark or 0)
        found = self._select(state, now, mark, self._enough(now, undecided))
        for item in found.singletons:
            state.drop(item, "singleton")
        for item in found.equal:
            state.drop(item, "singleton", "equal_rewards")
        for item in found.unpaired:
            state.drop(item, "singleton", "unpaired")
        return found.batch

    def _enough(self, now: datetime, undecided: int) -> Rules:
        if not undecided:
            return self._rules
        experiences = max(self._rules.experiences, 2 * undecided)
        least = self._rules.experiences_min if now == END_OF_TIME else experiences
        return replace(self._rules, experiences=experiences, experiences_min=least)

    def _select(self, state: LineageState, now: datetime, mark: int | None, rules: Rules) -> Selection:
        full = state.room == 0
        if self._recorded and mark is not None:
            return self._as_recorded(state, mark)
        if self._recorded and not full:
            return Selection()  # also at the end: what waits now waited then
        found = self._by_rules(state, rules, now, full)
        if full and found == Selection():  # what they wait for cannot be read: who came first makes room for it
            return self._by_rules(state, rules, self._when_half_is_late(state), full)
        return found

    def _when_half_is_late(self, state: LineageState) -> datetime:
        """When the older half of what waits will have waited for long enough."""
        since_ms = sorted(item.since_ms for item in state.waiting)
        begun = datetime.fromtimestamp(since_ms[(len(since_ms) - 1) // 2] / 1000, UTC)
        return begun + (self._pair_wait if self._paired else self._rules.group_wait)

    def _as_recorded(self, state: LineageState, mark: int) -> Selection:
        """The first `mark` of what was ready then. Of groups that time cut it is only known that there were some."""
        rules = replace(self._rules, experiences=mark)
        ready = self._by_rules(state, rules, BEGINNING_OF_TIME, True).batch
        if len(ready) < mark:
            ready = self._by_rules(state, rules, END_OF_TIME, True).batch
        return Selection(ready[:mark])

    def _by_rules(self, state: LineageState, rules: Rules, now: datetime, full: bool) -> Selection:
        if not self._paired:
            return select(state.waiting, rules, now, full, state.is_correction)
        found = parties(state.waiting, self._pair_wait, now, state.open_answers, state.has_corrections)
        batch = timely(found.ready, lambda one: found.party[one.experience_id], rules, now, full)
        return Selection(batch, unpaired=found.unpaired)


def decay(settings: TrainerSettings) -> Decay:
    """How fast baselines forget."""
    return Decay(
        task=settings.advantage.task_decay,
        model=settings.advantage.model_decay,
        tasks_max=settings.memory.baseline_tasks,
        runs_max=settings.memory.baseline_runs,
    )


def left_out_of(record: Record) -> frozenset[str]:
    """Return the experiences that the original lineage left out of the batches that it cut after this record."""
    return frozenset(
        value.decode(errors="replace") for name, value in record.headers if name == LEFT_OUT_HEADER and value
    )


def marks_of(record: Record) -> tuple[int, ...]:
    """How many experiences the batches had that were cut after this record, in order."""
    values = [value for name, value in record.headers if name == BATCH_HEADER]
    return tuple(int(value) for value in values if value and value.isdigit())
