"""Division of a session's turns into runs, and detection of side calls, which are no part of the client's task.

Pure functions; the order of arrival makes no difference. No step costs more than the logarithm of the number of turns:
a session may have thousands, and a client may send equal ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

from headrace_collector.continuations import EqualReplies, Label, Reply, RequestReplies
from headrace_collector.facts import Contents, TurnFacts
from headrace_collector.retries import superseded_turns
from headrace_schemas.events.trajectory import NO_TOOLS


def side_call_ids(turns: Sequence[TurnFacts]) -> frozenset[str]:
    """Return the ids of the turns of a session that are side calls.

    The gateway marks calls that look like side calls. A mark for the lack of tools is accepted only if the session has
    unmarked calls and none of these begins with the same message, which is the system prompt in most cases.
    """
    first_messages = {turn.opening for turn in turns if turn.side_call is None}
    return frozenset(
        turn.turn_id
        for turn in turns
        if turn.side_call is not None
        and (turn.side_call != NO_TOOLS or (first_messages and turn.opening not in first_messages))
    )


@dataclass(frozen=True, slots=True)
class SessionRun:
    """Open turns of one session that belong to one run, the oldest first."""

    turns: tuple[TurnFacts, ...]
    models: int
    """Number of models that the run called. Each model's turns become a separate trajectory."""
    is_side_call: bool = False
    """Whether the calls of the run are no part of the client's task."""

    @property
    def turn_ids(self) -> frozenset[str]:
        return frozenset(turn.turn_id for turn in self.turns)

    @property
    def log_offset(self) -> int:
        """Offset, on `turns`, of the run's first turn."""
        return min(turn.log_offset for turn in self.turns)

    @property
    def time_ms(self) -> int:
        return max(turn.time_ms for turn in self.turns)

    @property
    def seen_ms(self) -> int:
        return max(turn.seen_ms for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RunPartition:
    """The open runs of a session, the oldest first.

    `ties` are ids of turns that can be assigned to a run only by the contents of messages.
    """

    runs: tuple[SessionRun, ...]
    ties: frozenset[str]


def partition_runs(
    turns: Sequence[TurnFacts],
    listings: Sequence[RunListing],
    contents: Contents | None = None,
    *,
    separates_side_calls: bool = True,
) -> RunPartition:
    """Divide the open turns of a session into runs.

    A session that the client named is one run, unless feedback or the client's own run ids name several. Otherwise a
    feedback that lists turns defines exactly one run, and each other turn belongs to the run of the conversation that
    it continues. A turn that continues a closed run starts a new one. Each sub-agent of a run, and each conversation of
    side calls, is a run of its own.
    """
    side_calls = side_call_ids(turns) if separates_side_calls else frozenset()
    labels = _RunAssignment(turns, listings, contents or {}, side_calls)
    by_label: dict[Label, dict[str, list[TurnFacts]]] = defaultdict(lambda: defaultdict(list))
    for turn in sorted(turns, key=lambda turn: turn.order):
        label = labels.assign(turn)
        if turn.trajectory_id is None:
            by_label[label][turn.model].append(turn)
    runs = [
        SessionRun(
            tuple(sorted(members, key=lambda turn: (turn.log_offset, turn.turn_id))),
            len(models),
            is_side_call=all(turn.turn_id in side_calls for turn in members),
        )
        for models in by_label.values()
        for members in models.values()
    ]
    return RunPartition(
        tuple(sorted(runs, key=lambda run: (run.log_offset, run.turns[0].turn_id))), frozenset(labels.ties)
    )


class _RunAssignment:
    """Union-find structure that assigns the turns of a session to runs (attempts at a task).

    `assign` returns the label of a turn's run, so turns with equal labels belong to one run; call `assign` with the
    turns in their `order`.
    """

    def __init__(
        self,
        turns: Sequence[TurnFacts],
        listings: Sequence[RunListing],
        contents: Contents,
        side_calls: Collection[str],
    ) -> None:
        self._contents = contents
        self._side_calls = side_calls
        self._explicit = any(turn.explicit for turn in turns)
        self._listed = run_ids_by_turn(listings) if self._explicit else groups_by_turn(listings)
        names = {self._listed.get(turn.turn_id, turn.run_id) for turn in turns} - {None}
        self._split = len(names) > 1 or not self._explicit
        self._original = {retry: turn for turn, retry in superseded_turns(turns).items()}
        self._label: dict[str, Label] = {}
        self._by_reply: dict[_Conversation, EqualReplies] = defaultdict(EqualReplies)
        self._by_request: dict[_Conversation, RequestReplies] = defaultdict(RequestReplies)
        self._continued: Counter[tuple[str, int]] = Counter()
        self.ties: set[str] = set()

    def assign(self, turn: TurnFacts) -> Label:
        is_side_call = turn.turn_id in self._side_calls
        label = (None if is_side_call else self._explicit_label(turn)) or self._inherited_label(turn)
        self._label[turn.turn_id] = ("after", turn.trajectory_id) if turn.trajectory_id else label
        if self._may_be_joined(turn.turn_id):
            content = self._contents.get(turn.turn_id)
            for choice, reply in enumerate(turn.replies):
                self._by_reply[self._conversation(turn, reply)].add(turn, choice, self._label[turn.turn_id], content)
                request = self._by_request[self._conversation(turn, turn.prefixes[-1])]
                request.add(turn, choice, self._label[turn.turn_id], content)
        return label

    def _explicit_label(self, turn: TurnFacts) -> Label | None:
        if not self._split:
            return ("session", turn.agent)
        if self._explicit:
            name = self._listed.get(turn.turn_id, turn.run_id)
            return ("named", name, turn.agent) if name else None
        if turn.turn_id in self._listed:
            return ("listed", self._listed[turn.turn_id])
        return ("named", turn.task_id, turn.run_id, turn.agent) if turn.run_id else None

    def _may_be_joined(self, turn_id: str) -> bool:
        """Return whether other turns may join the run of this turn. Runs that feedback lists are complete."""
        return self._explicit or turn_id not in self._listed

    def _inherited_label(self, turn: TurnFacts) -> Label:
        original = self._original.get(turn.turn_id)
        if original in self._label and self._may_be_joined(original):
            return self._label[original]
        positions = range(turn.messages - 2, -1, -1)
        prefixes = islice(turn.newest_prefixes(), 1, None)
        for position, (prefix, before) in zip(positions, pairwise(chain(prefixes, [b""])), strict=False):
            parent = self._equal_parent(turn, prefix) or self._rewritten_parent(turn, position, before)
            if parent is not None:
                self._continued[parent[0].turn_id, parent[1]] += 1
                return self._label[parent[0].turn_id]
        if self._explicit and turn.turn_id not in self._side_calls:
            return ("session", turn.agent)
        return ("starts", turn.turn_id)

    def _equal_parent(self, turn: TurnFacts, prefix: bytes) -> Reply | None:
        """Return the best of the answers that equal a message of `turn`, or None if there is none.

        The first of these criteria that differs decides: number of shared tool calls, length of the exact token prefix,
        whether the run is open, and the number of turns that continue the answer already.

        Args:
            turn: the turn.
            prefix: digest of the prefix that ends with the message.
        """
        replies = self._by_reply.get(self._conversation(turn, prefix))
        if replies is None:
            return None
        if len(replies.labels) > 1:
            self.ties |= {turn.turn_id, *replies.take_new_turn_ids()}
        return replies.best(self._contents.get(turn.turn_id), self._continued)

    def _rewritten_parent(self, turn: TurnFacts, position: int, before: bytes) -> Reply | None:
        """Return the best of the answers of which a message of `turn` may be another form, or None if there is none.

        Args:
            position: position of the message in the turn's prompt.
            before: digest of the prefix before the message.
        """
        requests = self._by_request.get(self._conversation(turn, before)) if position else None
        if requests is None:
            return None
        content = self._contents.get(turn.turn_id)
        if content is None:
            self.ties |= {turn.turn_id, *requests.take_new_turn_ids()}
            return None
        return requests.best(content, position, self._continued)

    def _conversation(self, turn: TurnFacts, digest: bytes) -> _Conversation:
        """Return the key of the turns that `turn` may continue: they are of the same agent, and either both or none of
        them are side calls."""
        return digest, turn.agent, turn.turn_id in self._side_calls


_Conversation = tuple[bytes, str | None, bool]
"""Digest of a conversation, its sub-agent, and whether it is a side call."""


@dataclass(frozen=True, slots=True)
class RunListing:
    """Ids of the turns that one feedback event lists as a run, and the task id and the run id in it."""

    turn_ids: frozenset[str]
    task_id: str | None
    run_id: str | None
    log_offset: int
    """Offset of the feedback."""

    def names_another_run_than(self, other: RunListing) -> bool:
        if self.run_id is None or other.run_id is None:
            return False
        tasks_differ = self.task_id is not None and other.task_id is not None and self.task_id != other.task_id
        return tasks_differ or self.run_id != other.run_id


def run_ids_by_turn(listings: Sequence[RunListing]) -> dict[str, str]:
    """Return, by turn id, the run id that feedback listing the turn names. The last listing decides."""
    return {
        turn: listing.run_id for listing in _order_listings(listings) if listing.run_id for turn in listing.turn_ids
    }


def groups_by_turn(listings: Sequence[RunListing]) -> dict[str, str]:
    """Group turns that feedback lists together, and return for each turn the smallest turn id in its group as the
    group's id.

    Listings that overlap are one group. Equal run ids do not make a group, because clients count their runs from 0
    again. A listing with another run id than the listings that it overlaps takes its turns out of their group.
    """
    group_of: dict[str, _ListedGroup] = {}
    for number, listing in enumerate(_order_listings(listings)):
        overlapping = {id(group): group for turn in listing.turn_ids if (group := group_of.get(turn)) is not None}
        merged = _ListedGroup(set(listing.turn_ids), number, listing)
        group_of |= dict.fromkeys(listing.turn_ids, merged)
        for group in sorted(overlapping.values(), key=lambda group: group.number):
            if merged.listing.names_another_run_than(group.listing):
                group.turn_ids -= listing.turn_ids
                continue
            named = merged.listing
            if not named.run_id:
                named = replace(named, task_id=group.listing.task_id, run_id=group.listing.run_id)
            smaller, larger = sorted((merged, group), key=lambda item: len(item.turn_ids))
            group_of |= dict.fromkeys(smaller.turn_ids, larger)
            larger.turn_ids |= smaller.turn_ids
            larger.number, larger.listing = number, named
            merged = larger
    groups = {id(group): group for group in group_of.values()}
    names = {number: min(group.turn_ids) for number, group in groups.items()}
    return {turn: names[id(group)] for turn, group in group_of.items()}


@dataclass(slots=True)
class _ListedGroup:
    """Turns of one run: the merged turn ids of feedback events (`RunListing`) that list some of the same turns."""

    turn_ids: set[str]
    number: int
    """Index of the last of these events in the order of the log."""
    listing: RunListing
    """The last of these events, with the task and run ids of an earlier one if it has no run id."""


def _order_listings(listings: Sequence[RunListing]) -> list[RunListing]:
    return sorted(listings, key=lambda listing: listing.log_offset)
