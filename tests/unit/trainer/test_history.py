"""Tests of the distance between two versions, also after refused versions (P5), and of the window (P4).

No entry leaves the window while it could still change the weights.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.experiences.history import History, PublishedVersion
from headrace_trainer.experiences.window import REVISIONS_MAX, Contribution, Entry, Window
from tests.unit.trainer.world import START

REF = BlobRef(uri="file:///x", sha256="0" * 64, size=1)


def name(number: int) -> str:
    return f"m@{number:012x}"


def publish(history: History, number: int, now: int, **bounds: int) -> History:
    published = PublishedVersion(
        version=name(number),
        parent=history.head,
        number=number,
        manifest=REF,
        first_step=history.head_step + 1,
        last_step=now,
    )
    return history.with_version(published, {name(0)}, bounds.get("limit", 100))


def chain(length: int) -> History:
    history = History.begin(PublishedVersion(version=name(0), parent=None, number=0, manifest=REF))
    for number in range(1, length + 1):
        history = publish(history, number, number)
    return history


def test_on_a_chain_staleness_is_the_difference_of_the_numbers() -> None:
    history = chain(5)
    assert [history.staleness([name(number)]) for number in range(6)] == [5, 4, 3, 2, 1, 0]
    assert history.staleness([name(5), name(2)]) == 3, "the oldest of all spans counts"
    assert history.staleness([name(5), name(9)]) is None
    assert history.next_number == 6


def test_refused_versions_do_not_age_the_champion() -> None:
    history = chain(2)
    for number in range(3, 13):  # ten children of version 2, each refused
        history = publish(history, number, number).rewind(name(2), number)
    assert history.staleness([name(2)]) == 0
    assert history.staleness([name(12)]) == 1, "a refused sibling is one edge away"
    assert history.staleness([name(1)]) == 1
    assert history.next_number == 13, "numbers are never used twice"
    assert publish(history, 13, 13).staleness([name(12)]) == 2


def test_a_step_is_held_while_its_version_is_on_the_line() -> None:
    history = chain(2)  # version n holds step n
    assert [history.contains_step(step, 4) for step in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
    back = publish(history, 3, 4).rewind(name(1), 6)  # steps 3..4 made version 3; 5 and 6 followed; all are undone
    assert [back.contains_step(step, 8) for step in range(1, 9)] == [
        True,
        False,
        False,
        False,
        False,
        False,
        True,
        True,
    ]
    forward = back.rewind(name(3), 8)  # the registry makes version 3 champion after all
    assert [forward.contains_step(step, 8) for step in range(1, 9)] == [True] * 4 + [False] * 4


def test_descent_follows_the_line() -> None:
    history = publish(chain(2), 3, 3).rewind(name(1), 3)
    assert history.descends_from(name(1))
    assert history.descends_from(name(0))
    assert not history.descends_from(name(2))
    assert not history.descends_from("m@ffffffffffff")


def test_the_oldest_are_forgotten_except_those_to_keep_and_the_line_stays_usable() -> None:
    history = chain(3)
    for number in range(4, 30):
        history = publish(history, number, number, limit=16)
    assert len(history.versions) == 16
    assert name(0) in history
    assert name(5) not in history
    assert history.staleness([name(5)]) is None
    assert history.staleness([name(29)]) == 0
    assert history.staleness([name(15)]) == 14
    assert history.contains_step(3, 29), "older than everything remembered: never taken back"


VERSION = "m@000000000000"


def seen(window: Window, name: str, revision: int = 0, after_s: float = 0) -> None:
    window.record_arrival(name, revision, [VERSION], (0, 1), START + timedelta(seconds=after_s))


def test_revisions_are_remembered_one_by_one() -> None:
    window = Window()
    for revision in (3, 0, 5):
        seen(window, "a", revision)
    entry = window.get("a")
    assert entry is not None
    assert entry.revisions == (0, 3, 5)
    assert [entry.has_seen(revision) for revision in range(6)] == [True, False, False, True, False, True]


def test_very_many_revisions_are_bounded_and_the_forgotten_ones_count_as_seen() -> None:
    window = Window()
    for revision in range(REVISIONS_MAX + 10):
        seen(window, "a", revision)
    entry = window.get("a")
    assert entry is not None
    assert len(entry.revisions) == REVISIONS_MAX
    assert entry.has_seen(0)
    assert not entry.has_seen(REVISIONS_MAX + 10)


def test_a_revision_without_tokens_does_not_hide_where_the_tokens_are() -> None:
    window = Window()
    seen(window, "a")
    window.record_arrival("a", 1, (), None, START)
    entry = window.get("a")
    assert entry is not None
    assert (entry.partition, entry.offset, entry.versions) == (0, 1, (VERSION,))


@pytest.mark.parametrize(("count", "age_s", "left"), [(3, 1e9, "cde"), (99, 1.5, "de"), (99, 1.4, "de"), (0, 1e9, "")])
def test_the_longest_untouched_leave_by_count_and_by_age(count: int, age_s: float, left: str) -> None:
    window = Window()
    for number, name in enumerate("abcde"):
        seen(window, name, after_s=number)
    evicted = window.evict(START + timedelta(seconds=4.4), count, timedelta(seconds=age_s), lambda *_: False)
    assert "".join(window) == left
    assert evicted == 5 - len(left)


def test_what_is_needed_stays_and_others_go_in_its_place() -> None:
    window = Window()
    for name in "abcde":
        seen(window, name)
    window.evict(START, 2, timedelta(days=9), lambda name, _: name in "ab")
    assert "".join(window) == "ab"


def test_touching_makes_young() -> None:
    window = Window()
    for name in "abc":
        seen(window, name)
    seen(window, "a", 1)
    window.evict(START, 1, timedelta(days=9), lambda *_: False)
    assert list(window) == ["a"]


def test_a_later_reward_is_judged_by_the_terms_of_the_first_training() -> None:
    entry = Entry(revisions=(0,), versions=(), contributions=(Contribution(step=1, advantage=2.0),), baseline=0.5,
                  scale=0.25, touched_ms=0)  # fmt: skip
    assert entry.advantage_of(1.0, 10.0) == 2.0
    assert entry.advantage_of(0.0, 10.0) == -2.0
    assert entry.advantage_of(None, 10.0) == 0.0
    assert entry.advantage_of(1e5, 10.0) == 10.0


def test_a_revision_between_remembered_ones_is_new_and_one_below_them_only_when_the_memory_is_full() -> None:
    window = Window()
    for revision in range(100, 100 + 2 * 63, 2):
        seen(window, "a", revision)
    entry = window.get("a")
    assert entry is not None
    assert not entry.has_seen(99), "63 revisions are fewer than are remembered"
    seen(window, "a", 226)
    entry = window.get("a")
    assert entry is not None
    assert [entry.has_seen(revision) for revision in (98, 99, 100, 101, 225, 226, 227)] == [
        True, True, True, False, False, True, False,
    ]  # fmt: skip


def test_an_experience_without_tokens_has_no_place_and_terms_of_its_own() -> None:
    window = Window()
    window.record_arrival("a", 0, (), None, START)
    entry = window.get("a")
    assert entry is not None
    assert (entry.partition, entry.offset, entry.trained) == (-1, -1, False)
    assert [entry.advantage_of(reward, 3.0) for reward in (2.0, -2.0, -9.0)] == [2.0, -2.0, -3.0]
