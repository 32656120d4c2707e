"""Experiences that were admitted and wait for a batch, the pairs of their compared answers, and the selection of the
next batch.

An experience waits until both answers of each of its comparisons have arrived. Experiences that are connected by
comparisons form a *party* and are trained in one batch. When the first experience of a party has waited long enough,
the party is trained with the comparisons that are complete; an experience without any complete one is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from headrace_runtime.clock import from_epoch_ms
from headrace_schemas import Experience
from headrace_schemas.values.base import Model
from headrace_schemas.values.ids import tenant_name
from headrace_trainer.experiences.examples import Example


class WaitingExperience(Model):
    """An admitted experience and the time of its arrival."""

    experience: Experience
    since_ms: int

    @property
    def tokens(self) -> int:
        return len(self.experience.branch.token_ids) if self.experience.branch else 0


@dataclass(frozen=True, slots=True)
class BatchRules:
    """Conditions for a batch; see the settings of the same names. With `group_size` 0 no groups are needed."""

    experiences: int
    experiences_min: int
    wait: timedelta
    group_size: int
    group_wait: timedelta
    equal_groups: bool = True
    """Whether groups whose runs all have the same reward are trained, too."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Result of `select`: the next batch in order of arrival, empty if none is complete, and experiences to drop."""

    batch: tuple[WaitingExperience, ...] = ()
    singletons: tuple[WaitingExperience, ...] = ()
    """Runs whose group was not completed in time."""
    equal: tuple[WaitingExperience, ...] = ()
    """Groups whose runs all have the same reward, where they are not trained."""
    unpaired: tuple[WaitingExperience, ...] = ()
    """Answers whose counterpart never came."""


def task_of(experience: Experience) -> str | None:
    """Return the name of the task whose experiences are compared with each other, or None when no task was named."""
    return None if experience.task_id is None else tenant_name(experience.tenant, experience.task_id)


def run_of(experience: Experience) -> str:
    """Return the name of an experience's run, which all branches and sessions of the run share."""
    task = task_of(experience)
    return f"{task}/{experience.run_id}" if task and experience.run_id else experience.trajectory_id


def select(
    waiting: Sequence[WaitingExperience],
    rules: BatchRules,
    now: datetime,
    full: bool,
    is_correction: Callable[[WaitingExperience], bool],
) -> Selection:
    """Select the experiences of the next batch among the waiting ones.

    Args:
        waiting: The experiences in order of arrival.
        rules: The conditions for a batch.
        now: The present time.
        full: Whether the queue is full, so that no further experience can arrive before some are trained.
        is_correction: Whether an experience corrects an earlier training and needs no group.

    Returns:
        The batch, empty if none is complete, with experiences to drop: runs without a group and groups of equal
            rewards.
    """
    if not rules.group_size:
        return Selection(batch=form_batch(waiting, run_of, rules, now, full))
    complete, singletons, equal = _split_groups(waiting, rules, now, is_correction)
    return Selection(form_batch(complete, _group_name, rules, now, full), tuple(singletons), tuple(equal))


def form_batch(
    ready: Sequence[WaitingExperience], unit: Callable[[Experience], str], rules: BatchRules, now: datetime, full: bool
) -> tuple[WaitingExperience, ...]:
    """Return the experiences of the next batch, empty if it is not complete yet.

    A batch has the first `rules.experiences` experiences and the remaining members of the last one's unit. A smaller
    batch is complete once its first experience has waited for `rules.wait`, or at once if the queue is full.

    Args:
        ready: experiences that may be trained, in order.
        unit: returns the unit of an experience (run or group), which is not divided.
        full: whether the queue is full.
    """
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
    """Divide waiting experiences by their groups.

    Returns:
        Corrections, which need no group, followed by the members of complete groups; runs that can never have a group;
            and members of groups with equal rewards, where these are not trained.
    """
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


FindOpenAnswers = Callable[[WaitingExperience], Sequence[Example]]
"""Returns the examples of an experience that must be trained with another answer."""


def match_answers(answers: Sequence[tuple[str, Example]]) -> dict[tuple[str, str], str]:
    """Map each answer whose counterpart has arrived, by experience and part, to the name of its pair.

    If several answers claim the same side of a comparison, the first one is used.
    """
    sides: dict[str, dict[bool, tuple[str, str]]] = {}
    for name, example in answers:
        if example.pair and example.value:
            sides.setdefault(example.pair, {}).setdefault(example.value > 0, (name, example.part))
    return {answer: pair for pair, both in sides.items() if len(both) == 2 for answer in both.values()}


@dataclass(frozen=True, slots=True)
class Parties:
    """Waiting experiences divided into parties: sets that must be trained in one step, e.g. both sides of a preference.

    `ready` has the members of complete parties, corrections first; `party` the name of each experience's party;
    `unpaired` the experiences whose counterpart did not arrive in time.
    """

    ready: tuple[WaitingExperience, ...]
    party: Mapping[str, str]
    unpaired: tuple[WaitingExperience, ...]


def form_parties(
    waiting: Sequence[WaitingExperience],
    wait: timedelta,
    now: datetime,
    find_open_answers: FindOpenAnswers,
    is_correction: Callable[[WaitingExperience], bool],
) -> Parties:
    """Divide the waiting experiences into parties, sets that must be trained in the same step.

    Experiences whose answers are the two sides of a preference share a party; any other experience is one by itself.

    Args:
        waiting: experiences in order of arrival.
        wait: time for which a party waits for missing answers.
        find_open_answers: returns the examples of an experience that must be trained with an answer of another one.
        is_correction: whether an experience has other updates to train, or needs no answer of another one.
    """
    answers = {item.experience.experience_id: tuple(find_open_answers(item)) for item in waiting}
    flat = [(name, example) for name, examples in answers.items() for example in examples]
    pairs = match_answers(flat)
    party_of = _find_party_names(answers, pairs)
    members: dict[str, list[WaitingExperience]] = {}
    for item in waiting:
        members.setdefault(party_of[item.experience.experience_id], []).append(item)
    corrections: list[WaitingExperience] = []
    ready: list[WaitingExperience] = []
    unpaired: list[WaitingExperience] = []
    for items in members.values():
        late = any(now - from_epoch_ms(item.since_ms) >= wait for item in items)
        complete = all(
            (item.experience.experience_id, example.part) in pairs
            for item in items
            for example in answers[item.experience.experience_id]
        )
        if not (complete or late):
            continue
        for item in items:
            name = item.experience.experience_id
            if any((name, example.part) in pairs for example in answers[name]):
                ready.append(item)
            elif is_correction(item):
                corrections.append(item)
            else:
                unpaired.append(item)
    return Parties((*corrections, *ready), party_of, tuple(unpaired))


def _find_party_names(answers: Mapping[str, Sequence[Example]], pairs: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Return the party of each experience, by the experience's id. Experiences whose answers are paired share a party.

    A party's name is the id of its earliest experience. The parties are found by union-find.

    Args:
        answers: examples that must be trained with another answer, by experience id.
        pairs: name of the pair of each paired answer, by experience id and part.
    """
    root = {name: name for name in answers}

    def find_root(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    order = {name: index for index, name in enumerate(answers)}
    seen: dict[str, str] = {}
    for (name, _), pair in pairs.items():
        roots = find_root(name), find_root(seen.setdefault(pair, name))
        first, second = sorted(roots, key=order.__getitem__)
        root[second] = first
    return {name: find_root(name) for name in answers}
