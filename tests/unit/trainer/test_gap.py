"""Tests of training by users' replies: the hindsight gap, the default learning rate, and grades of a package."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import SettingError
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, TrainingOutcome
from headrace_statistics import intervals
from headrace_trainer.algorithms.catalog.hindsight import (
    BLOCK,
    ERROR,
    PERMUTATIONS,
    GapEstimate,
    HindsightSettings,
    ReplyBlock,
    refusal,
)
from headrace_trainer.algorithms.estimators import AdvantageInputs, Reply
from headrace_trainer.check import check
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import OptimizerSettings
from tests.support import packages
from tests.support.tiny_model import OPENING, conversation, encoder, user_message
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, optimizer_of, policy_of

SETTINGS = HindsightSettings()
STREAMS = 400
Simulated = Callable[[np.random.Generator, int], ReplyBlock]
LISTENER = """
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.presets import REPLIES, Algorithm, Needs, Signals

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


def chance_of(block: ReplyBlock) -> float:
    """Return the p-value of the block, independently computed from every permutation of the replies."""
    runs = range(len(block.without_reply_B))
    worth = [sum(float(block.with_reply_BB[pair]) for pair in enumerate(deal)) for deal in itertools.permutations(runs)]
    identity = float(block.with_reply_BB.trace())
    return sum(pair >= identity - 1e-9 for pair in worth) / math.factorial(len(runs))


@pytest.mark.parametrize("count", range(2, 8))
def test_chance_is_the_share_of_all_deals(count: int) -> None:
    for seed in range(6):
        block = read_a_little(np.random.default_rng([count, seed]), count)
        error = 4 * math.sqrt(0.25 / PERMUTATIONS)
        assert GapEstimate().plus([block]).p_value == pytest.approx(chance_of(block), abs=error)


def test_gaps_by_hand() -> None:
    told_BB = np.array([[-1.0, -2.0, -3.0], [-2.0, -1.5, -4.0], [-1.0, -1.0, -3.0]])
    block = ReplyBlock(told_BB, np.array([-4.0, -2.0, -5.0]))
    assert block.gaps.tolist() == [1.5, 0.5, -2.0], "others' mean, no reply, and a reply that is worse than others'"
    estimate = GapEstimate().plus([block, block])
    assert (estimate.count, estimate.mean) == (6, 0.0)
    assert (GapEstimate().mean, GapEstimate().p_value) == (0.0, 1.0)


def test_blocks_add_up_and_are_dealt_alike_again() -> None:
    blocks = [read_a_little(np.random.default_rng(n), 6) for n in range(3)]
    at_once, one_by_one = GapEstimate().plus(blocks), GapEstimate().plus(blocks[:1]).plus(blocks[1:])
    assert at_once == one_by_one
    assert at_once.p_value < min(GapEstimate().plus([block]).p_value for block in blocks)


def test_what_two_passes_round_differently_is_no_gap() -> None:
    """If all replies are equal, a permutation changes only rounding errors."""
    noise_BB = np.random.default_rng(3).normal(-1.0, 1e-8, (6, 6))
    np.fill_diagonal(noise_BB, -1.0 + 1e-7)
    estimate = GapEstimate().plus([ReplyBlock(noise_BB, np.full(6, -1.0))])
    assert estimate.p_value == 1.0
    assert not estimate.is_positive


def test_few_runs_are_enough_where_each_reply_suits_its_own_answer() -> None:
    """With four runs, one permutation in 24 is the identity, and the significance level is 1/20."""
    for count, waits in ((2, True), (3, True), (4, False), (5, False)):
        told_BB = np.full((count, count), -1.2)
        np.fill_diagonal(told_BB, -0.6)
        decision = refusal(GapEstimate().plus([ReplyBlock(told_BB, np.full(count, -1.1))]), SETTINGS)
        assert (decision is not None) == waits
        assert decision is None or decision.undecided


def test_replies_that_are_worse_than_none_are_no_teacher_however_well_they_match() -> None:
    told_BB = np.full((6, 6), -3.0)
    np.fill_diagonal(told_BB, -1.5)
    estimate = GapEstimate().plus([ReplyBlock(told_BB, np.full(6, -1.0))])
    assert estimate.p_value < 0.01
    decision = refusal(estimate, SETTINGS)
    assert decision is not None
    assert "is -0.5 nats a token over 6 runs" in decision.why


def test_what_is_not_a_number_is_not_believed() -> None:
    told_BB = np.full((6, 6), np.nan)
    assert refusal(GapEstimate().plus([ReplyBlock(told_BB, np.zeros(6))]), SETTINGS) is not None


@pytest.mark.parametrize(("count", "quantile"), [(8, 2.364624), (16, 2.131450), (64, 1.998341)])
def test_the_guard_s_interval_is_student_s(count: int, quantile: float) -> None:
    values = np.random.default_rng(count).normal(0.3, 2.0, count)
    bound = intervals.lower_bound(list(values), 0.025)
    assert bound == pytest.approx(values.mean() - quantile * values.std(ddof=1) / math.sqrt(count), abs=2e-3)
    assert intervals.lower_bound([1.0], 0.025) == -math.inf


def read_nothing(draw: np.random.Generator, count: int) -> ReplyBlock:
    """Simulate a base that ignores replies.

    The logprob of an answer does not depend on which reply precedes it, or whether any does. Answers and replies have
    heavy-tailed effects of their own.
    """
    answers, replies = draw.standard_t(2, (count, 1)), draw.standard_t(2, (1, count))
    told_BB = draw.standard_t(2, (count, count)) + answers + replies
    return ReplyBlock(told_BB, draw.standard_t(2, count) + answers[:, 0])


def read_nothing_and_hate_silence(draw: np.random.Generator, count: int) -> ReplyBlock:
    """Simulate the hardest case: any reply raises the logprob of any answer, and the own reply has no further
    effect."""
    block = read_nothing(draw, count)
    return ReplyBlock(block.with_reply_BB, block.without_reply_B - 50.0)


def read_a_little(draw: np.random.Generator, count: int) -> ReplyBlock:
    """Simulate the gains measured on the e-mail agent: a few replies have a large gain, most have a small one."""
    told_BB = draw.normal(-1.5, 0.3, (count, count))
    own_B = draw.lognormal(-0.6, 0.8, count)
    return ReplyBlock(told_BB + np.diag(own_B), draw.normal(-1.7, 0.3, count))


def blocks_of(draw: np.random.Generator, world: Simulated, count: int) -> Iterator[ReplyBlock]:
    for part in np.array_split(np.arange(count), -(-count // BLOCK)):
        yield world(draw, len(part))


def believed(seed: int, world: Simulated, first: int) -> bool:
    """Return whether training begins if the number of runs is doubled until there is a decision."""
    draw = np.random.default_rng([first, seed])
    estimate, count = GapEstimate().plus(blocks_of(draw, world, first)), first
    while (decision := refusal(estimate, SETTINGS)) is not None and decision.undecided:
        estimate, count = estimate.plus(blocks_of(draw, world, count)), 2 * count
    return decision is None


@pytest.mark.parametrize("first", [4, 7])
def test_error_rates(first: int) -> None:
    share = {
        world.__name__: np.mean([believed(seed, world, first) for seed in range(STREAMS)])
        for world in (read_nothing, read_nothing_and_hate_silence, read_a_little)
    }
    print(f"first look at {first} runs: {share}")
    noise = 3 * math.sqrt(ERROR * (1 - ERROR) / STREAMS)
    assert share["read_nothing"] <= ERROR
    assert share["read_nothing_and_hate_silence"] <= ERROR + noise
    assert share["read_a_little"] >= 0.99


def test_it_decides_earlier_than_student_s_interval() -> None:
    """The batches have five runs."""
    blocks = [read_a_little(np.random.default_rng(seed), 5) for seed in range(STREAMS)]
    dealt = np.mean([refusal(GapEstimate().plus([block]), SETTINGS) is None for block in blocks])
    mean = np.mean([intervals.lower_bound(block.gaps.tolist(), 0.025) > 0 for block in blocks])
    print(f"deals {dealt:.2f}, Student {mean:.2f}")
    assert dealt > 0.8 > mean


def test_planted_an_error_that_is_not_spent_is_seen() -> None:
    """Injected fault: each look after a block uses the whole error probability."""
    hits = 0
    for seed in range(STREAMS // 4):
        draw, estimate = np.random.default_rng(seed), GapEstimate()
        for _ in range(24):
            estimate = estimate.plus([read_nothing_and_hate_silence(draw, 4)])
            if estimate.is_positive and estimate.p_value <= ERROR:
                hits += 1
                break
    assert hits / (STREAMS // 4) > ERROR + 0.1


@pytest.mark.parametrize(
    ("parameters", "adapters", "rate"),
    [
        (5_000, False, 1e-4),
        (400_000, False, 1e-4),
        (400_000, True, 1e-3),
        (1_700_000_000, False, 3.2e-6),
        (7_000_000_000, False, 1.6e-6),
    ],
)
def test_it_falls_with_the_root_of_the_parameters(parameters: int, *, adapters: bool, rate: float) -> None:
    assert OptimizerSettings().with_rate_for_size(parameters, adapters=adapters).rate == pytest.approx(rate)


def test_what_is_set_stays() -> None:
    assert OptimizerSettings(learning_rate=0.5).with_rate_for_size(7, adapters=True).rate == 0.5


def test_a_lineage_trains_with_that_of_its_model(tmp_path: Path, make: Make) -> None:
    settings = make(optimizer={})
    lineage = open_lineage(settings, BlobStore((tmp_path / "blobs").as_uri()), SystemClock())
    expected = settings.optimizer.with_rate_for_size(policy_of(lineage).size, adapters=False).rate
    assert optimizer_of(lineage).learning_rate == expected
    assert expected == 1e-4


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
