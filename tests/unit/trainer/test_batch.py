"""Tests of batches: exact tokens (P2), reproducible bytes (P9), and the time at which a batch is cut.

A batch is cut by the rules, as recorded, or when the queue is full of experiences that wait for others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_runtime.kafka.wire import Record
from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.programs import BATCH_HEADER
from headrace_trainer.algorithms.presets import Signals
from headrace_trainer.batches.batch import Batch, Row, pack
from headrace_trainer.batches.cutting import BEGINNING_OF_TIME, END_OF_TIME, Cutter, recorded_sizes_of
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.settings import MemorySettings
from tests.support.machine import count_operations
from tests.support.presence import draw_seed
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.test_settings import read
from tests.unit.trainer.test_state import LIMITS
from tests.unit.trainer.world import START, World, experience, side, turn, with_signals

V, W = "m@000000000000", "m@111111111111"


def two_spans() -> Row:
    branch = Branch(
        token_ids=(7, 8, 9, 10, 11, 12, 13),
        spans=(
            Span(start=2, logprobs=(-1.0, -2.0), turn_id="a", version=V, temperature=0.5),
            Span(start=6, logprobs=(-3.0,), turn_id="b", version=W, temperature=1.5),
        ),
    )
    return Row.of(experience(1, V).model_copy(update={"branch": branch}), 0.25, W)


def test_p2_ids_and_logprobs_are_the_sampled_ones_bit_for_bit() -> None:
    event = experience(3, V)
    row = Row.of(event, 1.0, V)
    assert event.branch is not None
    assert row.token_ids_T.tolist() == list(event.branch.token_ids)
    span = event.branch.spans[0]
    assert row.behaviour_T[span.start : span.stop].tobytes() == np.array(span.logprobs, np.float32).tobytes()


def test_pitfall_8_only_spans_are_trained() -> None:
    row = two_spans()
    assert row.loss_mask_T.tolist() == [False, False, True, True, False, False, True]
    assert row.temperature_T.tolist() == [1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.5], "each span has its own"
    assert row.behaviour_T.tolist() == [0.0, 0.0, -1.0, -2.0, 0.0, 0.0, -3.0]
    assert row.fresh_T.tolist() == [False] * 6 + [True], "sampled by the version that the weights equal"
    assert Batch((row, row)).loss_tokens == 6


def test_p9_equal_rows_have_equal_digests() -> None:
    rows = [Row.of(experience(n, V), n / 3, V) for n in range(3)]
    again = [Row.of(experience(n, V), n / 3, None) for n in range(3)]
    assert Batch(tuple(rows)).digest() == Batch(tuple(again)).digest()
    pinned = "7100101ad679"
    assert Batch(tuple(rows)).digest().startswith(pinned), "batches of old releases can no longer be compared"


@pytest.mark.parametrize(
    "change",
    [{"token_ids_T": 0}, {"loss_mask_T": 6}, {"behaviour_T": 6}, {"temperature_T": 6}, {"advantage": None}],
    ids=lambda change: next(iter(change)),
)
def test_p9_the_digest_sees_every_field(change: dict[str, Any]) -> None:
    row = Row.of(experience(1, V), 1.0, V)
    ((name, element),) = change.items()
    value = getattr(row, name)
    if element is None:
        other: Any = np.float32(1.0000001)
    else:
        other = value.copy()
        other[element] = not other[element] if other.dtype == np.bool_ else other[element] + 1
    changed = Row(**{**row.__dict__, name: other})
    assert Batch((row,)).digest() != Batch((changed,)).digest()


def test_p9_the_digest_sees_the_order() -> None:
    a, b = (Row.of(experience(n, V), 1.0, V) for n in (1, 2))
    assert Batch((a, b)).digest() != Batch((b, a)).digest()


def test_packs_hold_every_row_once_within_the_budget() -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    lengths = [draw.randint(1, 40) for _ in range(60)]
    packs = pack(lengths, 64)
    assert sorted(index for rows in packs for index in rows) == list(range(60))
    assert all(sum(lengths[index] for index in rows) <= 64 for rows in packs)
    assert len(packs) <= 1.3 * sum(lengths) / 64 + 1
    assert pack(lengths, 64) == packs


def test_a_row_longer_than_the_budget_runs_alone() -> None:
    assert pack([5, 100, 5], 10) == [[1], [0, 2]]


def test_the_older_half_makes_room(make: Make, tmp_path: Path) -> None:
    cutter = Cutter(make(advantage={"kind": "grpo"}, group_size=2, group_wait_s=100.0))
    state = LineageState(chain(0), LIMITS, MemorySettings(queue_experiences=4))
    for number, after_s in enumerate((0, 10, 60, 70)):
        event = experience(number, name(0), task=f"t{number}", run="0", reward=0.0)
        state.admit(event, (0, number), START + timedelta(seconds=after_s))
    now = START + timedelta(seconds=71)
    assert cutter.next_batch(state, now) == ()
    assert [(event.experience_id, event.dropped) for event in state.outcomes] == [
        ("e0", "singleton"),
        ("e1", "singleton"),
    ]

    for number in (12, 13):
        state.admit(experience(number, name(0), task=f"t{number - 10}", run="1", reward=1.0), (0, number), now)
    batch = cutter.next_batch(state, now)
    assert [item.experience.experience_id for item in batch] == ["e2", "e12", "e3", "e13"]


def test_of_three_the_middle_one_is_of_the_older_half(make: Make) -> None:
    cutter = Cutter(make(advantage={"kind": "grpo"}, group_size=2, group_wait_s=100.0))
    state = waiting(1.0, 2.0, 3.0, group=1, queue_experiences=3)
    assert cutter.next_batch(state, START + timedelta(seconds=3)) == ()
    assert [outcome.experience_id for outcome in state.outcomes] == ["e0", "e1"]


def waiting(*rewards: float, group: int = 99, **memory: int) -> LineageState:
    """Return a state in which runs wait, one second apart, with `group` runs for each task."""
    state = LineageState(chain(0), LIMITS, MemorySettings(**memory))
    for number, reward in enumerate(rewards):
        event = experience(number, name(0), task=f"t{number // group}", run=str(number), reward=reward)
        state.admit(event, (0, number), START + timedelta(seconds=number))
    return state


def named(batch: Sequence[WaitingExperience]) -> list[str]:
    return [item.experience.experience_id for item in batch]


def test_where_batches_were_recorded_neither_time_nor_number_makes_one(make: Make) -> None:
    cutter = Cutter(make(cut="recorded", batch_experiences=2))
    state = waiting(1.0, 2.0, 3.0)
    assert cutter.next_batch(state, END_OF_TIME) == ()
    assert named(cutter.next_batch(state, START, 3)) == ["e0", "e1", "e2"]
    assert named(cutter.next_batch(state, START, 1)) == ["e0"]


def test_a_recorded_batch_is_of_whole_groups_else_of_those_that_time_had_cut(make: Make) -> None:
    cutter = Cutter(make(cut="recorded", advantage={"kind": "grpo"}, group_size=3, group_wait_s=10.0))
    state = waiting(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, group=3)
    assert named(cutter.next_batch(state, START, 6)) == ["e0", "e1", "e2", "e3", "e4", "e5"]
    assert named(cutter.next_batch(state, START, 8)) == [f"e{number}" for number in range(8)]
    assert state.outcomes == []


def test_a_recorded_batch_is_of_groups_that_were_whole_before_those_that_time_had_cut(make: Make) -> None:
    cutter = Cutter(make(cut="recorded", advantage={"kind": "grpo"}, group_size=3, group_wait_s=10.0))
    state = waiting(1.0, 2.0, group=3)
    for number in (6, 7, 8):
        event = experience(number, name(0), task="t2", run=str(number), reward=float(number))
        state.admit(event, (0, number), START + timedelta(seconds=number))
    assert named(cutter.next_batch(state, START, 3)) == ["e6", "e7", "e8"]


def test_what_is_left_of_a_recorded_batch_is_trained_however_little_it_is(make: Make) -> None:
    """The remaining experiences of the batch were deleted from the topic before the replay."""
    cutter = Cutter(make(cut="recorded", batch_experiences=8, batch_experiences_min=4))
    assert named(cutter.next_batch(waiting(1.0, 2.0), START, 5)) == ["e0", "e1"]


def test_a_full_queue_is_cut_by_the_rules_although_batches_were_recorded(make: Make) -> None:
    cutter = Cutter(make(cut="recorded", batch_experiences=2))
    assert named(cutter.next_batch(waiting(1.0, 2.0, queue_experiences=2), START)) == ["e0", "e1"]
    assert cutter.next_batch(waiting(1.0, queue_experiences=2), START) == ()


def test_who_waited_in_vain_is_dropped_and_its_group_is_said_to_be_equal_or_alone(make: Make) -> None:
    cutter = Cutter(make(advantage={"kind": "grpo", "equal_groups": "drop"}, group_size=2, group_wait_s=10.0))
    state = waiting(1.0, 1.0, 2.0, group=2)
    assert cutter.next_batch(state, START + timedelta(seconds=5)) == ()
    assert [(outcome.experience_id, outcome.dropped, outcome.detail) for outcome in state.outcomes] == [
        ("e0", "singleton", "equal_rewards"),
        ("e1", "singleton", "equal_rewards"),
    ]
    cutter.next_batch(state, START + timedelta(seconds=30))
    assert [(outcome.experience_id, outcome.detail) for outcome in state.outcomes[2:]] == [("e2", None)]


def test_equal_groups_are_trained_where_that_is_wanted(make: Make) -> None:
    equal = {"kind": "grpo", "equal_groups": "train"}
    cutter = Cutter(make(advantage=equal, group_size=2, group_wait_s=10.0, batch_experiences=2))
    assert named(cutter.next_batch(waiting(1.0, 1.0, group=2), START)) == ["e0", "e1"]


def test_without_groups_runs_do_not_wait_for_others(make: Make) -> None:
    cutter = Cutter(make(batch_experiences=2, batch_experiences_min=1, batch_wait_s=10.0))
    state = waiting(1.0, group=1)
    state.admit(experience(1, name(0), task=None), (0, 1), START)
    assert named(cutter.next_batch(state, BEGINNING_OF_TIME)) == ["e0", "e1"]
    assert state.outcomes == []


def test_a_small_batch_needs_no_second_setting(tmp_path: Path) -> None:
    """A batch smaller than the default minimum must be full, unless the minimum is set."""
    settings = read(tmp_path, "[trainer]\nbase = 'x'\nbatch_experiences = 4")
    ended = START + timedelta(days=1)
    assert named(Cutter(settings).next_batch(waiting(*[1.0] * 4), ended)) == ["e0", "e1", "e2", "e3"]
    assert Cutter(settings).next_batch(waiting(*[1.0] * 3), ended) == ()


def test_an_answer_whose_other_one_never_came_is_dropped(make: Make) -> None:
    cutter = Cutter(make(algorithm="dpo", group_wait_s=10.0))
    state = LineageState(chain(0), replace(LIMITS, signals=Signals(preferences=True, paired=True)), MemorySettings())
    state.admit(with_signals(1, name(0), preferences=(side("p", "chosen", turn(1)),)), (0, 0), START)
    assert cutter.next_batch(state, START + timedelta(seconds=9)) == ()
    assert state.outcomes == []
    assert cutter.next_batch(state, START + timedelta(seconds=10)) == ()
    assert [(outcome.dropped, outcome.detail) for outcome in state.outcomes] == [("singleton", "unpaired")]


def test_what_is_too_old_is_dropped_once_there_is_a_new_version(make: Make) -> None:
    cutter = Cutter(make(batch_experiences=9))
    state = waiting(1.0)
    cutter.next_batch(state, START)
    for number in range(1, 4):
        state.history = publish(state.history, number, number)
    cutter.next_batch(state, START)
    assert [(outcome.experience_id, outcome.dropped) for outcome in state.outcomes] == [("e0", "stale")]


@pytest.mark.parametrize(
    ("values", "recorded_sizes"), [([], ()), ([b"3"], (3,)), ([b"3", b"12"], (3, 12)), ([b"", None, b"x", b"-1"], ())]
)
def test_recorded_sizes_of_returns_the_numbers_in_the_headers(
    values: list[bytes | None], recorded_sizes: tuple[int, ...]
) -> None:
    headers = (("other", b"9"), *((BATCH_HEADER, value) for value in values))
    assert recorded_sizes_of(Record("copy", 0, 0, None, b"", headers=headers)) == recorded_sizes


def test_a_record_does_not_look_at_all_that_wait_before_a_batch_can_be_complete(make: Make) -> None:
    cutter = Cutter(make(batch_experiences=1000, batch_wait_s=5000.0))
    costs = []
    for size in (10, 500):
        state = waiting(*[1.0] * size)
        cutter.next_batch(state, START)
        costs.append(count_operations(lambda state=state: cutter.next_batch(state, START + timedelta(seconds=600))))  # type: ignore[misc]
    assert costs[0] == costs[1]


def test_what_an_experience_lacks_is_computed_once_while_nothing_changes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With edits, each computation tokenizes them: 1,000 waiting ones would be tokenized at each record."""
    limits = replace(LIMITS, signals=Signals(rewards=False, preferences=True, paired=True))
    cutter = Cutter(make(algorithm="dpo", batch_experiences=2, group_wait_s=5000.0))
    state = LineageState(chain(0), limits, MemorySettings())
    computed: list[str] = []
    examples = type(limits).examples

    def counted(limits: Any, event: Any) -> Any:
        computed.append(event.experience_id)
        return examples(limits, event)

    monkeypatch.setattr(type(limits), "examples", counted)
    for number in range(30):
        event = with_signals(number, name(0), preferences=(side(f"p{number}", "chosen", turn(number)),))
        state.admit(event, (0, number), START)
        cutter.next_batch(state, START)
    assert len(state.waiting) == 30
    assert len(computed) <= 30 * 5
    del computed[:]
    state.history = publish(state.history, 1, 1)
    cutter.next_batch(state, START)
    assert set(computed) == {f"e{number}" for number in range(30)}


def test_the_bytes_of_what_waits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are bounded, but an edit has up to a megabyte of text."""
    size_bytes = len(experience(0, name(0)).to_json())
    monkeypatch.setattr("headrace_trainer.experiences.queue.QUEUE_BYTES_MAX", 3 * size_bytes)
    state = waiting(1.0, 2.0)
    assert state.room > 0
    state.admit(experience(2, name(0)), (0, 2), START)
    state.admit(experience(3, name(0)), (0, 3), START)
    assert state.room == 0
    for item in state.waiting[:2]:
        state.drop(item, "stale")
    assert state.room > 0


@pytest.mark.parametrize("as_blob", [False, True], ids=["record", "blob"])
async def test_the_size_of_an_experience_is_that_of_its_record(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, as_blob: bool
) -> None:
    """The event loop does not serialize an experience only to measure it."""
    world = World(tmp_path)
    settings = make(batch_experiences=4)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    for number in range(3):
        event = experience(number, first)
        value, ref = event.to_json(), world.blobs.put(event.to_json())
        envelope = Envelope.of(event, "test", dataref=ref.uri if as_blob else None)
        world.bus.add(event.topic, ref.model_dump_json().encode() if as_blob else value, 0, envelope.headers())
    sizes_bytes = [len(experience(number, first).to_json()) for number in range(3)]

    def serialize(_event: Experience) -> bytes:
        raise AssertionError("an experience was serialized")

    monkeypatch.setattr(Experience, "to_json", serialize)
    trainer = await world.run(settings)
    assert trainer.lineage is not None
    assert list(trainer.lineage.state.queue._sizes.values()) == sizes_bytes
