"""A mailbox, generated from a seed and a small vocabulary, and stored in SQLite with full-text search."""

from __future__ import annotations

import itertools
import random
import sqlite3
from dataclasses import dataclass

CONTACTS = 100
REPLIES_MAX = 2

_SCHEMA = """
CREATE TABLE contacts (id TEXT PRIMARY KEY, name TEXT UNIQUE NOT NULL, extension TEXT NOT NULL);
CREATE TABLE threads (id TEXT PRIMARY KEY, folder TEXT NOT NULL, attachment TEXT NOT NULL);
CREATE TABLE mails (
    number INTEGER PRIMARY KEY,         -- ascending in time
    thread TEXT NOT NULL REFERENCES threads (id),
    position INTEGER NOT NULL,          -- in the thread, 0 for the announcement
    sender TEXT NOT NULL REFERENCES contacts (name),
    subject TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX mails_by_thread ON mails (thread, position);
CREATE INDEX mails_by_sender ON mails (sender);
CREATE VIRTUAL TABLE mail_words USING fts5 (subject, body, content='mails', content_rowid='number');
"""
PROJECTS = (
    "harbor", "falcon", "maple", "summit", "copper", "meadow", "lantern", "comet", "river", "cedar", "anchor", "prism",
    "garnet", "willow", "canyon", "ember", "glacier", "orchid", "saturn", "tundra", "velvet", "walnut", "zephyr",
    "bison", "cobalt", "delta", "fjord", "heron", "indigo", "jasper", "kestrel", "lotus",
)  # fmt: skip
MATTERS = ("budget", "contract", "launch", "audit", "hiring", "training", "travel", "design")
FIRST_NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin", "Leon", "Mia", "Nora",
    "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tara",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Berg", "Costa", "Dunn", "Engel", "Frank", "Grant", "Holm", "Ivers", "Jung", "Klein", "Lund", "Marsh",
    "Nolan", "Olsen", "Price", "Reed", "Stone", "Turner", "Weiss",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
FILES = (
    "agenda", "brief", "chart", "draft", "figures", "guide", "letter", "minutes", "notes", "offer", "plan", "poster",
    "report", "sketch", "slides", "summary", "table", "timeline",
)  # fmt: skip
REPLIES = ("Thank you, I will be there.", "Fine with me.", "I cannot come, sorry.", "Please send me the notes.")
ALL = (*PROJECTS, *MATTERS, *FIRST_NAMES, *LAST_NAMES, *DAYS, *FILES)


@dataclass(frozen=True)
class Contact:
    """A person who writes mails. The short `id` is meaningless, so that agents must find it with tools."""

    id: str
    name: str
    extension: str


@dataclass(frozen=True)
class Mail:
    """A mail. Numbers ascend in time over the whole mailbox."""

    number: int
    sender: Contact
    subject: str
    body: str


@dataclass(frozen=True)
class Thread:
    """A meeting that one person announces and others reply to. `subject` is unique in a mailbox."""

    id: str
    folder: str
    subject: str
    day: str
    room_number: str
    attachment: str
    mails: tuple[Mail, ...]
    """Mails in chronological order, with the announcement first."""


@dataclass(frozen=True)
class Mailbox:
    """Ground truth of one mailbox. Expected answers come from here; tools use only the database."""

    seed: int
    contacts: tuple[Contact, ...]
    threads: tuple[Thread, ...]

    def open(self, path: str = ":memory:") -> sqlite3.Connection:
        """Write the mailbox to a new database at `path` and return its connection."""
        database = sqlite3.connect(path)
        database.executescript(_SCHEMA)
        contacts = [(contact.id, contact.name, contact.extension) for contact in self.contacts]
        threads = [(thread.id, thread.folder, thread.attachment) for thread in self.threads]
        mails = [
            (mail.number, thread.id, position, mail.sender.name, mail.subject, mail.body)
            for thread in self.threads
            for position, mail in enumerate(thread.mails)
        ]
        database.executemany("INSERT INTO contacts VALUES (?, ?, ?)", contacts)
        database.executemany("INSERT INTO threads VALUES (?, ?, ?)", threads)
        database.executemany("INSERT INTO mails VALUES (?, ?, ?, ?, ?, ?)", mails)
        database.execute("INSERT INTO mail_words (mail_words) VALUES ('rebuild')")
        database.commit()
        return database


def generate(seed: int) -> Mailbox:
    """Return the mailbox of a seed, with one thread per project and matter. The mailbox is equal on every machine."""
    rng = random.Random(f"mailbox {seed}")
    contacts = _contacts(rng)
    topics = list(itertools.product(PROJECTS, MATTERS))
    people = [rng.sample(contacts, 1 + rng.randint(1, REPLIES_MAX)) for _ in topics]

    # Threads overlap in time: a mail's number is its rank among all mails, and a reply follows its announcement.
    sent = sorted(
        (time_sent, index) for index, writers in enumerate(people) for time_sent in _times_sent(rng, len(writers))
    )
    numbers: list[list[int]] = [[] for _ in topics]
    for number, (_, index) in enumerate(sent, start=1):
        numbers[index].append(number)

    ids = rng.sample(_SHORT_IDS, len(topics))
    threads = [
        _thread(rng, thread_id, folder, f"{folder} {matter}", list(zip(times, writers, strict=True)))
        for thread_id, (folder, matter), times, writers in zip(ids, topics, numbers, people, strict=True)
    ]
    return Mailbox(seed, tuple(contacts), tuple(threads))


_SHORT_IDS = [f"{letter}{digit}" for letter in "abcdefghijklmnopqrstuvwxyz" for digit in range(10)]


def _contacts(rng: random.Random) -> list[Contact]:
    names = [f"{first} {last}" for first, last in itertools.product(FIRST_NAMES, LAST_NAMES)]
    pairs = zip(rng.sample(_SHORT_IDS, CONTACTS), rng.sample(names, CONTACTS), strict=True)
    return [Contact(short, name, str(rng.randint(10, 99))) for short, name in pairs]


def _times_sent(rng: random.Random, mails: int) -> list[float]:
    gaps = [rng.random() / 10 for _ in range(mails - 1)]
    return list(itertools.accumulate(gaps, initial=rng.random()))


def _thread(
    rng: random.Random, thread_id: str, folder: str, subject: str, writers: list[tuple[int, Contact]]
) -> Thread:
    day, room_number = rng.choice(DAYS), str(rng.randint(10, 99))
    attachment = f"{rng.choice(FILES)}{rng.randint(1, 9)}.pdf"
    (number, starter), *replies = writers
    mails = [Mail(number, starter, subject, f"We meet on {day} in room {room_number}. The file is attached.")]
    mails += [Mail(number, writer, f"Re: {subject}", rng.choice(REPLIES)) for number, writer in replies]
    return Thread(thread_id, folder, subject, day, room_number, attachment, tuple(mails))
