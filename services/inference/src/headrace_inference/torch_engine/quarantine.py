"""Search for the sequence that makes a step fail, so that only this sequence fails.

After a failed step, its sequences are retried in groups. A group that computes a step is released, a group that fails
is halved, and a sequence that fails alone is the cause. So one cause among `n` sequences takes about `2 log2(n)` steps,
in which the other sequences get tokens as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from headrace_inference.torch_engine.sequence import Sequence


class Quarantine:
    """Sequences of failed steps, divided into groups that are retried.

    A batch admits only from `group` until the quarantine is empty.
    """

    def __init__(self) -> None:
        self.group: deque[Sequence] = deque()
        """Members of the present group that do not have a row yet."""
        self._untried: deque[list[Sequence]] = deque()
        self._released: list[Sequence] = []
        self.active = False

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that have no row of the batch."""
        yield from self.group
        for group in self._untried:
            yield from group
        yield from self._released

    def split(self, suspects: list[Sequence]) -> Sequence | None:
        """Divide the sequences of a failed step into groups. Return the cause if there is only one."""
        self.active = True
        if self.group:
            self._untried.appendleft(list(self.group))
        half = len(suspects) // 2
        for part in (suspects[half:], suspects[:half]):
            if part and half:
                self._untried.appendleft(part)
        self.begin_next_group()
        return suspects[0] if len(suspects) == 1 else None

    def release(self, sequences: list[Sequence]) -> None:
        """Release sequences that have computed a step, or that did not cause the failure."""
        self._released += sequences

    def begin_next_group(self) -> None:
        """Begin with the next group, after the present one was released or divided."""
        self.group = deque(self._untried.popleft() if self._untried else ())

    def leave(self) -> list[Sequence]:
        """Return all released sequences in order of arrival once no group is left, and end the quarantine."""
        if self.group:
            return []
        released = sorted(self._released, key=lambda sequence: sequence.arrival)
        self._released = []
        self.active = False
        return released

    def drop(self, owner: object) -> None:
        """Remove every sequence of the generation `owner`."""
        self.group = deque(sequence for sequence in self.group if sequence.owner is not owner)
        groups = ([sequence for sequence in group if sequence.owner is not owner] for group in self._untried)
        self._untried = deque(filter(None, groups))
        self._released = [sequence for sequence in self._released if sequence.owner is not owner]
