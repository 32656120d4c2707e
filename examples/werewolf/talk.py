"""Messages of the game: the moderator's prompts, and the one-line answers of the players."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from werewolf.rules import NAMES, PLACES, WOODS, Deal, Statement, in_woods, suspected

NOBODY = "nobody"
SPEAK, VOTE = "Speak.", "Vote."


def role_prompt(deal: Deal, name: str) -> str:
    """Return the system prompt of a player."""
    role = f"werewolf with {deal.partner(name)}" if name in deal.wolves else "villager"
    return f"You are {name}, {role}. Say a place and a suspect, then vote."


def speaking_prompt(name: str, talk: Sequence[Statement]) -> str:
    """Return the prompt for a statement. `talk` has the earlier statements."""
    return "\n".join([board(name, talk), SPEAK])


def voting_prompt(
    name: str, talk: Sequence[Statement], partner: str | None = None, partners_vote: str | None = None
) -> str:
    """Return the prompt for a vote. A wolf is informed of the vote of its `partner`, if the partner votes first."""
    partner_line = [] if partner is None else [f"{partner} votes {partners_vote or NOBODY}."]
    return "\n".join([board(name, talk), *partner_line, VOTE])


def board(name: str, talk: Sequence[Statement]) -> str:
    """Return the moderator's summary of a talk for `name`: players in the woods, and suspects, once for each suspicion.

    A small model finds what follows a word, but would not find the speaker of a statement in a whole talk.
    """
    return f"{WOODS}: {_listed(in_woods(name, talk))}\nsuspected: {_listed(suspected(name, talk))}"


def partners_vote(deal: Deal, name: str, votes: Mapping[str, str | None]) -> tuple[str, str | None] | tuple[()]:
    """Return the partner and its vote for the wolf that votes second, and an empty tuple for all others."""
    if name != deal.wolves[-1]:
        return ()
    return deal.partner(name), votes[deal.partner(name)]


def answer(statement: Statement) -> str:
    """Return the text of a statement."""
    return f"{statement.place or 'nowhere'}, {statement.suspect or NOBODY}"


def read_statement(name: str, text: str) -> Statement:
    """Parse a statement. Invalid places and names are ignored."""
    stated_place, _, suspect = text.strip().partition(", ")
    return Statement(name, stated_place if stated_place in (*PLACES, WOODS) else None, read_name(name, suspect))


def read_name(name: str, text: str) -> str | None:
    stated_name = text.strip().removesuffix(".")
    return stated_name if stated_name in NAMES and stated_name != name else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or NOBODY
