"""Deals and games that are written down by hand."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from werewolf.rules import NAMES, Deal, Game, Statement

A, B, C, D, E, F = NAMES
DEAL = Deal("by-hand", seats=NAMES, wolves=(B, E), lots=(F, E, D, C, B, A))
"""Ben and Emma are the wolves; of several with most votes Felix goes first."""
TALK = (
    Statement(A, "mill", None),
    Statement(B, "inn", C),
    Statement(C, "well", B),
    Statement(D, "barn", C),
    Statement(E, "mill", C),
    Statement(F, "inn", None),
)
VOTES: Mapping[str, str | None] = MappingProxyType({A: C, B: C, C: B, D: B, E: C, F: None})


def game(votes: Mapping[str, str | None] = VOTES, **statements: Statement) -> Game:
    """The game by hand, with other votes, or with other statements by name."""
    return Game(DEAL, tuple(statements.get(statement.name, statement) for statement in TALK), {**VOTES, **votes})
