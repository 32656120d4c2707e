"""Reward functions for one werewolf, computed from the facts in its feedback; the scorer calls them.

Each function returns 1 or 0 for an event (the penalty -1 or 0), and abstains if the context lacks the facts. The
scorer's weights in `headrace.toml` are 10, 5, 2 and 5. The file does not import Headrace.
"""

from __future__ import annotations

from collections.abc import Mapping

WOLVES = "werewolves"
"""Value of `winner` in a context if the wolves win."""
FACTS = ("winner", "player", "out", "suspect")
"""Facts in the context of a wolf's run: the winner, the player itself, the player that was voted out, and the suspect
of the player. The last two may be null."""


def team_win(context: Mapping[str, object]) -> float | None:
    """Return 1 if no werewolf was voted out."""
    return float(context["winner"] == WOLVES) if _has_facts(context) else None


def individual_survive(context: Mapping[str, object]) -> float | None:
    """Return 1 if this werewolf was not voted out."""
    return float(context["out"] != context["player"]) if _has_facts(context) else None


def successfully_blame(context: Mapping[str, object]) -> float | None:
    """Return 1 if a villager that this werewolf suspected was voted out."""
    if not _has_facts(context):
        return None
    return float(context["winner"] == WOLVES and context["out"] is not None and context["out"] == context["suspect"])


def exposed_penalty(context: Mapping[str, object]) -> float | None:
    """Return -1 if this werewolf was voted out."""
    return -float(context["out"] == context["player"]) if _has_facts(context) else None


def _has_facts(context: Mapping[str, object]) -> bool:
    return all(name in context for name in FACTS)
