"""How good was it for one werewolf? Plain functions of what its feedback told, which the scorer calls.

Each says whether something happened, 1 or 0 (the penalty: -1 or 0), and abstains where the context does not tell. What
that is worth, 10, 5, 2 and 5, are the scorer's weights in `headrace.toml`. Nothing is imported from Headrace.
"""

from __future__ import annotations

from collections.abc import Mapping

WOLVES = "werewolves"
"""Who wins, in a context."""
FACTS = ("winner", "player", "out", "suspect")
"""What the context of a wolf's run tells: who won, which of the six it was, who was voted out, whom it suspected. The
last two may be null."""


def team_win(context: Mapping[str, object]) -> float | None:
    """1 when no werewolf was voted out."""
    return float(context["winner"] == WOLVES) if _told(context) else None


def individual_survive(context: Mapping[str, object]) -> float | None:
    """1 when it was not this one who was voted out."""
    return float(context["out"] != context["player"]) if _told(context) else None


def successfully_blame(context: Mapping[str, object]) -> float | None:
    """1 when a villager was voted out whom this one had named."""
    if not _told(context):
        return None
    return float(context["winner"] == WOLVES and context["out"] is not None and context["out"] == context["suspect"])


def exposed_penalty(context: Mapping[str, object]) -> float | None:
    """-1 when it was this one who was voted out."""
    return -float(context["out"] == context["player"]) if _told(context) else None


def _told(context: Mapping[str, object]) -> bool:
    return all(name in context for name in FACTS)
