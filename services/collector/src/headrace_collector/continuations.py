"""Answers that a turn of a session may continue, and the choice among equal answers."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappush, heapreplace

from headrace_collector.facts import TurnContent, TurnFacts

Label = tuple[object, ...]
"""Value that the turns of one run share."""

Reply = tuple[TurnFacts, int]
"""A turn and the index of one of its choices."""

_Candidate = tuple[bool, int, int, str, int, TurnFacts]
"""Sort key of an answer (best answer first), followed by the answer's turn."""
_Continued = Mapping[tuple[str, int], int]


class EqualReplies:
    """Answers to equal conversations, among which the parent of a new turn is chosen.

    The best one is found by indexes of tool calls and of tokens, because a session may have thousands of equal
    conversations that differ in both.
    """

    def __init__(self) -> None:
        self.labels: set[Label] = set()
        self._all = _Replies()
        self._by_calls: dict[frozenset[str], _Replies] = defaultdict(_Replies)
        """Answers by the ids of the tool calls of their conversation."""
        self._with_call: dict[str, set[frozenset[str]]] = defaultdict(set)
        """Keys of `_by_calls` that contain a tool call."""
        self._new_turn_ids: list[str] = []

    def add(self, turn: TurnFacts, choice: int, label: Label, content: TurnContent | None) -> None:
        """Add an answer, with the label of the run to which its turn belongs."""
        self.labels.add(label)
        self._new_turn_ids.append(turn.turn_id)
        candidate = turn.trajectory_id is not None, 0, turn.log_offset, turn.turn_id, choice, turn
        tokens = None if content is None else content.sequences[choice]
        self._all.add(candidate, tokens)
        if content is None:
            return
        calls = content.call_ids(choice)
        self._by_calls[calls].add(candidate, tokens)
        for call_id in calls:
            self._with_call[call_id].add(calls)

    def take_new_turn_ids(self) -> list[str]:
        """Return the ids of the turns that were added since the last call of this method."""
        turn_ids, self._new_turn_ids = self._new_turn_ids, []
        return turn_ids

    def best(self, content: TurnContent | None, continued: _Continued) -> Reply | None:
        """Return the answer that a turn with this content continues, or None if there is none.

        Args:
            content: content of the turn, as far as it is known.
            continued: number of turns that already continue each answer.
        """
        if content is None:
            candidates = [self._all.first(continued)]
        else:
            prefixes = [replies.prefixes(content.prompt) for replies in self._with_most_calls(content)]
            longest = max(length for length, _ in prefixes)
            candidates = [_first(heap, continued) for length, heap in prefixes if length == longest]
        best = min(filter(None, candidates), default=None)
        return None if best is None else (best[-1], best[-2])

    def _with_most_calls(self, content: TurnContent) -> Iterable[_Replies]:
        """Return the answers whose conversations share the most tool calls with `content`."""
        shared = Counter(
            calls for call_id in content.echoed_words(self._with_call) for calls in self._with_call[call_id]
        )
        most = max(shared.values(), default=0)
        return [self._by_calls[calls] for calls, count in shared.items() if count == most] or [self._all]


_COMPARED_MAX = 64
"""Number of the latest answers to a request that a message is compared with, if no index finds its answer."""


class RequestReplies:
    """Answers to equal requests, of which a later message may be another form.

    An answer is added once, and a message is compared with a bounded number of answers, because a session may have
    thousands of equal requests.
    """

    def __init__(self) -> None:
        self._all = EqualReplies()
        self._by_text: dict[str, EqualReplies] = defaultdict(EqualReplies)
        """Answers by their text."""
        self._latest: deque[tuple[Reply, Label, TurnContent]] = deque(maxlen=_COMPARED_MAX)
        self._contents: dict[str, TurnContent] = {}
        self._new_turn_ids: list[str] = []

    def add(self, turn: TurnFacts, choice: int, label: Label, content: TurnContent | None) -> None:
        """Add an answer, with the label of the run to which its turn belongs."""
        self._new_turn_ids.append(turn.turn_id)
        if content is None:
            return
        self._all.add(turn, choice, label, content)
        self._by_text[content.answers[choice].text.strip()].add(turn, choice, label, content)
        self._latest.append(((turn, choice), label, content))
        self._contents[turn.turn_id] = content

    def take_new_turn_ids(self) -> list[str]:
        """Return the ids of the turns that were added since the last call of this method."""
        turn_ids, self._new_turn_ids = self._new_turn_ids, []
        return turn_ids

    def best(self, content: TurnContent, position: int, continued: _Continued) -> Reply | None:
        """Return the best of the answers of which the message at `position` may be another form, or None.

        The best of all answers is taken if it is one of them, then the best with the same text, then the best of the
        latest ones.
        """
        text = content.messages[position].text.strip()
        for replies in (self._all, self._by_text.get(text)):
            reply = None if replies is None or not replies.labels else replies.best(content, continued)
            if reply is not None and content.rewrites(self._contents[reply[0].turn_id], reply[1], position):
                return reply
        rewritten = EqualReplies()
        for (parent, choice), label, parent_content in self._latest:
            if content.rewrites(parent_content, choice, position):
                rewritten.add(parent, choice, label, parent_content)
        return rewritten.best(content, continued) if rewritten.labels else None


class _Replies:
    """Answers in the order in which they are preferred, all together and by their tokens."""

    def __init__(self) -> None:
        self._heap: list[_Candidate] = []
        self._by_tokens: dict[bytes, list[_Candidate]] = {}
        self._sequences: list[bytes] = []
        """Keys of `_by_tokens`, sorted."""

    def add(self, candidate: _Candidate, tokens: bytes | None) -> None:
        heappush(self._heap, candidate)
        if not tokens:
            return
        if tokens not in self._by_tokens:
            insort(self._sequences, tokens)
        heappush(self._by_tokens.setdefault(tokens, []), candidate)

    def first(self, continued: _Continued) -> _Candidate | None:
        """Return the preferred one of all answers."""
        return _first(self._heap, continued)

    def prefixes(self, prompt: bytes) -> tuple[int, list[_Candidate]]:
        """Return the answers whose tokens are the longest beginning of `prompt`, with the length of these tokens.

        If the tokens of none are, the length is 0, and all answers are returned.
        """
        for sequence in self._before(prompt):
            if prompt.startswith(sequence):
                return len(sequence), self._by_tokens[sequence]
        return 0, self._heap

    def _before(self, prompt: bytes) -> Iterator[bytes]:
        """Yield sequences, one of which is the longest that `prompt` begins with, if it begins with any.

        Such a sequence is also a beginning of each sequence between it and `prompt` in the order of bytes.
        """
        while at := bisect_right(self._sequences, prompt):
            sequence = self._sequences[at - 1]
            yield sequence
            prompt = prompt[: _shared_length(prompt, sequence)]


def _first(heap: list[_Candidate], continued: _Continued) -> _Candidate | None:
    """Return the preferred answer of a heap, whose entries may have old counts."""
    while heap and (count := continued[heap[0][3], heap[0][4]]) > heap[0][1]:
        heapreplace(heap, (heap[0][0], count, *heap[0][2:]))
    return heap[0] if heap else None


def _shared_length(one: bytes, other: bytes) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
