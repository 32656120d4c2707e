"""Pairs the answers of a comparison, which come in one experience or in two. Pure.

An experience waits until both answers of each of its comparisons have arrived. Experiences that are connected by
comparisons form a *party* and are trained in one batch. When the first experience of a party has waited long enough,
the party is trained with the comparisons that are complete; an experience without any complete one is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from headrace_runtime.clock import from_epoch_ms
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.waiting import WaitingExperience

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
    """Experiences in parties: sets that must be trained in the same step, e.g. both sides of a preference.

    `ready` has the complete parties, corrections first; `party` the party of each experience; `unpaired` the
    experiences whose partner did not come in time.
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
    """Divide the waiting experiences into parties.

    Args:
        waiting: The experiences in order of arrival.
        wait: How long a party waits for missing answers.
        now: The present time.
        open_answers: Returns the examples of an experience that must be trained with another answer.
        is_correction: Whether an experience has other updates to train, or no open answer.
    """
    answers = {item.experience.experience_id: tuple(find_open_answers(item)) for item in waiting}
    flat = [(name, example) for name, examples in answers.items() for example in examples]
    pairs = match_answers(flat)
    party_of = _connect(answers, pairs)
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


def _connect(answers: Mapping[str, Sequence[Example]], pairs: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Map each experience to the first one of its party (union-find)."""
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
