from __future__ import annotations

import itertools
import random
from collections import Counter

from email_agent import mailbox
from email_agent.demonstrations import ROUTES, demonstrate
from email_agent.mailbox import Mailbox
from email_agent.tasks import HELD_OUT_SHARE, Task, stream, tasks
from email_agent.tools import Mailtools


def topics(found: list[Task]) -> set[str]:
    """Folders and people that are asked about."""
    return {task.about if task.kind == "mail_count" else task.about.split()[0] for task in found}


def test_held_out_tasks_share_nothing_with_the_traffic() -> None:
    for seed in range(5):
        box = mailbox.generate(seed)
        train, held_out = tasks(box, "train"), tasks(box, "held_out")
        assert topics(train).isdisjoint(topics(held_out))
        assert {task.id for task in train}.isdisjoint(task.id for task in held_out)
        assert {task.question for task in train}.isdisjoint(task.question for task in held_out)
        assert len(held_out) / (len(train) + len(held_out)) == HELD_OUT_SHARE


def test_the_stream_of_one_split_never_shows_the_other(box: Mailbox) -> None:
    held_out = {task.id for task in tasks(box, "held_out")}
    asked = {task.id for task in itertools.islice(stream(box, "train", 3), 5000)}
    assert asked == {task.id for task in tasks(box, "train")}
    assert asked.isdisjoint(held_out)


def test_gate_and_audit_are_halves_of_what_is_held_out(box: Mailbox) -> None:
    gate, audit = ({task.id for task in tasks(box, split)} for split in ("gate", "audit"))
    assert gate.isdisjoint(audit)
    assert gate | audit == {task.id for task in tasks(box, "held_out")}
    for kind in ROUTES:
        halves = [sum(task.kind == kind for task in tasks(box, split)) for split in ("gate", "audit")]
        assert halves[0] - halves[1] in (0, 1)
        assert halves[1] >= 8


def test_a_stream_asks_all_kinds_alike_and_nothing_twice_before_all(box: Mailbox) -> None:
    asked = list(itertools.islice(stream(box, "held_out", 0), 96))
    assert set(Counter(task.kind for task in asked).values()) == {16}
    assert len({task.id for task in asked}) == 96


def test_a_stream_is_the_same_for_the_same_seed(box: Mailbox) -> None:
    first, again, other = (list(itertools.islice(stream(box, "train", seed), 60)) for seed in (4, 4, 5))
    assert first == again != other


def test_the_right_way_leads_to_the_expected_answer(box: Mailbox, tools: Mailtools) -> None:
    for task in tasks(box, "train") + tasks(box, "held_out"):
        messages = demonstrate(task, tools, random.Random(0), lapses=0.0)
        called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", [])]
        assert messages[-1]["content"] == task.expected
        assert tuple(called) == ROUTES[task.kind]


def test_bad_habits_rarely_lead_to_it(box: Mailbox, tools: Mailtools) -> None:
    rng = random.Random(0)
    asked = list(itertools.islice(stream(box, "train", 0), 600))
    right = Counter(t.kind for t in asked if demonstrate(t, tools, rng, lapses=1.0)[-1]["content"] == t.expected)
    assert max(right.values()) <= 25, "of 100 for each kind"
    assert right.total() <= 60, "of 600"
