"""A mailbox in SQLite, generated from a seed, the seven tools that query it, and questions about it with checkable
answers.

The agent: its system prompt and its tools, with the loop that all examples share.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from example_parts.react import ERROR, Agent, WrongCall, definition, only_argument

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
HITS = 2
"""Maximum number of threads in a result."""

_THREADS = "SELECT thread, sender, mails.subject FROM mails JOIN threads ON threads.id = thread "
Kind = Literal["meeting_day", "attachment", "extension", "last_writer", "newest_meeting", "mail_count"]
Split = Literal["train", "held_out", "gate", "audit"]
"""Sets of questions: the agent's own traffic, and held-out questions, half of which decide about versions (gate) while
the other half only measures (audit)."""

HELD_OUT_SHARE = 0.25


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


class Mailtools:
    """Tools of one mailbox. Calls are fast, and must not be made from several threads."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def call(self, name: str, arguments: str) -> str:
        """Execute a model's call. For an invalid call return a text that begins with `ERROR`."""
        try:
            tool, parameter = self._resolve(name)
            return tool(only_argument(arguments, parameter))
        except WrongCall as problem:
            return f"{ERROR}{problem}"

    def _resolve(self, name: str) -> tuple[Callable[[str], str], str]:
        if name not in PARAMETER_OF:
            raise WrongCall(f"no tool {name}")
        tool: Callable[[str], str] = getattr(self, name)
        return tool, PARAMETER_OF[name]

    def search_mail(self, query: str) -> str:
        terms = " OR ".join('"' + word.replace('"', "") + '"' for word in query.split())
        rows = self._rows(
            _THREADS + "JOIN mail_words ON mail_words.rowid = number WHERE mail_words MATCH ? AND position = 0 "
            "ORDER BY bm25(mail_words), number LIMIT ?",
            terms or '""', HITS,
        )  # fmt: skip
        return _listing(rows)

    def list_folder(self, folder: str) -> str:
        rows = self._rows(_THREADS + "WHERE folder = ? AND position = 0 ORDER BY number DESC LIMIT ?", folder, HITS)
        if not rows:
            raise WrongCall("no such folder")
        return _listing(rows)

    def read_mail(self, thread: str) -> str:
        rows = self._in_thread(
            "SELECT sender, mails.subject, body FROM mails WHERE thread = ? AND position = 0", thread
        )
        ((sender, subject, body),) = rows
        return f"From: {sender}\nSubject: {subject}\n{body}"

    def list_thread(self, thread: str) -> str:
        rows = self._in_thread("SELECT sender FROM mails WHERE thread = ? ORDER BY position DESC", thread)
        return "\n".join(sender for (sender,) in rows)

    def list_attachments(self, thread: str) -> str:
        ((attachment,),) = self._in_thread("SELECT attachment FROM threads WHERE id = ?", thread)
        return str(attachment)

    def find_contact(self, name: str) -> str:
        rows = self._rows("SELECT id, name, extension FROM contacts WHERE name = ?", name)
        if not rows:
            raise WrongCall("no such contact")
        ((contact, name, extension),) = rows
        return f"{contact} {name} extension {extension}"

    def count_mail(self, contact: str) -> str:
        if not self._rows("SELECT id FROM contacts WHERE id = ?", contact):
            raise WrongCall("no such contact id")
        ((count,),) = self._rows(
            "SELECT count(*) FROM mails JOIN contacts ON contacts.name = sender WHERE contacts.id = ?", contact
        )
        return f"{count} mails"

    def _in_thread(self, query: str, thread: str) -> list[tuple[Any, ...]]:
        rows = self._rows(query, thread)
        if not rows:
            raise WrongCall("no such thread")
        return rows

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        return self._database.execute(query, values).fetchall()


def _listing(rows: list[tuple[Any, ...]]) -> str:
    return "\n".join(f"{thread} {sender}: {subject}" for thread, sender, subject in rows) or "nothing found"


_THREAD_ID = "Id of the thread, as a search or a folder shows it."
_TOOLS = (
    ("search_mail", "Search mail; shows the best threads.", "query", "Words to look for, e.g. a subject."),
    ("list_folder", "Show the newest threads of a folder, newest first.", "folder", "Name of the folder."),
    ("read_mail", "Read the mail that opened a thread.", "thread", _THREAD_ID),
    ("list_thread", "Show who wrote in a thread, newest mail first.", "thread", _THREAD_ID),
    ("list_attachments", "Name the file attached to a thread.", "thread", _THREAD_ID),
    ("find_contact", "Look up a person: contact id, name and extension.", "name", "First and last name."),
    ("count_mail", "Count the mails that a contact has sent.", "contact", "Id of the contact, from find_contact."),
)
PARAMETER_OF = {name: parameter for name, _, parameter, _ in _TOOLS}
"""Parameter of each tool, which takes exactly one string."""


DEFINITIONS = [definition(*tool) for tool in _TOOLS]
"""Definitions of the tools for the model, in OpenAI's format."""


SYSTEM = "Answer questions about a mailbox. Use the tools, then give the bare answer."
TURNS_MAX = 5
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)

play, go_on = AGENT.play, AGENT.go_on


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
