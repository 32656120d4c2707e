"""Assignment of units to versions: a pure function of a salt, the unit and the shares, so it survives a restart.

A keyed hash maps a unit (a session or a user) to a position in [0, 1). With k slots for candidates the interval is cut
into k + 1 equal blocks. Candidate j gets the left end of block j, its control the left end of the last block, and both
are as wide as the candidate's share. A growing share moves only the right ends, so a unit stays in the canary or in its
control. All other units get the champion and are part of no comparison.

Candidate and control have the same size at the same time. So a unit that is in either of them is in the candidate with
probability exactly 1/2, independent of past and future shares. The statistics assume nothing else.

The registry sets the shares and gateways assign units. Both use this module, so they need not communicate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from headrace_schemas.events.routing import TrafficSplit
from headrace_schemas.events.turn import UnitAssignment

Role = Literal["candidate", "control"]
_HASHES = 2**64
"""Number of different hashes."""


def unit_position(salt: str, unit: str) -> Fraction:
    """Map a unit (a session or a user) to a uniform number in [0, 1), by which it is assigned to the candidate or the
    rest.

    Each rollout has its own salt, so that each selects other users first.
    """
    key = hashlib.sha256(salt.encode()).digest()
    digest = hashlib.blake2b(unit.encode(), key=key, digest_size=8).digest()
    return Fraction(int.from_bytes(digest, "big"), _HASHES)


@dataclass(frozen=True, slots=True)
class Allotment:
    """The version that serves a unit (a user or a session), with the probability of that assignment."""

    version: str
    propensity: Fraction
    """The probability with which a unit gets this version."""


@dataclass(frozen=True, slots=True)
class Split:
    """Division of the units of one model among its candidates, their controls and the champion.

    A candidate keeps its slot, and the salt and the number of slots stay while a rollout is in progress. So no unit
    changes its version.
    """

    salt: str
    champion: str
    slots: tuple[str | None, ...]
    """The candidate of each slot. The units of an empty slot get the champion."""

    def __post_init__(self) -> None:
        names = [name for name in (*self.slots, self.champion) if name is not None]
        if not self.slots or len(set(names)) != len(names):
            raise ValueError(
                f"slots {self.slots} with champion {self.champion}: there must be at least one slot, and each version "
                "must occur once"
            )

    @property
    def share_max(self) -> Fraction:
        """The largest share of a candidate that leaves an equal share for its control: 1/2 for a single candidate."""
        return Fraction(1, len(self.slots) + 1)

    def assign(self, unit: str, shares: Mapping[str, Fraction]) -> Allotment:
        """Return the version that serves a unit (a user or a session). Candidates without a share get no units."""
        self._check(shares)
        position = unit_position(self.salt, unit)
        for number, candidate in enumerate(self.slots):
            share = shares.get(candidate, Fraction(0)) if candidate else Fraction(0)
            if candidate and _inside(position, number * self.share_max, share):
                return Allotment(candidate, share)
        return Allotment(self.champion, 1 - sum(shares.values(), Fraction(0)))

    def role(self, unit: str, candidate: str, shares: Mapping[str, Fraction]) -> Role | None:
        """Return whether a unit (a user or a session) belongs to the candidate's or the control's arm in the comparison
        of `candidate` with the champion; None if to neither.
        """
        self._check(shares)
        share, position = shares.get(candidate, Fraction(0)), unit_position(self.salt, unit)
        if _inside(position, self.slots.index(candidate) * self.share_max, share):
            return "candidate"
        return "control" if _inside(position, len(self.slots) * self.share_max, share) else None

    def _check(self, shares: Mapping[str, Fraction]) -> None:
        for version, share in shares.items():
            if version not in self.slots:
                raise ValueError(f"share of {version}: the version has no slot; the slots are {self.slots}")
            if not 0 <= share <= self.share_max:
                raise ValueError(
                    f"share {share} of {version}: must be at most {self.share_max}, because the traffic is divided "
                    f"among {len(self.slots)} slots and a control of the same size"
                )


def assign_unit(split: TrafficSplit, champion: str, unit: str) -> tuple[str, UnitAssignment | None]:
    """Return the version that serves a unit (a user or a session), and the assignment to record in its turns."""
    arms = [arm for arm in split.arms if arm.version != champion]
    if not arms:
        return champion, None
    slots: list[str | None] = [None] * split.slots
    for arm in arms:
        slots[arm.slot] = arm.version
    division = Split(split.salt, champion, tuple(slots))
    shares = {arm.version: Fraction(arm.share) for arm in arms}
    allotted = division.assign(unit, shares)
    roles = {arm.rollout_id: division.role(unit, arm.version, shares) for arm in arms}
    arm_of: Literal["candidate", "control", "rest"] = "rest"
    rollouts = tuple(roles)
    for role in ("candidate", "control"):
        rollouts_of_role = tuple(rollout_id for rollout_id, unit_role in roles.items() if unit_role == role)
        if rollouts_of_role:
            arm_of, rollouts = role, rollouts_of_role
            break
    propensity = str(allotted.propensity)
    return allotted.version, UnitAssignment(rollouts=rollouts, arm=arm_of, unit=unit, propensity=propensity)


def _inside(position: Fraction, start: Fraction, width: Fraction) -> bool:
    return start <= position < start + width
