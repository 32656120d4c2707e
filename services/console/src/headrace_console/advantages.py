"""Sentences about advantages: whether training made an answer more probable, in which step, and whether a later
checkpoint of the trainer reversed this training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_console.read_model.packing import unpack_id, unpack_numbers
from headrace_console.read_model.queries import Row, texts_of
from headrace_console.read_model.status import HistoryEntry, history_of
from headrace_console.read_model.version_queries import experiences_of_turn, steps_of

Steps = Mapping[tuple[int, int], tuple[int, int, int]]
"""Training step, lineage and version (0: none) of a save (checkpoint of the trainer), by the save's lineage and number.

Lineages and versions are ids in the table `names`.
"""


def direction(advantage: float | None) -> str:
    """Return whether an advantage makes an answer more probable (`up`), less (`down`) or neither (`unchanged`).

    For an advantage of None, return `not reported`.
    """
    if advantage is None:
        return "not reported"
    return "up" if advantage > 0 else "down" if advantage < 0 else "unchanged"


def describe_advantage(advantage: float | None) -> str:
    """Return a clause such as "pushed up, advantage +0.3", or an empty text for an advantage of None."""
    if advantage is None:
        return ""
    if advantage == 0:
        return "advantage 0, so not pushed"
    return f"pushed {direction(advantage)}, advantage {advantage:+.3g}"


def is_undone(entry: HistoryEntry, history: Sequence[HistoryEntry]) -> bool:
    """Return whether the trainer reversed the training that `entry` reports and has not restored it since.

    Args:
        entry: an outcome of `history`.
        history: all outcomes of the experience, in the order of the trainer's saves (checkpoints).
    """
    later = [
        other.kind
        for other in history
        if (other.lineage, other.revision) == (entry.lineage, entry.revision)
        and other.save >= entry.save
        and other.kind in ("undone", "queued again", "restored")
    ]
    return bool(later) and later[-1] != "restored"


def trains_answer(entry: HistoryEntry, turns: Sequence[int], turn: int) -> bool:
    """Return whether an outcome reports training of the answer that the model sampled in a turn.

    An outcome may instead train only an edit, the text that a person wrote in place of the answer.

    Args:
        entry: an outcome of an experience.
        turns: numbers of the turns of the experience.
        turn: number of the turn.
    """
    if entry.kind != "trained":
        return False
    edits = [edited for index, _, edited in entry.turns if index < len(turns) and turns[index] == turn]
    return entry.advantage is not None or not entry.turns or False in edits


def training_sentences(
    experiences: Iterable[tuple[Sequence[int], Sequence[HistoryEntry]]],
    numbers: Mapping[str, int],
    steps: Steps,
    texts: Mapping[int, str],
) -> Mapping[int, list[str]]:
    """Return, for each turn, one sentence for each time that its answer was trained, the earliest first.

    Args:
        experiences: turns and outcomes of each experience.
        numbers: number of each turn by its id.
        steps: training step of each save (checkpoint of the trainer) that the outcomes name.
        texts: names of lineages and versions by their ids in the table `names`.
    """
    sentences: dict[int, list[str]] = defaultdict(list)
    for turns, history in experiences:
        for entry in history:
            if entry.kind != "trained":
                continue
            answers = [(turns[index], value, edited) for index, value, edited in entry.turns if index < len(turns)]
            if entry.advantage is not None and all(edited for _, _, edited in answers):
                left_out = {numbers.get(name) for name in entry.left_out}
                answers += [(turn, entry.advantage, False) for turn in turns if turn not in left_out]
            end = f"by {describe_step(entry, steps, texts)}{'; this was undone' if is_undone(entry, history) else ''}."
            for turn, advantage, edited in answers:
                subject = "An edit of this answer was" if edited else "This answer was"
                no_effect = "trained with advantage 0, which changes nothing"
                effect = describe_advantage(advantage) if advantage else no_effect
                sentences[turn].append(f"{subject} {effect}, {end}")
    return sentences


def describe_step(entry: HistoryEntry, steps: Steps, texts: Mapping[int, str]) -> str:
    """Return the training step of an outcome in words, followed by the first version whose weights contain the step."""
    version = first_version(entry, steps, texts)
    name = step_name(entry, steps, texts)
    return f"{name}, first in {version}" if version else f"training {name}, in no saved version yet"


def step_name(entry: HistoryEntry, steps: Steps, texts: Mapping[int, str]) -> str:
    """Return the training step and the lineage of a training outcome in words, for example `step 3 of lineage main`.

    The step is that of the first published version whose weights contain the outcome. Before there is such a version,
    the text names the step of the version before it: `after step 2 of lineage main`.
    """
    step, lineage, version = steps.get((entry.lineage, entry.save), (0, 0, 0))
    return f"{'' if version else 'after '}step {step} of lineage {texts.get(lineage, '')}"


def first_version(entry: HistoryEntry, steps: Steps, texts: Mapping[int, str]) -> str:
    """Return the first version that was saved after an outcome, or an empty text if there is none yet."""
    _, _, version = steps.get((entry.lineage, entry.save), (0, 0, 0))
    return texts[version] if version else ""


@dataclass(frozen=True, slots=True)
class TurnTraining:
    """Experiences that contain a turn, with their training outcomes, and sentences about them."""

    experiences: Sequence[Row]
    histories: Sequence[Sequence[HistoryEntry]]
    """The outcomes of each experience."""
    sentences: Sequence[str]
    """A sentence for each advantage with which the answer was trained."""


async def turn_training(tx: AsyncConnection, turn: Row) -> TurnTraining:
    """Return the outcomes and advantages with which a turn was trained, from at most 64 of its experiences."""
    experiences = await experiences_of_turn(tx, turn)
    histories = [history_of(experience["history"]) for experience in experiences]
    steps = await steps_of(tx, {(entry.lineage, entry.save) for history in histories for entry in history})
    texts = await texts_of(tx, {number for save in steps.values() for number in save})
    turns = [unpack_numbers(experience["turns"]) for experience in experiences]
    numbers = {unpack_id(turn["name"]): turn["id"]}
    sentences = training_sentences(zip(turns, histories, strict=True), numbers, steps, texts)
    return TurnTraining(experiences, histories, sentences.get(turn["id"], []))
