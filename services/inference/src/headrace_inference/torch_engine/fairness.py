"""Selection of a batch's sequences: fair sharing, and the search for the sequence that makes a step fail.

Rows are shared by max-min fairness: the next row goes to the tenant with the fewest, and a full batch preempts a row
of the tenant with the most. Time is shared by debts: while several flows have rows, a flow with more than its part of
them may take half of the engine's time, and so may background work. A flow that took more is paused for some steps.
Without contention no flow is paused, and sequences run in order of arrival.

After a failed step, its sequences are retried in groups. A group that computes a step is released, a group that fails
is halved, and a sequence that fails alone is the cause. So one cause among `n` sequences takes about `2 log2(n)`
steps, in which the other sequences get tokens as well.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TypeVar

from headrace_inference.torch_engine.sequence import Sequence

HEAVY_SHARE = 1 / 2
"""Share of the time that a flow with many rows or long prompts may take while other flows have rows."""
BACKGROUND_SHARE = 1 / 2
"""Share of the time that evaluations may take while users have rows. With a smaller share, evaluations beside steady
traffic take so long that new versions wait for the gate, and the agent learns from old versions."""
PORTION_DIVISOR = 4
"""Divisor of the size of a prompt portion while several tenants have rows."""
Flow = tuple[str, ...]
T = TypeVar("T")
_BACKGROUND: Flow = ("background",)


def select_joining(waiting: SequenceOf[Sequence], running: SequenceOf[Sequence]) -> int:
    """Return the index of the waiting sequence that gets the next row.

    Users come before background work. Then the tenant with the fewest rows comes first, then the session with the
    fewest rows, then the earliest arrival.
    """
    if len(waiting) == 1:
        return 0
    tenants = Counter(sequence.tenant for sequence in running)
    sessions = Counter((sequence.tenant, sequence.session) for sequence in running)

    def rank(index: int) -> tuple[bool, int, int, int]:
        sequence = waiting[index]
        tenant = sequence.tenant
        return sequence.background, tenants[tenant], sessions[tenant, sequence.session], sequence.arrival

    return min(range(len(waiting)), key=rank)


def find_row_to_preempt(running: SequenceOf[Sequence], joining: Sequence) -> int | None:
    """Return the row of a full batch that is preempted for `joining`, or None if `joining` must wait.

    A user's sequence preempts background work, never the reverse. Otherwise the row is one of the tenant, or of the
    session of the same tenant, that has at least two rows more than that of `joining`. So two sequences never preempt
    each other in turn.
    """
    background = [row for row, sequence in enumerate(running) if sequence.background]
    if background and not joining.background:
        return max(background, key=lambda row: running[row].arrival)
    rows = background if joining.background else range(len(running))
    rows_of_tenant = Counter(running[row].tenant for row in rows)
    tenant = _largest(rows_of_tenant, joining.tenant) or joining.tenant
    rows_of_session = Counter(running[row].session for row in rows if running[row].tenant == tenant)
    if tenant == joining.tenant:
        session = _largest(rows_of_session, joining.session)
    else:
        session = max(rows_of_session, key=lambda name: rows_of_session[name])
    if session is None:
        return None
    candidates = [row for row in rows if running[row].tenant == tenant and running[row].session == session]
    return max(candidates, key=lambda row: running[row].arrival)


def _largest(rows: Mapping[T, int], joining: T) -> T | None:
    """Return the key with the most rows if it has at least two rows more than the key `joining`, otherwise None."""
    largest = max(rows, key=lambda name: rows[name], default=None)
    return largest if largest is not None and rows[largest] > rows.get(joining, 0) + 1 else None


@dataclass(slots=True)
class TimeShares:
    """Record of the engine time that each flow (tenant, session or background work) used.

    It determines which rows pause and which prompt is computed next. Only the worker's thread uses it.
    """

    _debt_s: dict[Flow, float] = field(default_factory=dict)
    _prompted: dict[Flow, float] = field(default_factory=dict)
    """Prompt tokens computed for each flow. A new flow starts with the smallest count of the present flows."""
    several_tenants: bool = False
    """Whether several tenants have rows. Users and evaluations of a tenant count as two."""
    contended: bool = False
    """Whether several flows have rows."""

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """Update the flows to those of the `running` sequences. Debts of other flows are deleted."""
        tenants = {sequence.tenant for sequence in running}
        self.several_tenants = len(tenants) > 1
        flows = {self.flow_of(sequence) for sequence in running}
        self.contended = len(flows) > 1
        if not self.contended:
            self._debt_s.clear()
            self._prompted.clear()
            return
        self._debt_s = {flow: self._debt_s.get(flow, 0.0) for flow in flows}
        floor = min((self._prompted[flow] for flow in flows if flow in self._prompted), default=0.0)
        self._prompted = {flow: self._prompted.get(flow, floor) for flow in flows}

    def flow_of(self, sequence: Sequence) -> Flow:
        """Return the flow to which the time of a sequence is charged: background work, or its tenant, or its session if
        there is only one tenant.
        """
        if sequence.background:
            return _BACKGROUND
        return (sequence.salt,) if self.several_tenants else (sequence.salt, sequence.session)

    def paused_flows(self, decoding: SequenceOf[Sequence]) -> frozenset[Flow]:
        """Return the flows whose rows pause in the next step, because they used more than their share of time."""
        if not self.contended:
            return frozenset()
        rows = Counter(map(self.flow_of, decoding))
        background = rows.pop(_BACKGROUND, 0)
        users = [flow for flow in self._debt_s if flow != _BACKGROUND]
        part = sum(rows.values()) / max(1, len(users))
        paused = {flow for flow, count in rows.items() if count > part and self._debt_s[flow] > 0}
        if background and rows.keys() - paused and self._debt_s[_BACKGROUND] > 0:
            paused.add(_BACKGROUND)
        return frozenset(paused) if len(paused) < len(rows) + bool(background) else frozenset()

    def next_prompt(self, running: SequenceOf[Sequence], first: int) -> int | None:
        """Return the row from `first` on whose prompt is computed next; None if only decoding rows run in this step."""

        def rank(row: int) -> tuple[bool, float, int]:
            sequence = running[row]
            return sequence.background, self._prompted.get(self.flow_of(sequence), 0.0), sequence.arrival

        rows = [row for row in range(first, len(running)) if not first or not self.is_in_debt(running[row])]
        return min(rows, key=rank, default=None)

    def is_in_debt(self, sequence: Sequence) -> bool:
        """Return whether the prompt of a sequence must wait because its tenant used more than its share of time.

        With a single tenant no prompt waits for this reason.
        """
        if not (self.several_tenants or sequence.background):
            return False
        return self._debt_s.get(self.flow_of(sequence), 0.0) > 0

    def charge_prompts(self, tokens: SequenceOf[tuple[Sequence, int]], seconds: float) -> None:
        """Charge the time of a portion of prompts to its flows, in proportion to their tokens."""
        if not self.contended:
            return
        total = sum(count for _, count in tokens) or 1
        for sequence, count in tokens:
            self._prompted[self.flow_of(sequence)] += count
        self._charge({self.flow_of(sequence): count / total for sequence, count in tokens}, seconds)

    def charge_step(self, decoded: SequenceOf[Sequence], seconds: float) -> None:
        """Charge the time of a decode step to its flows, in proportion to their rows."""
        if self.contended and decoded:
            rows = Counter(map(self.flow_of, decoded))
            self._charge({flow: count / len(decoded) for flow, count in rows.items()}, seconds)

    def _charge(self, parts: Mapping[Flow, float], seconds: float) -> None:
        for flow, debt_s in self._debt_s.items():
            share = BACKGROUND_SHARE if flow == _BACKGROUND else HEAVY_SHARE
            self._debt_s[flow] = max(0.0, debt_s + seconds * (parts.get(flow, 0.0) - share))


class Quarantine:
    """Token sequences that were in the batch when a step failed, in groups that are retried one after another.

    A failed group is divided again, until a group has a single sequence, which causes the failure. The batch admits
    only sequences of `group` until no group is left.
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
        """Divide the sequences of a failed step into two groups to retry. Return the sequence if it is the only one."""
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
        """Mark sequences as innocent: they have computed a step, or did not take part in the failed one."""
        self._released += sequences

    def begin_next_group(self) -> None:
        """Set `group` to the next group of suspected sequences to retry; to an empty one if no group is left."""
        self.group = deque(self._untried.popleft() if self._untried else ())

    def leave(self) -> list[Sequence]:
        """End the quarantine if no group is left to retry, and return the released sequences in order of arrival; else
        return an empty list.
        """
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
