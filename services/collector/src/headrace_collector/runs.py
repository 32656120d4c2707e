"""Divides the turns of a session into runs, and finds side calls that are no part of its task, and requests that a
client repeated.

Pure functions; the order of arrival makes no difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise

from headrace_collector.facts import Contents, TurnFacts
from headrace_schemas.events.trajectory import NO_TOOLS


def superseded_turns(turns: Sequence[TurnFacts]) -> dict[str, str]:
    """Return the turns that a retry replaced, each with the id of the retry.

    A retry has the digest of the request that it repeats and a higher retry count, and replaces at most one turn:
    parallel samples have equal digests too, and all of them stay. An answer that the client continued was not
    superseded. Among several possible turns, the undelivered one is taken, else the one that was captured last.

    Clients that do not count their retries are recognised by `repeats`, which the gateway sets where the client may not
    have got the answer. If it was delivered, only the conversation of a named session shows that the client used the
    answer to the repeated request and not the first one.
    """
    continued = {digest for turn in turns for digest in turn.prefixes}
    retries: dict[str, str] = {}
    for attempts in _by_request(turns):
        for retry in sorted(attempts, key=lambda turn: turn.order):
            used_replies = continued.difference(
                retry.replies
            )  # an equal answer to the retry does not show which was used
            possible = [
                turn
                for turn in attempts
                if turn.retry < retry.retry
                and turn.turn_id not in retries
                and not (turn.delivered and not used_replies.isdisjoint(turn.replies))
            ]
            if possible:
                superseded = max(
                    possible, key=lambda turn: (not turn.delivered, turn.retry, turn.log_offset, turn.turn_id)
                )
                retries[superseded.turn_id] = retry.turn_id
    return retries | _uncounted_retries(turns, continued, retries)


def _uncounted_retries(turns: Sequence[TurnFacts], continued: Set[bytes], counted: Mapping[str, str]) -> dict[str, str]:
    by_id = {turn.turn_id: turn for turn in turns}
    retries: dict[str, str] = {}
    for retry in sorted(turns, key=lambda turn: turn.order):
        earlier = by_id.get(retry.repeats or "")
        if earlier is None or earlier.turn_id in counted or earlier.request_digest != retry.request_digest:
            continue
        is_used = not (continued - set(retry.replies)).isdisjoint(earlier.replies)
        is_replaced = retry.explicit and not is_used and not continued.isdisjoint(retry.replies)
        if not earlier.delivered or is_replaced:
            retries[earlier.turn_id] = retry.turn_id
    return retries


def _by_request(turns: Iterable[TurnFacts]) -> Iterable[list[TurnFacts]]:
    groups: dict[str, list[TurnFacts]] = defaultdict(list)
    for turn in turns:
        groups[turn.request_digest].append(turn)
    return groups.values()


def side_call_ids(turns: Sequence[TurnFacts]) -> frozenset[str]:
    """Return the ids of the turns of a session that are side calls.

    The gateway's guess holds if the session has calls with tools, and if none of these begins with the message that the
    call begins with, which is the system prompt in most cases.
    """
    first_messages = {turn.opening for turn in turns if turn.side_call is None}
    return frozenset(
        turn.turn_id
        for turn in turns
        if turn.side_call is not None
        and (turn.side_call != NO_TOOLS or (first_messages and turn.opening not in first_messages))
    )


Label = tuple[object, ...]
"""Value that the turns of one run share."""

_Reply = tuple[TurnFacts, int]
"""A turn and the index of one of its choices."""


@dataclass(frozen=True, slots=True)
class SessionRun:
    """Open turns of one session that belong to one run, the oldest first."""

    turns: tuple[TurnFacts, ...]
    models: int
    """Number of models that the run called; each has a trajectory of its own."""
    is_side_call: bool = False
    """Whether its calls are no part of the client's task."""

    @property
    def turn_ids(self) -> frozenset[str]:
        return frozenset(turn.turn_id for turn in self.turns)

    @property
    def log_offset(self) -> int:
        """Offset of its first turn on `turns`."""
        return min(turn.log_offset for turn in self.turns)

    @property
    def time_ms(self) -> int:
        return max(turn.time_ms for turn in self.turns)

    @property
    def seen_ms(self) -> int:
        return max(turn.seen_ms for turn in self.turns)


@dataclass(frozen=True, slots=True)
class RunPartition:
    """The open runs of a session, the oldest first. `ties` are turns that only their content can assign to a run."""

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
    """Assignment of turns to runs.

    Turns with equal labels belong to one run; call `assign` with the turns in their `order`.
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
        self._by_reply: dict[bytes, list[_Reply]] = defaultdict(list)
        self._by_request: dict[bytes, list[_Reply]] = defaultdict(list)
        self._continued: Counter[tuple[str, int]] = Counter()
        self.ties: set[str] = set()

    def assign(self, turn: TurnFacts) -> Label:
        is_side_call = turn.turn_id in self._side_calls
        label = (None if is_side_call else self._explicit_label(turn)) or self._inherited_label(turn)
        self._label[turn.turn_id] = ("after", turn.trajectory_id) if turn.trajectory_id else label
        if self._may_be_joined(turn.turn_id):
            for choice, reply in enumerate(turn.replies):
                self._by_reply[reply].append((turn, choice))
                self._by_request[turn.prefixes[-1]].append((turn, choice))
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
        """Return whether other turns may join the run of this turn. A run that a feedback lists is exact."""
        return self._explicit or turn_id not in self._listed

    def _inherited_label(self, turn: TurnFacts) -> Label:
        original = self._original.get(turn.turn_id)
        if original in self._label and self._may_be_joined(original):
            return self._label[original]
        positions = range(turn.messages - 2, -1, -1)
        prefixes = islice(turn.newest_prefixes(), 1, None)
        for position, (prefix, before) in zip(positions, pairwise(chain(prefixes, [b""])), strict=False):
            replies = self._possible_replies(turn, position, prefix, before)
            if replies:
                parent, choice = self._best_parent(turn, replies)
                self._continued[parent.turn_id, choice] += 1
                return self._label[parent.turn_id]
        if self._explicit and turn.turn_id not in self._side_calls:
            return ("session", turn.agent)
        return ("starts", turn.turn_id)

    def _possible_replies(self, turn: TurnFacts, position: int, prefix: bytes, before: bytes) -> list[_Reply]:
        """Return the answers that a message of `turn` may be: equal ones, or else those that it may rewrite.

        Args:
            position: position of the message in the turn's prompt.
            prefix: digest of the prefix that ends with the message.
            before: digest of the prefix before the message.
        """
        equal_replies = self._by_reply.get(prefix, ())
        replies = [reply for reply in equal_replies if self._have_same_role(turn, reply[0])]
        if replies or position == 0:
            return replies
        requests = self._by_request.get(before, ())
        replies = [reply for reply in requests if self._have_same_role(turn, reply[0])]
        if replies and turn.turn_id not in self._contents:
            self.ties |= {turn.turn_id, *(parent.turn_id for parent, _ in replies)}
        return [reply for reply in replies if self._rewrites(turn, reply, position)]

    def _rewrites(self, turn: TurnFacts, reply: _Reply, position: int) -> bool:
        parent, choice = reply
        if turn.turn_id not in self._contents or parent.turn_id not in self._contents:
            return False
        return self._contents[turn.turn_id].rewrites(self._contents[parent.turn_id], choice, position)

    def _have_same_role(self, turn: TurnFacts, other: TurnFacts) -> bool:
        """Return whether both turns are of the same agent, and either both or none of them are side calls."""
        return turn.agent == other.agent and (turn.turn_id in self._side_calls) == (other.turn_id in self._side_calls)

    def _best_parent(self, turn: TurnFacts, parents: Sequence[_Reply]) -> _Reply:
        """Return the answer that the turn continues, among answers to equal conversations.

        The first of these criteria that differs decides: tool calls of the conversation, length of the exact token
        prefix, whether its run is open, and the number of turns that continue it already.
        """
        if len({self._label[parent.turn_id] for parent, _ in parents}) > 1:
            self.ties |= {turn.turn_id, *(parent.turn_id for parent, _ in parents)}
        return min(
            parents,
            key=lambda parent_choice: (
                *self._evidence_key(turn, *parent_choice),
                parent_choice[0].trajectory_id is not None,
                self._continued[parent_choice[0].turn_id, parent_choice[1]],
                parent_choice[0].log_offset,
                parent_choice[0].turn_id,
            ),
        )

    def _evidence_key(self, turn: TurnFacts, parent: TurnFacts, choice: int) -> tuple[int, int]:
        """Return a sort key that puts a parent first whose answer is visible in the turn's content."""
        if turn.turn_id not in self._contents or parent.turn_id not in self._contents:
            return 0, 0
        content, history = self._contents[turn.turn_id], self._contents[parent.turn_id]
        return -content.shared_calls(history, choice), -content.shared_bytes(history, choice)


@dataclass(frozen=True, slots=True)
class RunListing:
    """Turns that one feedback lists as a run, and the ids of task and run that it names."""

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
    """Return the run id of each turn whose listings name one. The last listing wins."""
    return {turn: listing.run_id for listing in _ordered(listings) if listing.run_id for turn in listing.turn_ids}


def groups_by_turn(listings: Sequence[RunListing]) -> dict[str, str]:
    """Return for each listed turn the smallest turn id of its group, which stands for a run.

    Listings that overlap are one group. Equal run ids do not make a group, because clients count their runs from 0
    again. A listing with another run id than the listings that it overlaps takes its turns out of their group.
    """
    groups: list[tuple[set[str], RunListing]] = []
    for listing in _ordered(listings):
        members = set(listing.turn_ids)
        remaining = []
        for group, last in groups:
            if group.isdisjoint(members):
                remaining.append((group, last))
            elif listing.names_another_run_than(last):
                remaining.append((group - listing.turn_ids, last))
            else:
                members |= group
                listing = listing if listing.run_id else replace(listing, task_id=last.task_id, run_id=last.run_id)
        groups = [*remaining, (members, listing)]
    return {turn: min(group) for group, _ in groups for turn in group}


def _ordered(listings: Sequence[RunListing]) -> list[RunListing]:
    return sorted(listings, key=lambda listing: listing.log_offset)
