"""Questions about a mailbox with checkable answers, in sets without a common question."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from email_agent.mailbox import Mailbox

Kind = Literal["meeting_day", "attachment", "extension", "last_writer", "newest_meeting", "mail_count"]
Split = Literal["train", "held_out", "gate", "audit"]
"""Sets of questions: the agent's own traffic, and held-out questions, half of which decide about versions (gate) while
the other half only measures (audit)."""

HELD_OUT_SHARE = 0.25


@dataclass(frozen=True)
class Task:
    """One question. `about` is the subject, folder or person in it."""

    id: str
    kind: Kind
    about: str
    question: str
    expected: str


def tasks(mailbox: Mailbox, split: Split) -> list[Task]:
    """Return every question of a split. A quarter of the projects and people occurs only in held-out tasks.

    A random half of each kind of held-out question belongs to the audit.
    """
    if split in ("gate", "audit"):
        audit = _audited(tasks(mailbox, "held_out"), random.Random(f"audit {mailbox.seed}"))
        return [task for task in tasks(mailbox, "held_out") if (task.id in audit) == (split == "audit")]
    rng = random.Random(f"split {mailbox.seed}")
    folders = sorted({thread.folder for thread in mailbox.threads})
    people = sorted(contact.name for contact in mailbox.contacts)
    held_out = {
        *rng.sample(folders, round(len(folders) * HELD_OUT_SHARE)),
        *rng.sample(people, round(len(people) * HELD_OUT_SHARE)),
    }
    is_held_out = split == "held_out"
    return [task for topic, task in _questions(mailbox) if (topic in held_out) == is_held_out]


def _audited(held_out: list[Task], rng: random.Random) -> set[str]:
    by_kind: dict[Kind, list[str]] = defaultdict(list)
    for task in held_out:
        by_kind[task.kind].append(task.id)
    return {name for names in by_kind.values() for name in rng.sample(names, len(names) // 2)}


def stream(mailbox: Mailbox, split: Split, seed: int) -> Iterator[Task]:
    """Yield tasks without end: kinds alternate, and each kind's questions come in random order without repetition until
    all were used."""
    rng = random.Random(f"stream {mailbox.seed} {split} {seed}")
    by_kind: dict[Kind, list[Task]] = defaultdict(list)
    for task in tasks(mailbox, split):
        by_kind[task.kind].append(task)
    waiting: dict[Kind, list[Task]] = {kind: [] for kind in by_kind}
    while True:
        for kind in rng.sample(sorted(by_kind), len(by_kind)):
            if not waiting[kind]:
                waiting[kind] = rng.sample(by_kind[kind], len(by_kind[kind]))
            yield waiting[kind].pop()


def _questions(mailbox: Mailbox) -> Iterator[tuple[str, Task]]:
    """Yield each question with the project or person that determines its split."""
    newest = {thread.folder: thread for thread in sorted(mailbox.threads, key=lambda thread: thread.mails[0].number)}
    for thread in mailbox.threads:
        subject = thread.subject
        yield thread.folder, _task("meeting_day", subject, f"On which day is the {subject} meeting?", thread.day)
        yield (
            thread.folder,
            _task("attachment", subject, f"Which file came with the {subject} mail?", thread.attachment),
        )
        yield (
            thread.folder,
            _task(
                "extension",
                subject,
                f"Which extension has the person who started {subject}?",
                thread.mails[0].sender.extension,
            ),
        )
        yield (
            thread.folder,
            _task("last_writer", subject, f"Who wrote last about {subject}?", thread.mails[-1].sender.name),
        )
    for folder, thread in newest.items():
        yield (
            folder,
            _task("newest_meeting", folder, f"In which room is the newest {folder} meeting?", thread.room_number),
        )
        yield folder, _task("newest_meeting", folder, f"On which day is the newest {folder} meeting?", thread.day)
    sent = Counter(mail.sender for thread in mailbox.threads for mail in thread.mails)
    for contact in mailbox.contacts:
        count = str(sent[contact])
        yield contact.name, _task("mail_count", contact.name, f"How many mails did {contact.name} send?", count)


def _task(kind: Kind, about: str, question: str, expected: str) -> Task:
    return Task("-".join([kind, *question.rstrip("?").lower().split()]), kind, about, question, expected)
