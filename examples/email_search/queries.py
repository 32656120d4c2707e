"""Users' queries: six mails of a mailbox with a common property, in sets without a common question."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from email_agent.mailbox import Mailbox
from email_search.tools import LIMIT, TOOLS

Kind = Literal["sender", "folder", "topic", "day", "file"]
Split = Literal["warm_up", "train", "gate", "audit"]
"""Sets of queries: the base model's warm-up, the agent's own traffic, the gate, which decides about versions, and the
audit, which only measures."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

RELEVANT = 6
"""Number of mails of each query: the newest ones. Properties of fewer mails are not used."""
TOOL_OF: Mapping[Kind, str] = {
    "sender": "search_sender",
    "folder": "search_folder",
    "topic": "search_topic",
    "day": "search_meetings",
    "file": "search_files",
}
OPENINGS = (
    "", "Please help. ", "Quick question. ", "Good morning. ", "One more thing. ", "I am in a hurry. ", "Hello again. ",
    "Before lunch. ", "Thank you. ", "Sorry to ask. ",
)  # fmt: skip
WORDINGS: Mapping[Kind, tuple[str, ...]] = {
    "sender": ("Which mails did {} write?", "Find the mails from {}.", "What did {} send?", "I need the mails by {}."),
    "folder": ("Which mails are in {}?", "Find the mails of folder {}.", "What is new in {}?", "Open folder {}."),
    "topic": (
        "Which mails are about any {}?", "Find the mails on every {}.", "What do they say of the {}?",
        "I need all of {}.",
    ),
    "day": (
        "Which mails call a meeting on {}?", "Find the invitations for {}.", "Who wants to meet on {}?",
        "What calls us in on {}?", "I need the meetings of {}.",
    ),
    "file": ("Which mails came with the {}?", "Find the mails with a file {}.", "Who attached the {}?"),
}  # fmt: skip


@dataclass(frozen=True)
class Query:
    """One question, with the call that answers it and the mails that it must find."""

    id: str
    kind: Kind
    about: str
    question: str
    relevant: frozenset[int]
    """Numbers of the relevant mails."""

    @property
    def tool(self) -> str:
        return TOOL_OF[self.kind]

    @property
    def arguments(self) -> dict[str, Any]:
        return {TOOLS[self.tool].parameter: self.about, LIMIT: RELEVANT}

    @property
    def split(self) -> Split:
        """Split of the query, determined by the question alone, so that splits share no question."""
        return SPLITS[int(self.id, 16) % len(SPLITS)]


def queries(mailbox: Mailbox, split: Split) -> list[Query]:
    """Return every query of a split."""
    return [query for query in _queries(mailbox) if query.split == split]


def stream(mailbox: Mailbox, split: Split, seed: int) -> Iterator[Query]:
    """Yield queries without end: kinds alternate, and each kind's queries come in random order without repetition until
    all were used."""
    rng = random.Random(f"queries {mailbox.seed} {split} {seed}")
    by_kind: dict[Kind, list[Query]] = defaultdict(list)
    for query in queries(mailbox, split):
        by_kind[query.kind].append(query)
    return itertools.chain.from_iterable(zip(*(_shuffled(several, rng) for several in by_kind.values()), strict=True))


def _shuffled(several: list[Query], rng: random.Random) -> Iterator[Query]:
    while True:
        yield from rng.sample(several, len(several))


def _queries(mailbox: Mailbox) -> Iterator[Query]:
    matching: dict[tuple[Kind, str], list[int]] = defaultdict(list)
    for kind, about, number in _properties(mailbox):
        matching[kind, about].append(number)
    for (kind, about), numbers in sorted(matching.items()):
        if len(numbers) < RELEVANT:
            continue
        for opening, wording in itertools.product(OPENINGS, WORDINGS[kind]):
            question = opening + wording.format(about)
            name = hashlib.sha256(question.encode()).hexdigest()[:12]
            yield Query(name, kind, about, question, frozenset(sorted(numbers)[-RELEVANT:]))


def _properties(mailbox: Mailbox) -> Iterator[tuple[Kind, str, int]]:
    """Yield kind, property and number of each mail. Meetings and files belong to the first mail of a thread."""
    for thread in mailbox.threads:
        yield "day", thread.day, thread.mails[0].number
        yield "file", thread.attachment[: -len("1.pdf")], thread.mails[0].number
        for mail in thread.mails:
            yield "sender", mail.sender.name, mail.number
            yield "folder", thread.folder, mail.number
            yield "topic", thread.subject.removeprefix(f"{thread.folder} "), mail.number
