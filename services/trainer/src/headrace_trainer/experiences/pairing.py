"""Answers that were compared meet by the name of their comparison, in one experience or in two. Pure.

An experience waits until both answers of each of its comparisons are there. What has met in one batch stays together: a
*party* is all experiences that are connected by comparisons. When the first of a party has waited for long enough the
party goes as it is, with those of its comparisons that are whole; an experience of which none is goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from headrace_runtime.clock import from_epoch_ms
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.waiting import Waiting

Open = Callable[[Waiting], Sequence[Example]]
"""The examples of an experience that wait for another one."""


def met(answers: Sequence[tuple[str, Example]]) -> dict[tuple[str, str], str]:
    """Experience and part of each answer whose other one is there, to the name of the pair. Of several that claim the
    same side of a comparison the first one is taken."""
    sides: dict[str, dict[bool, tuple[str, str]]] = {}
    for name, one in answers:
        if one.pair and one.value:
            sides.setdefault(one.pair, {}).setdefault(one.value > 0, (name, one.part))
    return {answer: pair for pair, both in sides.items() if len(both) == 2 for answer in both.values()}


@dataclass(frozen=True, slots=True)
class Parties:
    """What can go, party by party, corrections first; to which party each experience belongs; and what waited in
    vain."""

    ready: tuple[Waiting, ...]
    party: Mapping[str, str]
    unpaired: tuple[Waiting, ...]


def parties(
    waiting: Sequence[Waiting],
    wait: timedelta,
    now: datetime,
    open_answers: Open,
    is_correction: Callable[[Waiting], bool],
) -> Parties:
    """`waiting` is in order of arrival. A correction has nothing that is open, or something else to train."""
    answers = {item.experience.experience_id: tuple(open_answers(item)) for item in waiting}
    flat = [(name, one) for name, several in answers.items() for one in several]
    pairs = met(flat)
    party = _connected(answers, pairs)
    members: dict[str, list[Waiting]] = {}
    for item in waiting:
        members.setdefault(party[item.experience.experience_id], []).append(item)
    alone: list[Waiting] = []
    ready: list[Waiting] = []
    unpaired: list[Waiting] = []
    for several in members.values():
        late = any(now - from_epoch_ms(item.since_ms) >= wait for item in several)
        whole = all(
            (item.experience.experience_id, one.part) in pairs
            for item in several
            for one in answers[item.experience.experience_id]
        )
        if not (whole or late):
            continue
        for item in several:
            name = item.experience.experience_id
            if any((name, one.part) in pairs for one in answers[name]):
                ready.append(item)
            elif is_correction(item):
                alone.append(item)
            else:
                unpaired.append(item)
    return Parties((*alone, *ready), party, tuple(unpaired))


def _connected(answers: Mapping[str, Sequence[Example]], pairs: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Each experience to the first one of its party."""
    root = {name: name for name in answers}

    def find(name: str) -> str:
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    order = {name: place for place, name in enumerate(answers)}
    seen: dict[str, str] = {}
    for (name, _), pair in pairs.items():
        one, other = find(name), find(seen.setdefault(pair, name))
        first, second = sorted((one, other), key=order.__getitem__)
        root[second] = first
    return {name: find(name) for name in answers}
