"""Who gets which version: a pure function of a salt, a unit and the shares, so that it is the same after a restart.

A unit (a session, or a user) has a place in [0, 1), a keyed hash. With k candidates the line is cut into k + 1 equal
blocks: candidate j begins at the left end of block j and its control at the left end of the last block, and both are
as wide as its share. A share that grows moves the right ends alone, so a unit that was once in the canary or in its
control stays there. Everybody else has the champion and is compared with nobody.

Candidate and control of one size, at the same time: given that a unit is in either, it is in the candidate's with
probability 1/2 exactly, whatever the shares are, were and will be. The statistics rest on this and on nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Role = Literal["candidate", "control"]
_PLACES = 2**64


def place(salt: str, unit: str) -> Fraction:
    """Where the unit stands in [0, 1). The salt is the rollout's own: the same users are not first every time."""
    key = hashlib.sha256(salt.encode()).digest()
    digest = hashlib.blake2b(unit.encode(), key=key, digest_size=8).digest()
    return Fraction(int.from_bytes(digest, "big"), _PLACES)


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a unit is served, and how probable that was: the propensity that its turns carry."""

    version: str
    propensity: Fraction


@dataclass(frozen=True, slots=True)
class Split:
    """The line of one rollout. `candidates` keep their blocks, also when they leave: their units go to the champion."""

    salt: str
    champion: str
    candidates: tuple[str, ...]

    def __post_init__(self) -> None:
        names = (*self.candidates, self.champion)
        if not self.candidates or len(set(names)) != len(names):
            raise ValueError(f"candidates {self.candidates} beside {self.champion}: name one at least, each once")

    @property
    def share_max(self) -> Fraction:
        """The most that a candidate may get while there is a control of its size: 1/2 for a single one."""
        return Fraction(1, len(self.candidates) + 1)

    def assign(self, unit: str, shares: Mapping[str, Fraction]) -> Assignment:
        """Which version serves the unit. Candidates without a share have none."""
        self._check(shares)
        where = place(self.salt, unit)
        for number, candidate in enumerate(self.candidates):
            share = shares.get(candidate, Fraction(0))
            if _inside(where, number * self.share_max, share):
                return Assignment(candidate, share)
        return Assignment(self.champion, 1 - sum(shares.values(), Fraction(0)))

    def role(self, unit: str, candidate: str, shares: Mapping[str, Fraction]) -> Role | None:
        """What the unit is in the comparison of `candidate` with the champion; None: no part of it."""
        self._check(shares)
        share, where = shares.get(candidate, Fraction(0)), place(self.salt, unit)
        if _inside(where, self.candidates.index(candidate) * self.share_max, share):
            return "candidate"
        return "control" if _inside(where, len(self.candidates) * self.share_max, share) else None

    def _check(self, shares: Mapping[str, Fraction]) -> None:
        for version, share in shares.items():
            if version not in self.candidates:
                raise ValueError(f"a share for {version}, which is no candidate; there are {_listed(self.candidates)}")
            if not 0 <= share <= self.share_max:
                raise ValueError(
                    f"share {share} for {version}: with {len(self.candidates)} candidates and a control of the same "
                    f"size each may have {self.share_max} at most"
                )


def _inside(where: Fraction, start: Fraction, width: Fraction) -> bool:
    return start <= where < start + width


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
