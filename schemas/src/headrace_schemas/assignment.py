"""Who gets which version: a pure function of a salt, a unit and the shares, so that it is the same after a restart.

A unit (a session, or a user) has a place in [0, 1), a keyed hash. With k slots for candidates the line is cut into
k + 1 equal blocks: candidate j begins at the left end of block j and its control at the left end of the last block, and
both are as wide as its share. A share that grows moves the right ends alone, so a unit that was once in the canary or
in its control stays there. Everybody else has the champion and is compared with nobody.

Candidate and control of one size, at the same time: given that a unit is in either, it is in the candidate's with
probability 1/2 exactly, whatever the shares are, were and will be. The statistics rest on this and on nothing else.

The registry decides the shares, gateways assign: both by this page, so that neither has to ask the other.
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
_PLACES = 2**64


def place(salt: str, unit: str) -> Fraction:
    """Where the unit stands in [0, 1). The salt is the rollout's own: the same users are not first every time."""
    key = hashlib.sha256(salt.encode()).digest()
    digest = hashlib.blake2b(unit.encode(), key=key, digest_size=8).digest()
    return Fraction(int.from_bytes(digest, "big"), _PLACES)


@dataclass(frozen=True, slots=True)
class Allotment:
    """What a unit is served, and how probable that was: the propensity that its turns carry."""

    version: str
    propensity: Fraction


@dataclass(frozen=True, slots=True)
class Split:
    """The line of one model. Each slot is a block; None: it is free, and its units have the champion. A candidate keeps
    its slot, and the number of slots and the salt stay while anything is under way, so nobody is moved."""

    salt: str
    champion: str
    slots: tuple[str | None, ...]

    def __post_init__(self) -> None:
        names = [name for name in (*self.slots, self.champion) if name is not None]
        if not self.slots or len(set(names)) != len(names):
            raise ValueError(f"slots {self.slots} beside {self.champion}: one slot at least, and each version once")

    @property
    def share_max(self) -> Fraction:
        """The most that a candidate may get while there is a control of its size: 1/2 for a single one."""
        return Fraction(1, len(self.slots) + 1)

    def assign(self, unit: str, shares: Mapping[str, Fraction]) -> Allotment:
        """Which version serves the unit. Candidates without a share serve nobody."""
        self._check(shares)
        where = place(self.salt, unit)
        for number, candidate in enumerate(self.slots):
            share = shares.get(candidate, Fraction(0)) if candidate else Fraction(0)
            if candidate and _inside(where, number * self.share_max, share):
                return Allotment(candidate, share)
        return Allotment(self.champion, 1 - sum(shares.values(), Fraction(0)))

    def role(self, unit: str, candidate: str, shares: Mapping[str, Fraction]) -> Role | None:
        """What the unit is in the comparison of `candidate` with the champion; None: no part of it."""
        self._check(shares)
        share, where = shares.get(candidate, Fraction(0)), place(self.salt, unit)
        if _inside(where, self.slots.index(candidate) * self.share_max, share):
            return "candidate"
        return "control" if _inside(where, len(self.slots) * self.share_max, share) else None

    def _check(self, shares: Mapping[str, Fraction]) -> None:
        for version, share in shares.items():
            if version not in self.slots:
                raise ValueError(f"a share for {version}, which has no slot; there are {self.slots}")
            if not 0 <= share <= self.share_max:
                raise ValueError(
                    f"share {share} for {version}: with {len(self.slots)} slots and a control of the same size "
                    f"each may have {self.share_max} at most"
                )


def draw(split: TrafficSplit, champion: str, unit: str) -> tuple[str, UnitAssignment | None]:
    """The version that serves a unit of a routing, and what its turns say about that."""
    arms = [arm for arm in split.arms if arm.version != champion]
    if not arms:
        return champion, None
    slots: list[str | None] = [None] * split.slots
    for arm in arms:
        slots[arm.slot] = arm.version
    line = Split(split.salt, champion, tuple(slots))
    shares = {arm.version: Fraction(arm.share) for arm in arms}
    allotted = line.assign(unit, shares)
    roles = {arm.rollout_id: line.role(unit, arm.version, shares) for arm in arms}
    arm_of: Literal["candidate", "control", "rest"] = "rest"
    rollouts = tuple(roles)
    for role in ("candidate", "control"):
        named = tuple(name for name, found in roles.items() if found == role)
        if named:
            arm_of, rollouts = role, named
            break
    propensity = str(allotted.propensity)
    return allotted.version, UnitAssignment(rollouts=rollouts, arm=arm_of, unit=unit, propensity=propensity)


def _inside(where: Fraction, start: Fraction, width: Fraction) -> bool:
    return start <= where < start + width
