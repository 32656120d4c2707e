"""What users look for: six mails of a mailbox by one thing that is known of them. Sets of queries share no question."""

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
"""What the base model is shown, what the agent's own traffic asks, what decides about versions, and what decides
nothing."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

RELEVANT = 6
"""Mails that each query is about: the newest ones. What fewer mails have in common nobody asks for."""
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
    """One question, the one call that answers it, and the mails that it has to find."""

    id: str
    kind: Kind
    about: str
    question: str
    relevant: frozenset[int]
    """Numbers of mails."""

    @property
    def tool(self) -> str:
        return TOOL_OF[self.kind]

    @property
    def arguments(self) -> dict[str, Any]:
        return {TOOLS[self.tool].parameter: self.about, LIMIT: RELEVANT}

    @property
    def split(self) -> Split:
        """Decided by the question alone, so that no two splits share one."""
        return SPLITS[int(self.id, 16) % len(SPLITS)]


def queries(mailbox: Mailbox, split: Split) -> list[Query]:
    """Every query of `split`."""
    return [query for query in _queries(mailbox) if query.split == split]


def stream(mailbox: Mailbox, split: Split, seed: int) -> Iterator[Query]:
    """Queries without end, the kinds in turn and each kind's in random order; all are asked before one repeats."""
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
    for kind, about, number in _known(mailbox):
        matching[kind, about].append(number)
    for (kind, about), numbers in sorted(matching.items()):
        if len(numbers) < RELEVANT:
            continue
        for opening, wording in itertools.product(OPENINGS, WORDINGS[kind]):
            question = opening + wording.format(about)
            name = hashlib.sha256(question.encode()).hexdigest()[:12]
            yield Query(name, kind, about, question, frozenset(sorted(numbers)[-RELEVANT:]))


def _known(mailbox: Mailbox) -> Iterator[tuple[Kind, str, int]]:
    """By what each mail can be found. A meeting is called, and a file sent, by the first mail of a thread."""
    for thread in mailbox.threads:
        yield "day", thread.day, thread.mails[0].number
        yield "file", thread.attachment[: -len("1.pdf")], thread.mails[0].number
        for mail in thread.mails:
            yield "sender", mail.sender.name, mail.number
            yield "folder", thread.folder, mail.number
            yield "topic", thread.subject.removeprefix(f"{thread.folder} "), mail.number
