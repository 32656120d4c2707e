"""Experiences that were admitted and wait for a batch, and the selection of the next batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from headrace_runtime.clock import from_epoch_ms
from headrace_schemas import Experience
from headrace_schemas.values.base import Model
from headrace_schemas.values.ids import tenant_name


class WaitingExperience(Model):
    """An admitted experience and the time of its arrival."""

    experience: Experience
    since_ms: int

    @property
    def tokens(self) -> int:
        return len(self.experience.branch.token_ids) if self.experience.branch else 0


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Conditions for a batch; see the settings of the same names. `group_size` 0: no groups are needed."""

    experiences: int
    experiences_min: int
    wait: timedelta
    group_size: int
    group_wait: timedelta
    equal_groups: bool = True
    """Whether groups whose runs all have the same reward are trained, too."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The next batch, in order of arrival, empty when it is not time yet; and runs whose group did not come in time."""

    batch: tuple[WaitingExperience, ...] = ()
    singletons: tuple[WaitingExperience, ...] = ()
    equal: tuple[WaitingExperience, ...] = ()
    """Groups whose runs all have the same reward, where they are not trained."""
    unpaired: tuple[WaitingExperience, ...] = ()
    """Answers whose counterpart never came."""


def task_of(experience: Experience) -> str | None:
    """Return the name of the task whose experiences are compared with each other, or None when no task was named."""
    return None if experience.task_id is None else tenant_name(experience.tenant, experience.task_id)


def run_of(experience: Experience) -> str:
    """Return the name that all branches and parts of one run share."""
    task = task_of(experience)
    return f"{task}/{experience.run_id}" if task and experience.run_id else experience.trajectory_id


def select(
    waiting: Sequence[WaitingExperience],
    rules: BatchRules,
    now: datetime,
    full: bool,
    is_correction: Callable[[WaitingExperience], bool],
) -> Selection:
    """Select the next batch.

    Args:
        waiting: The experiences in order of arrival.
        rules: The conditions for a batch.
        now: The present time.
        full: Whether the queue is full, so that no further experience can arrive before some are trained.
        is_correction: Whether an experience corrects an earlier training and needs no group.
    """
    if not rules.group_size:
        return Selection(batch=take_ready(waiting, run_of, rules, now, full))
    complete, singletons, equal = _split_groups(waiting, rules, now, is_correction)
    return Selection(take_ready(complete, _group_name, rules, now, full), tuple(singletons), tuple(equal))


def take_ready(
    ready: Sequence[WaitingExperience], unit: Callable[[Experience], str], rules: BatchRules, now: datetime, full: bool
) -> tuple[WaitingExperience, ...]:
    """Return the first `rules.experiences` and the rest of the last one's unit; fewer when they have waited enough."""
    if len(ready) >= rules.experiences:
        cut = rules.experiences
        while cut < len(ready) and unit(ready[cut].experience) == unit(ready[cut - 1].experience):
            cut += 1
        return tuple(ready[:cut])
    waited = bool(ready) and now - from_epoch_ms(min(item.since_ms for item in ready)) >= rules.wait
    return tuple(ready) if full or (waited and len(ready) >= rules.experiences_min) else ()


def _group_name(experience: Experience) -> str:
    return task_of(experience) or run_of(experience)


def _split_groups(
    waiting: Sequence[WaitingExperience],
    rules: BatchRules,
    now: datetime,
    is_correction: Callable[[WaitingExperience], bool],
) -> tuple[list[WaitingExperience], list[WaitingExperience], list[WaitingExperience]]:
    """Return the members of complete groups, group by group, after the corrections, which need none; the runs that can
    never have a group; and the members of groups with equal rewards, where these are not trained."""
    complete = [item for item in waiting if is_correction(item)]
    equal: list[WaitingExperience] = []
    groups: dict[str | None, list[WaitingExperience]] = {}
    for item in waiting:
        if not is_correction(item):
            groups.setdefault(task_of(item.experience), []).append(item)
    singletons = groups.pop(None, [])
    for members in groups.values():
        runs = len({run_of(item.experience) for item in members})
        late = now - from_epoch_ms(members[0].since_ms) >= rules.group_wait
        if runs >= rules.group_size or (late and runs > 1):
            same = len({item.experience.reward for item in members}) == 1
            (equal if same and not rules.equal_groups else complete).extend(members)
        elif late:
            singletons += members
    return complete, singletons, equal
