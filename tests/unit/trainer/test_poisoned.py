"""Tests of experiences that fail in admission or in the preparation of a batch, and of outlier rewards.

Such an experience is dropped as `invalid`, and the others are trained. The influence of outlier rewards is bounded for
each advantage, with an alarm, checkpoints, corrections and replays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace_schemas.events.trajectory import RewardPart
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.algorithms.reward_ranges import (
    STRAY_AGE_MAX,
    WINDOW,
    RangeLimits,
    RewardRanges,
    SourceRange,
)
from headrace_trainer.batches.prepare import find_failing_items, prepare
from headrace_trainer.experiences import admission
from headrace_trainer.lineage import lineage
from tests.algorithms import strays
from tests.algorithms.strays import Run, binary, event, replaced, speed_lost, train
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import START, World, experience

ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("bad", [{0}, {3}, {0, 3}, {0, 1, 2, 3}], ids=str)
def test_the_items_at_fault_are_named(bad: set[int], kind: str) -> None:
    items: Any = [0, 1, 2, 3]

    def ready(some: Sequence[Any]) -> None:
        if bad.intersection(some):
            raise ERRORS[kind]()

    culprits = find_failing_items(items, ready)
    names: set[Any] = {item for item, _ in culprits}
    assert names == bad
    assert all(kind in reason for _, reason in culprits)


def test_a_batch_that_no_item_is_at_fault_for_blames_nobody() -> None:
    def ready(some: Sequence[Any]) -> None:
        if len(some) > 1:
            raise ValueError("only together, and whoever is left out")

    items: Any = [0, 1, 2, 3]
    assert find_failing_items(items, ready) == []


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", ["admission", "prepare"])
async def test_a_poisoned_experience_is_dropped_by_name_and_the_others_are_trained(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    world = World(tmp_path)
    settings = make(batch_experiences=4)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    experiences = [experience(number, first, reward=number % 3) for number in range(8)]
    victim = experiences[2].experience_id
    if stage == "admission":
        decided = admission._decide

        def decide(event: Any, *rest: Any) -> Any:
            if event.experience_id == victim:
                raise ERRORS[kind]()
            return decided(event, *rest)

        monkeypatch.setattr(admission, "_decide", decide)
    else:

        def planted(items: Any, *rest: Any) -> Any:
            if any(item.experience.experience_id == victim for item in items):
                raise ERRORS[kind]()
            return prepare(items, *rest)

        monkeypatch.setattr(lineage, "prepare", planted)
    world.bus.produce(*experiences)
    await world.run(settings)
    fates = {name: outcome for (name, _), outcome in world.bus.fates.items()}
    assert fates[victim] == "invalid"
    other_fates = [fates.get(sound.experience_id) for sound in experiences if sound.experience_id != victim]
    assert other_fates.count("trained") >= 4
    assert set(other_fates) <= {"trained", None}, "what waits for a batch has no outcome yet"
    await world.run(settings)
    assert {name: outcome for (name, _), outcome in world.bus.fates.items()}[victim] == "invalid", (
        "also after a restart"
    )


LIMITS = RangeLimits(6.0)


def range_of(values: list[float]) -> SourceRange:
    source = SourceRange()
    for number, value in enumerate(values):
        source = source.add(f"run {number}", value)
    return source


@pytest.mark.parametrize("stray", [10.0, 1e6])
@pytest.mark.parametrize("label", strays.ESTIMATORS)
def test_one_stray_reward_costs_at_most_a_tenth_of_the_speed(label: str, stray: float) -> None:
    seed = 1
    print(f"seed {seed}")
    assert abs(speed_lost(label, stray, seed, 0.5)) <= strays.LOSS_MAX
    assert strays.pushed_down(label, stray, seed) == 0


@pytest.mark.parametrize("index", [0, 2, 9, 40])
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_stray_at_the_beginning_is_bounded(index: int, share: float) -> None:
    assert speed_lost("reinforce++", 1e4, 2, share, index) <= strays.LOSS_MAX


def test_a_stray_among_rare_rewards_is_bounded() -> None:
    assert speed_lost("reinforce++", 1e4, 2, 0.02) <= strays.LOSS_MAX


def test_the_plain_deviation_is_caught() -> None:
    """Injected fault for the limits above: the plain standard deviation."""
    assert speed_lost("reinforce++", 100.0, 1, 0.5, **strays.PLAIN) > 0.5
    assert strays.pushed_down("grpo", 100.0, strays.SEED_OF_GROUPS, **strays.PLAIN) > 0


def test_the_trainer_names_the_source_and_the_value() -> None:
    assert strays.unnamed(0) == 0


def test_up_to_four_of_128_strays_have_no_influence_and_a_fifth_changes_the_unit() -> None:
    seed = 5
    print(f"seed {seed}")
    chance = random.Random(seed)
    usual = [float(chance.random() < 0.5) for _ in range(WINDOW)]
    for count in range(1, 9):
        values = usual[:-count] + [10.0 ** chance.uniform(2, 6) for _ in range(count)]
        bounds = range_of(values).bounds(LIMITS)
        assert bounds is not None
        assert (bounds.high == 1.0) == (count <= WINDOW // 32), f"{count} strays: {bounds}"


@pytest.mark.parametrize(("before", "after"), [(10.0, 1.0), (1.0, 100.0), (100.0, 1.0)])
def test_a_change_of_unit_is_adapted_to_within_128_runs(before: float, after: float) -> None:
    assert strays.runs_to_adapt(0, before, after) <= strays.ADAPTED_MAX


@pytest.mark.parametrize("kind", strays.HEAVY)
def test_honest_rewards_are_not_flattened(kind: str) -> None:
    assert strays.flattened(kind, 0, 1500) <= strays.FLATTENED_MAX


def test_a_tenant_has_units_of_its_own() -> None:
    ranges = RewardRanges()
    for number in range(40):
        hundreds = event(2 * number + 1, Run(1, 100.0 * (number % 2))).model_copy(update={"tenant": "acme"})
        tenant_event = event(2 * number, Run(0, float(number % 2)))
        ranges = ranges.add_batch([("a", tenant_event), (f"b{number}", hundreds)], LIMITS)
    assert ranges.strays == ()
    assert ranges.winsorise(event(200, Run(0, 100.0)), LIMITS).reward == 1.0
    of_acme = event(201, Run(0, 100.0)).model_copy(update={"tenant": "acme"})
    assert ranges.winsorise(of_acme, LIMITS) is of_acme


def test_a_source_of_the_default_tenant_that_is_named_like_another_tenants_has_units_of_its_own() -> None:
    ranges = RewardRanges()
    for number in range(40):
        tenant_event = event(2 * number, Run(0, float(number % 2))).model_copy(update={"tenant": "acme"})
        hundreds = event(2 * number + 1, Run(1, 100.0 * (number % 2), "acme/feedback"))
        ranges = ranges.add_batch([(f"a{number}", tenant_event), (f"b{number}", hundreds)], LIMITS)
    stray = event(200, Run(0, 100.0)).model_copy(update={"tenant": "acme"})
    assert ranges.winsorise(stray, LIMITS).reward == 1.0


def test_only_the_stray_part_of_a_reward_is_winsorised() -> None:
    ranges = RewardRanges(sources={"feedback": range_of([0.0, 1.0] * 20), "judge:r": range_of([0.25, 0.75] * 20)})
    parts = (RewardPart(source="feedback", value=1e6, weight=0.5), RewardPart(source="judge:r", value=0.75, weight=0.5))
    experience = ranges.winsorise(
        event(1, Run(0, 1.0)).model_copy(update={"parts": parts, "reward": 500000.375}), LIMITS
    )
    assert [part.value for part in experience.parts] == [1.0, 0.75]
    assert experience.reward == 0.875


def test_a_revision_to_a_stray_value_is_named_and_trains_no_more_than_the_usual_value() -> None:
    trained = train(binary(3, 0.5, 128))
    state = trained.state
    assert state is not None
    right = next(number for number, run in enumerate(binary(3, 0.5, 128)) if run.reward == 1.0)
    revised = event(right, Run(0, 1e5)).model_copy(update={"revision": 1})
    assert state.admit(revised, (0, 999), START).reason == "unchanged"
    assert ("feedback", 1e5) in {(stray.source, stray.value) for stray in state.baselines.ranges.strays}


def test_an_alarm_ends_with_the_age_of_its_stray_or_with_a_change_of_unit() -> None:
    ranges = RewardRanges().add_batch([(f"r{n}", event(n, Run(0, float(n % 2)))) for n in range(64)], LIMITS)
    ranges = ranges.add_batch([("stray", event(64, Run(0, 100.0)))], LIMITS)
    assert [stray.source for stray in ranges.strays] == ["feedback", "turn rewards"], "the run and its only turn"
    hundreds = [(f"h{n}", event(70 + n, Run(0, 100.0))) for n in range(8)]
    assert ranges.add_batch(hundreds, LIMITS).strays == ()
    later = ranges
    for start in range(0, STRAY_AGE_MAX + 64, 64):
        later = later.add_batch([(f"l{start + n}", event(100 + n, Run(0, float(n % 2)))) for n in range(64)], LIMITS)
    assert later.strays == ()


def test_a_checkpoint_of_an_earlier_release_opens_and_a_poisoned_deviation_is_repaired() -> None:
    old = Baselines.model_validate_json(
        '{"tasks": {}, "overall": {"total": 100.0, "weight": 100.0, "age": 500.0},'
        ' "squares": {"total": 1e12, "weight": 100.0, "age": 500.0}, "runs": {}}'
    )
    assert old.ranges == RewardRanges()
    ranges = RewardRanges().add_batch([(f"r{n}", event(n, Run(0, float(n % 2)))) for n in range(64)], LIMITS)
    assert old.repair(ranges, LIMITS, {}).squares.value == pytest.approx(0.25)
    again = Baselines.model_validate_json(old.repair(ranges, LIMITS, {}).model_dump_json())
    assert again.ranges == ranges, "the ranges are part of the checkpoint"


@pytest.mark.parametrize(("spreads", "is_kept"), [(1.0, True), (1.9, True), (2.1, False), (10.0, False)])
def test_a_deviation_of_more_than_two_spreads_is_repaired(spreads: float, is_kept: bool) -> None:
    ranges = RewardRanges().add_batch([(f"r{n}", event(n, Run(0, 10.0 * (n % 2)))) for n in range(64)], LIMITS)
    bounds = ranges.combined_bounds(LIMITS)
    assert bounds is not None
    total = 100 * (spreads * bounds.spread) ** 2
    old = Baselines.model_validate({"squares": {"total": total, "weight": 100.0, "age": 500.0}})
    assert (old.repair(ranges, LIMITS, {}).squares == old.squares) == is_kept


def test_the_same_stream_makes_the_same_batches() -> None:
    runs = replaced(binary(4, 0.5, 256), 100, 1e4)
    assert train(runs).digests == train(runs).digests
    assert train(runs).digests != train(runs, **strays.PLAIN).digests


def test_usual_rewards_make_the_batches_that_they_made_before() -> None:
    runs = binary(6, 0.5, 256)
    assert train(runs).digests == train(runs, **strays.PLAIN).digests
