"""What the six read and say: a message of the moderator, and one line of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from werewolf.rules import NAMES, PLACES, WOODS, Deal, Statement, in_woods, suspected

NOBODY = "nobody"
SPEAK, VOTE = "Speak.", "Vote."


def told(deal: Deal, name: str) -> str:
    """What `name` is told at the beginning."""
    role = f"werewolf with {deal.partner(name)}" if name in deal.wolves else "villager"
    return f"You are {name}, {role}. Say a place and a suspect, then vote."


def asked_to_speak(name: str, talk: Sequence[Statement]) -> str:
    """`talk` is what was said before."""
    return "\n".join([board(name, talk), SPEAK])


def asked_to_vote(
    name: str, talk: Sequence[Statement], partner: str | None = None, partners_vote: str | None = None
) -> str:
    """`talk` is all of it; a wolf is told what its `partner` does where that one votes first."""
    known = [] if partner is None else [f"{partner} votes {partners_vote or NOBODY}."]
    return "\n".join([board(name, talk), *known, VOTE])


def board(name: str, talk: Sequence[Statement]) -> str:
    """What the moderator keeps of a talk for `name`: who was in the woods, and who is suspected, once by each who does.
    A small model finds what follows a word; it would not find out who of a whole talk said it."""
    return f"{WOODS}: {_listed(in_woods(name, talk))}\nsuspected: {_listed(suspected(name, talk))}"


def partners_vote(deal: Deal, name: str, votes: Mapping[str, str | None]) -> tuple[str, str | None] | tuple[()]:
    """The partner and its vote, for the wolf that votes second; nothing for anybody else."""
    if name != deal.wolves[-1]:
        return ()
    return deal.partner(name), votes[deal.partner(name)]


def answer(said: Statement) -> str:
    """A statement as somebody makes it."""
    return f"{said.place or 'nowhere'}, {said.suspect or NOBODY}"


def read_statement(name: str, text: str) -> Statement:
    """What an answer says; what is no place or no name of somebody else counts for nothing."""
    place, _, suspect = text.strip().partition(", ")
    return Statement(name, place if place in (*PLACES, WOODS) else None, read_name(name, suspect))


def read_name(name: str, text: str) -> str | None:
    found = text.strip().removesuffix(".")
    return found if found in NAMES and found != name else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or NOBODY
