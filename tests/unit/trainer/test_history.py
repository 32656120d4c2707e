"""P5: how far two versions are apart, on a chain and after versions were refused."""

from __future__ import annotations

from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.experiences.history import History, PublishedVersion

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
        history = publish(history, number, number).rewound(name(2), number)
    assert history.staleness([name(2)]) == 0
    assert history.staleness([name(12)]) == 1, "a refused sibling is one edge away"
    assert history.staleness([name(1)]) == 1
    assert history.next_number == 13, "numbers are never used twice"
    assert publish(history, 13, 13).staleness([name(12)]) == 2


def test_a_step_is_held_while_its_version_is_on_the_line() -> None:
    history = chain(2)  # version n holds step n
    assert [history.holds_step(step, 4) for step in (1, 2, 3, 4, 5)] == [True, True, True, True, False]
    back = publish(history, 3, 4).rewound(name(1), 6)  # steps 3..4 made version 3; 5 and 6 followed; all are undone
    assert [back.holds_step(step, 8) for step in range(1, 9)] == [True, False, False, False, False, False, True, True]
    forward = back.rewound(name(3), 8)  # the registry makes version 3 champion after all
    assert [forward.holds_step(step, 8) for step in range(1, 9)] == [True] * 4 + [False] * 4


def test_descent_follows_the_line() -> None:
    history = publish(chain(2), 3, 3).rewound(name(1), 3)
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
    assert history.holds_step(3, 29), "older than everything remembered: never taken back"
