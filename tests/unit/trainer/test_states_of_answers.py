"""Tests of the state of experiences with single trained answers, and of states that earlier releases saved.

Such states may have values that no event may hold today, and can be continued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from headrace_runtime.errors import CorruptBlob
from headrace_schemas import Experience
from headrace_schemas.values.base import pack_float32
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.algorithms.presets import Signals
from headrace_trainer.experiences.examples import BRANCH, Example
from headrace_trainer.experiences.reports import TrainedExperience
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.experiences.window import Contribution, ContributionDetail, Entry
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import MemorySettings
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_history import chain, name
from tests.unit.trainer.test_state import LIMITS
from tests.unit.trainer.test_store import replace_state
from tests.unit.trainer.world import START, World, experience, side, turn, with_signals

PART = f"preference/{turn(1)}/0/p"
PAIR = Signals(preferences=True, paired=True)


def word(revision: int, reward: float | None, which: Literal["chosen", "rejected"] = "chosen") -> Experience:
    """Return a run with the reward `reward` (None: without reward) and one compared answer."""
    return with_signals(1, name(0), preferences=(side("p", which, turn(1)),), reward=reward, revision=revision)


def waits(state: LineageState, event: Experience) -> WaitingExperience:
    state.admit(event, (0, event.revision), START)
    return state.waiting[-1]


def train(
    state: LineageState, item: WaitingExperience, values: Sequence[tuple[Example, float]], *, reestimated: bool = False
) -> None:
    """Record a step that trained each example with its value, which is the baseline, too."""
    trained = [
        TrainedExperience(item, value, value, 2.0, example=example, reestimated=reestimated)
        for example, value in values
    ]
    state.record_step(trained, Baselines(), 0.5)


@pytest.fixture
def state() -> LineageState:
    return LineageState(chain(0), replace(LIMITS, signals=PAIR), MemorySettings())


def parts(examples: Sequence[Example]) -> list[str]:
    return [item.part for item in examples]


def test_where_rewards_alone_are_trained_a_later_word_is_a_correction() -> None:
    state = LineageState(chain(0), LIMITS, MemorySettings())
    first = waits(state, experience(1, name(0)))
    assert not state.is_correction(first)
    assert not state.is_correction(WaitingExperience(experience=experience(2, name(0)), since_ms=0)), (
        "nothing is known of it"
    )
    train(state, first, [(BRANCH, 1.0)])
    assert state.is_correction(waits(state, experience(1, name(0), 5.0, revision=1)))


def test_what_was_never_trained_corrects_nothing(state: LineageState) -> None:
    assert not state.is_correction(waits(state, word(0, None)))
    assert not state.is_correction(WaitingExperience(experience=word(0, None), since_ms=0))


def test_a_reward_that_comes_after_its_answer_was_trained_is_compared_for_the_first_time(state: LineageState) -> None:
    train(state, waits(state, word(0, None)), [(Example(PART, 1.0), 1.0)])
    late = waits(state, word(1, 1.0))
    assert parts([update.example for update in state.pending_updates(late)]) == [""]
    assert not state.is_correction(late)


def test_another_reward_is_a_correction_and_what_the_weights_hold_is_none(state: LineageState) -> None:
    """With baseline 1 and scale 2, the trained advantage of 1 corresponds to a reward of 3."""
    train(state, waits(state, word(0, 1.0)), [(BRANCH, 1.0), (Example(PART, 1.0), 1.0)])
    assert state.is_correction(WaitingExperience(experience=word(1, 5.0), since_ms=0))
    assert not state.is_correction(WaitingExperience(experience=word(1, 3.0), since_ms=0))


def test_an_answer_waits_for_the_other_one_and_the_branch_for_none(state: LineageState) -> None:
    both, answer = waits(state, word(0, 1.0)), WaitingExperience(experience=word(0, None), since_ms=0)
    assert parts(state.open_answers(both)) == [PART]
    assert parts(state.open_answers(answer)) == [PART]
    assert state.has_corrections(both)
    assert not state.has_corrections(answer)


def test_an_answer_that_was_trained_is_corrected_and_waits_for_none(state: LineageState) -> None:
    train(state, waits(state, word(0, None)), [(Example(PART, 1.0), 1.0)])
    turned = waits(state, word(1, None, "rejected"))
    assert [(update.example.part, update.advantage) for update in state.pending_updates(turned)] == [(PART, -2.0)]
    assert state.open_answers(turned) == ()
    assert state.has_corrections(turned)


def trained(state: LineageState) -> Entry:
    entry = state.window.get("e1")
    assert entry is not None
    return entry


def test_baselines_are_of_the_first_training_of_the_branch_unless_it_is_trained_anew(state: LineageState) -> None:
    terms = []
    for revision, example, value, reestimated in (
        (0, Example(PART, 1.0), 1.0, False), (1, BRANCH, 5.0, False), (2, BRANCH, 7.0, False),
        (3, Example(PART, 1.0), 8.0, False), (4, BRANCH, 9.0, True),
    ):  # fmt: skip
        train(state, waits(state, word(revision, float(revision))), [(example, value)], reestimated=reestimated)
        terms.append((trained(state).baseline, trained(state).scale))
    assert terms == [(0.0, 1.0), (5.0, 2.0), (5.0, 2.0), (5.0, 2.0), (9.0, 2.0)]


def test_what_a_token_counted_is_remembered_and_a_correction_counts_the_same(state: LineageState) -> None:
    item = waits(state, word(0, 1.0))
    usual = TrainedExperience(item, 1.0, 0.0, 1.0)
    state.record_step(
        [usual, replace(usual, example=Example(PART), factor=4.0), replace(usual, token_weight=3.0)], Baselines(), 0.5
    )
    assert [contribution.token_weight for contribution in trained(state).contributions] == [0.5, 2.0, 3.0]
    assert (usual.correction, usual.reestimated) == (False, False)


def test_a_row_and_a_contribution_name_the_answer() -> None:
    branch = TrainedExperience(WaitingExperience(experience=word(0, 1.0), since_ms=0), 1.0, 0.0, 1.0)
    answer = replace(branch, example=Example(PART, 1.0, "pair", turn(1), 1, (7, 8)))
    spans = replace(branch, turns=(0.5, -0.5))
    assert [record.name for record in (branch, answer, spans)] == ["e1", f"e1#{PART}", "e1"]
    assert [record.contribution_detail for record in (branch, answer, spans)] == [
        None,
        ContributionDetail(part=PART, turn_id=turn(1), choice=1, tokens=(7, 8)),
        ContributionDetail(turns=(0.5, -0.5)),
    ]


def test_what_an_earlier_release_saved_is_of_the_last_word_and_of_the_first_answer() -> None:
    entry = Entry(
        revisions=(0, 4),
        versions=(name(0),),
        contributions=(Contribution.model_validate({"step": 1, "advantage": 1.0, "what": {"part": PART}}),),
        touched_ms=0,
    )
    old = entry.contributions[0]
    assert entry.revisions_in_weights(chain(1), 1) == {4}
    assert old.token_weight == 0.0, "not known"
    assert old.what is not None
    assert old.what.choice == 0


Change = Callable[[dict[str, Any]], None]


def set_span(name: str, value: object) -> Change:
    def change(fields: dict[str, Any]) -> None:
        fields["branch"]["spans"][0][name] = value

    return change


def add(name: str, value: object) -> Change:
    def change(fields: dict[str, Any]) -> None:
        fields[name] = value

    return change


NUMBERS: dict[str, Change] = {
    "reward": add("reward", 1.7e308),
    "parts.0.value": add("parts", [{"source": "feedback", "value": -1e300, "weight": 1.0}]),
    "parts.0.weight": add("parts", [{"source": "feedback", "value": 1.0, "weight": 1e16}]),
    "turn_rewards.0.value": add("turn_rewards", [{"turn_id": "t", "value": 1e200}]),
    "branch.spans.0.temperature": set_span("temperature", 1e-39),
    "branch.spans.0.logprobs": set_span("logprobs", pack_float32((-3e38,) * 9)),
    "branch.spans.0.choice": set_span("choice", 2**31),
}

TEXTS: dict[str, Change] = {
    "session_id": add("session_id", "a\0b"),
    "turn_ids": add("turn_ids", ["a\0b"]),
    "task_id": add("task_id", "\0"),
    "turn_id": set_span("turn_id", "\0"),
    "edits": add("edits", [{"turn_id": "t", "message": {"role": "assistant", "content": "x\0y"}}]),
}


async def stored_state(world: World, make: Make) -> dict[str, Any]:
    """Return the JSON of a state in which three experiences wait."""
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(7)))
    trainer: Any = await world.run(make())
    trainer.lineage.save(publish=False)
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert len(saved.waiting) == 3
    state: dict[str, Any] = json.loads(saved.model_dump_json())
    return state


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("path", NUMBERS)
async def test_a_waiting_experience_beyond_a_bound_is_dropped_by_name_and_the_others_wait(
    world: World, make: Make, path: str
) -> None:
    state = await stored_state(world, make)
    NUMBERS[path](state["waiting"][1]["experience"])
    replace_state(world, json.dumps(state).encode())
    names = [item["experience"]["experience_id"] for item in state["waiting"]]
    await world.run(make())
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert [item.experience.experience_id for item in saved.waiting] == [names[0], names[2]]
    assert [world.bus.fates.get((name, 0)) for name in names] == [None, "invalid", None]
    assert [outcome.detail.startswith(path) for outcome in saved.metrics.verdicts if outcome.detail] == [True]


@pytest.mark.parametrize("where", TEXTS)
async def test_text_that_nothing_can_hold_is_cleaned_and_the_experience_waits(
    world: World, make: Make, where: str
) -> None:
    state = await stored_state(world, make)
    TEXTS[where](state["waiting"][1]["experience"])
    replace_state(world, json.dumps(state).encode())
    await world.run(make())
    saved = LineageStore(world.blobs, "main").read()
    assert saved is not None
    assert len(saved.waiting) == 3
    assert "\ufffd" in saved.waiting[1].model_dump_json()


@pytest.mark.parametrize(
    "damage", [{"reward": 1e300, "unknown": 1}, {"reward": 1e300, "weight": 7.0}, {"revision": 2**31}], ids=str
)
async def test_a_state_with_other_faults_is_refused_as_before(
    world: World, make: Make, damage: dict[str, object]
) -> None:
    state = await stored_state(world, make)
    state["waiting"][1]["experience"] |= damage
    if "revision" in damage:
        state["steps"] = -1
    replace_state(world, json.dumps(state).encode())
    with pytest.raises(CorruptBlob, match="restore the blob store from a backup"):
        await world.run(make())
