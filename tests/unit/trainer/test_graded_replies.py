"""Tests of a package that trains answers by the user's replies: `grade` scores replies, and `compute` compares them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace_runtime.errors import SettingError
from headrace_schemas import Experience, TrainingOutcome
from headrace_trainer.algorithms.estimators import AdvantageInputs, Reply
from headrace_trainer.check import check
from tests.support import packages
from tests.support.hindsight_world import OPENING, conversation, encoder, user_message
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World

LISTENER = """
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import REPLIES, Needs, Signals
from headrace_trainer.algorithms.presets import Algorithm

SEEN, RESULT = [], []

def grade(replies, settings):
    if RESULT:
        return RESULT[0]
    words = {"No.": 0.0, "Thanks.": 1.0}
    return [reply.turn_reward if reply.text == "Rated." else words.get(reply.text) for reply in replies]

def half(batch, past, decay, settings):
    SEEN.append(batch)
    count = len(batch.rewards_B)
    return Advantages.of(batch.rewards_B, [0.5] * count, [0.5] * count), past

listen = estimator(Needs(logprobs=True), signals=REPLIES, grade=grade)(half)
both = estimator(signals=Signals(replies=True), grade=grade)(half)
ungraded = estimator(signals=REPLIES)(half)
unread = estimator(grade=grade)(half)
taught = estimator(Needs(hindsight=True), signals=REPLIES)(half)
taught_graded = estimator(Needs(hindsight=True), signals=REPLIES, grade=grade)(reward_as_advantage)
taught_rewards = estimator(Needs(hindsight=True), signals=Signals(replies=True))(reward_as_advantage)
edited = estimator(signals=Signals(rewards=False, edits=True))(half)
weighed = estimator(signals=Signals(rewards=False, edits=True), worth=lambda *_: 1.0)(reward_as_advantage)
credited = estimator(signals=REPLIES, grade=grade, credit=lambda *_: ())(half)
branches = estimator(signals=Signals(branches=True))(half)
named = {name: Algorithm(name) for name in list(globals()) if name in __KINDS__}
globals().update({f"algorithm_{name}": algorithm for name, algorithm in named.items()})
"""
REFUSALS = {
    "ungraded": r"no function grades the replies of Signals\(replies=True\); declare `grade` or Needs",
    "unread": r"its `grade` would never be called with these signals and needs; declare Signals\(replies=True\)",
    "taught": r"its `compute` would never be called with these signals and needs; declare Signals\(rewards=True\)",
    "taught_graded": r"its `grade` would never be called .* and not Needs\(hindsight=True\)",
    "taught_rewards": r"Needs\(hindsight=True\) trains replies alone; declare Signals\(rewards=False, replies=True\)",
    "edited": r"its `compute` would never be called",
    "weighed": r"its `worth` would never be called with these signals and needs; declare Signals\(rewards=True\)",
    "credited": r"its `credit` would never be called",
    "branches": r"its `compute` would never be called",
}
KINDS = ("listen", "both", *REFUSALS)


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install the package, and return its module."""
    announced = {
        "headrace.advantages": {name: f"listener:{name}" for name in KINDS},
        "headrace.algorithms": {name: f"listener:algorithm_{name}" for name in KINDS},
    }
    packages.install(tmp_path / "site", "listener", announced, listener=LISTENER.replace("__KINDS__", repr(KINDS)))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "listener", raising=False)
    import listener  # type: ignore[import-not-found]

    return listener


def talk(base: Path, number: int, version: str, reply: str, **fields: Any) -> Experience:
    reward = fields.pop("turn_reward", None)
    return conversation(
        encoder(base), number, version, first="B", second="K", reply=reply, reward=reward, **fields
    )  # fmt: skip


def advantages_of(outcomes: list[TrainingOutcome]) -> dict[tuple[str, str], float]:
    """Return the advantage of each turn by experience."""
    return {
        (outcome.experience_id, turn.turn_id): turn.advantage
        for outcome in outcomes
        for turn in outcome.turn_advantages
    }  # fmt: skip


async def first_version(world: World, settings: Any) -> str:
    await world.run(settings)
    return world.bus.checkpoints[0].version


async def test_compute_is_called_with_the_text_and_the_tokens_of_each_reply(
    tmp_path: Path, base: Path, make: Make, listener: Any
) -> None:
    world, settings = World(tmp_path), make(algorithm="listen", batch_experiences=3, batch_wait_s=5)
    version = await first_version(world, settings)
    world.bus.produce(*(talk(base, index, version, text) for index, text in enumerate(("No.", "Thanks.", "Why?"))))
    await world.run(settings, wait_s=6)
    (batch,) = [batch for batch in listener.SEEN if len(batch.rewards_B) == 2]
    assert isinstance(batch, AdvantageInputs)
    assert list(batch.rewards_B) == [0.0, 1.0]
    reply = batch.replies_B[0]
    tokens = encoder(base)(user_message("No.") + OPENING)
    answer_ids = encoder(base)("B<|im_end|>")
    assert reply == Reply("turn-0-0", 0, "B", answer_ids, "No.", tokens)
    outcomes = {outcome.experience_id: outcome.detail or outcome.dropped for outcome in world.bus.verdicts}
    assert outcomes == {"e0": None, "e1": None, "e2": "no_signal"}, "an answer without a grade is not trained"
    assert advantages_of(world.bus.verdicts) == {("e0", "turn-0-0"): -1.0, ("e1", "turn-1-0"): 1.0}


async def test_a_changed_grade_and_a_withdrawal_are_corrected_by_the_terms_of_the_first_training(
    tmp_path: Path, base: Path, make: Make, listener: Any
) -> None:
    world, settings = World(tmp_path), make(algorithm="listen", batch_experiences=1)
    version = await first_version(world, settings)
    revisions: list[tuple[float | None, float]] = [(1.0, 1.0), (0.0, -1.0), (0.0, -1.0), (None, 0.0), (1.0, 1.0)]
    for revision, (turn_reward, total) in enumerate(revisions):
        world.bus.produce(talk(base, 1, version, "Rated.", revision=revision, turn_reward=turn_reward))
        trainer = await world.run(settings)
        assert trainer.lineage is not None
        entry = trainer.lineage.state.window.get("e1")
        assert entry is not None
        assert sum(contribution.advantage for contribution in entry.contributions) == pytest.approx(total)
    assert world.bus.fates[("e1", 2)] == "unchanged"
    assert len(listener.SEEN) == 1, "corrections use the terms of the first training"


async def test_rewards_and_replies_of_one_run_share_its_weight(
    tmp_path: Path, base: Path, make: Make, listener: Any
) -> None:
    world, settings = World(tmp_path), make(algorithm="both", batch_experiences=1)
    version = await first_version(world, settings)
    world.bus.produce(talk(base, 1, version, "No.").model_copy(update={"reward": 0.75, "no_reward": None}))
    trainer = await world.run(settings)
    (batch,) = listener.SEEN
    assert (list(batch.rewards_B), list(batch.weights_B)) == ([0.75, 0.0], [0.5, 0.5])
    assert [reply and reply.text for reply in batch.replies_B] == [None, "No."]
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e1")
    assert entry is not None
    advantages = [(contribution.part, contribution.advantage) for contribution in entry.contributions]
    assert advantages == [("", 0.5), ("replied/turn-1-0/0", -1.0)]


async def test_p9_a_dry_run_makes_the_same_batches_of_graded_replies(
    tmp_path: Path, base: Path, make: Make, listener: Any
) -> None:
    settings = make(algorithm="listen", batch_experiences=2, until_end=True, steps_per_version=100)

    def events_of(version: str) -> list[Experience]:
        return [talk(base, number, version, ("No.", "Thanks.")[number % 2]) for number in range(4)]

    live, dry = await World(tmp_path).digests_live_and_dry(settings, events_of)
    assert len(live) == 2
    assert dry == live


@pytest.mark.parametrize(
    ("result", "detail"),
    [
        ([1.0, 2.0], "grade returned 2 values for 1 replies; return one value each"),
        ([float("nan")], "grade returned nan; return a number between -1e+06 and 1e+06"),
    ],
    ids=["count", "nan"],
)
async def test_a_grade_that_is_no_value_is_named_in_the_outcome(
    tmp_path: Path, base: Path, make: Make, listener: Any, result: list[float], detail: str
) -> None:
    listener.RESULT.append(result)
    world, settings = World(tmp_path), make(algorithm="listen", batch_experiences=1)
    world.bus.produce(talk(base, 1, await first_version(world, settings), "No."))
    await world.run(settings)
    (outcome,) = world.bus.verdicts
    assert outcome.dropped == "invalid"
    assert detail in (outcome.detail or "")


@pytest.mark.usefixtures("listener")
@pytest.mark.parametrize("kind", REFUSALS)
def test_planted_a_function_that_is_never_called_stops_the_start(make: Make, kind: str) -> None:
    with pytest.raises(SettingError, match=rf"trainer\.advantage\.kind = '{kind}': {REFUSALS[kind]}"):
        make(algorithm=kind, loss={"kind": "likelihood"})


@pytest.mark.usefixtures("listener")
@pytest.mark.parametrize("algorithm", ["listen", "hindsight"])
async def test_the_check_refuses_a_base_whose_template_hides_replies(base: Path, make: Make, algorithm: str) -> None:
    settings = make(algorithm=algorithm)
    hidden = mock.patch(
        "headrace_trainer.experiences.replies.read_template",
        return_value="{{ messages[-1].content }}{% if add_generation_prompt %}>{% endif %}",
    )
    with hidden, pytest.raises(SettingError, match=r"trainer\.base = .* does not show where a user's message begins"):
        await check(mock.Mock(data_dir=base), settings)
