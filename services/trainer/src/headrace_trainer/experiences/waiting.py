"""Experiences that were admitted and wait for a batch, and which of them make the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from headrace_runtime.clock import from_epoch_ms
from headrace_schemas import Experience
from headrace_schemas.base import Model
from headrace_schemas.ids import tenant_name


class Waiting(Model):
    """One admitted experience."""

    experience: Experience
    since_ms: int

    @property
    def tokens(self) -> int:
        return len(self.experience.branch.token_ids) if self.experience.branch else 0


@dataclass(frozen=True, slots=True)
class Rules:
    """When a batch is ready; see the settings of the same names. `group_size` 0: no groups are needed."""

    experiences: int
    experiences_min: int
    wait: timedelta
    group_size: int
    group_wait: timedelta
    equal_groups: bool = True
    """Whether groups whose runs all have one reward are trained, too."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The next batch, in order of arrival, empty when it is not time yet; and runs that waited for a group in vain."""

    batch: tuple[Waiting, ...] = ()
    singletons: tuple[Waiting, ...] = ()
    equal: tuple[Waiting, ...] = ()
    """Groups whose runs all have one reward, where they are not trained."""
    unpaired: tuple[Waiting, ...] = ()
    """Answers whose other one never came."""


def task_of(experience: Experience) -> str | None:
    """What experiences are compared within; None when nobody said what the task was."""
    return None if experience.task_id is None else tenant_name(experience.tenant, experience.task_id)


def run_of(experience: Experience) -> str:
    """Branches and parts of one run share it."""
    task = task_of(experience)
    return f"{task}/{experience.run_id}" if task and experience.run_id else experience.trajectory_id


def select(
    waiting: Sequence[Waiting],
    rules: Rules,
    now: datetime,
    full: bool,
    is_correction: Callable[[Waiting], bool],
) -> Selection:
    """`waiting` is in order of arrival. `full`: nothing more can arrive before some of them go."""
    if not rules.group_size:
        return Selection(batch=timely(waiting, run_of, rules, now, full))
    complete, singletons, equal = _groups(waiting, rules, now, is_correction)
    return Selection(timely(complete, _group_of, rules, now, full), tuple(singletons), tuple(equal))


def timely(
    ready: Sequence[Waiting], unit: Callable[[Experience], str], rules: Rules, now: datetime, full: bool
) -> tuple[Waiting, ...]:
    """The first `rules.experiences` and what belongs to the last one's unit; fewer when they have waited enough."""
    if len(ready) >= rules.experiences:
        cut = rules.experiences
        while cut < len(ready) and unit(ready[cut].experience) == unit(ready[cut - 1].experience):
            cut += 1
        return tuple(ready[:cut])
    waited = bool(ready) and now - from_epoch_ms(min(item.since_ms for item in ready)) >= rules.wait
    return tuple(ready) if full or (waited and len(ready) >= rules.experiences_min) else ()


def _group_of(experience: Experience) -> str:
    return task_of(experience) or run_of(experience)


def _groups(
    waiting: Sequence[Waiting], rules: Rules, now: datetime, is_correction: Callable[[Waiting], bool]
) -> tuple[list[Waiting], list[Waiting], list[Waiting]]:
    """Members of usable groups, group by group, corrections first (they need none); those who will never have one; and
    those of groups that teach nothing, where these are not wanted."""
    complete = [item for item in waiting if is_correction(item)]
    equal: list[Waiting] = []
    groups: dict[str | None, list[Waiting]] = {}
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
