"""Prompts of the turns of a session, with each token and message stored once, and the turns that extend an earlier
turn.

Token sequences are paths of a radix tree, so turns that extend each other share their beginning, and a sequence is a
prefix of another if its vertex is an ancestor of the other's. A turn that extends another begins at that turn's vertex;
a whole turn begins at the root. So the work is proportional to the content of the turns.

An open turn extends only open turns, whose content is stored at least as long. A turn that extends a closed turn is
stored with its whole prompt when it arrives. When a turn is closed, the open turns that extend it are stored with their
whole prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import facts, store
from headrace_collector.facts import NOTHING_SHARED, SharedHistory
from headrace_collector.schema import turns
from headrace_schemas import Message, Tool, Turn
from headrace_schemas.events.turn import TurnReference
from headrace_schemas.rules.turn_history import shared_bytes, token_bytes, token_ids_of, unresolved

_ID_BYTES = 4
_BASE = [
    turns.c.turn_id,
    turns.c.extends,
    turns.c.shared_messages,
    turns.c.prefixes,
    turns.c.replies,
    turns.c.tokens,
    turns.c.closed_ms,
]


class Vertex:
    """Vertex of the radix tree: the end of a token sequence. `label` has the bytes between `parent` and this vertex."""

    __slots__ = ("_state", "children", "label", "length_bytes", "parent")

    def __init__(self, parent: Vertex | None = None, label: bytes = b"") -> None:
        self.parent = parent
        self.label = label
        self.length_bytes: int = (parent.length_bytes if parent else 0) + len(label)
        self.children: dict[bytes, Vertex] = {}
        self._state: Any = None
        """SHA-256 of the sequence, once it was needed."""

    @property
    def length(self) -> int:
        """Number of tokens of the sequence that ends at this vertex."""
        return self.length_bytes // _ID_BYTES

    def ancestors(self) -> Iterator[Vertex]:
        """Yield this vertex and its ancestors. Their sequences are prefixes of this one."""
        vertex: Vertex | None = self
        while vertex is not None:
            yield vertex
            vertex = vertex.parent

    def sequence(self) -> bytes:
        """Return the whole token sequence that ends at this vertex, as int32 bytes."""
        return b"".join([vertex.label for vertex in self.ancestors()][::-1])

    def insert(self, ids: bytes) -> Vertex:
        """Return the vertex of this sequence extended by `ids`, and add it if the tree does not have it."""
        vertex, position = self, 0
        while position < len(ids):
            child = vertex.children.get(ids[position : position + _ID_BYTES])
            if child is None:
                child = vertex.children[ids[position : position + _ID_BYTES]] = Vertex(vertex, ids[position:])
                return child
            shared = shared_bytes(ids, position, child.label, _ID_BYTES)
            position += shared
            vertex = child if shared == len(child.label) else child._split(shared)
        return vertex

    def prefix(self, length: int) -> Vertex:
        """Return the vertex of the sequence's first `length` tokens, and add it if the tree does not have it."""
        length_bytes = length * _ID_BYTES
        vertex = self
        while vertex.parent is not None and vertex.parent.length_bytes >= length_bytes:
            vertex = vertex.parent
        if vertex.parent is None or vertex.length_bytes == length_bytes:
            return vertex
        return vertex._split(length_bytes - vertex.parent.length_bytes)

    def digest(self) -> str:
        """Return the SHA-256 of the sequence in hexadecimal.

        Only bytes below the last vertex with a known state are read.
        """
        path = []
        for vertex in self.ancestors():
            if vertex._state is not None:
                break
            path.append(vertex)
        state = path[-1].parent._state if path and path[-1].parent else None
        for vertex in reversed(path):
            state = state.copy() if state is not None else hashlib.sha256()
            state.update(vertex.label)
            vertex._state = state
        return str(self._state.hexdigest())

    def _split(self, at: int) -> Vertex:
        """Insert a vertex above this one after the first `at` bytes of its label, and return it."""
        assert self.parent is not None
        above = Vertex(self.parent, self.label[:at])
        self.parent.children[above.label[:_ID_BYTES]] = above
        self.parent, self.label = above, self.label[at:]
        above.children[self.label[:_ID_BYTES]] = self
        return above


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A turn with the vertices of its prompt and of each choice."""

    turn: Turn
    base: _Prompt | None
    vertex: Vertex
    answers: tuple[Vertex, ...]
    tools: tuple[Tool, ...]


class Prompts:
    """Prompts of turns in a radix tree. A turn may extend an earlier one and contain only the rest of its prompt.

    `unresolved` maps the id of each turn whose prompt cannot be built to the reason.
    """

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._root = Vertex()
        self._prompts: dict[str, _Prompt] = {}
        self.unresolved: dict[str, str] = {}
        waiting = list(turns)
        while waiting:
            ids = {turn.turn_id for turn in waiting}
            later = [turn for turn in waiting if not self._add(turn, ids)]
            if len(later) == len(waiting):
                self.unresolved |= {turn.turn_id: "the turns refer to each other in a circle" for turn in later}
                break
            waiting = later

    def add(self, turn: Turn) -> None:
        """Add a turn. The turn that it extends, if any, must have been added before."""
        self._add(turn, set())

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._prompts

    @property
    def size_bytes(self) -> int:
        """Approximate size in bytes of the tokens of all turns."""
        return sum(_ID_BYTES * len(prompt.turn.prompt_token_ids) for prompt in self._prompts.values())

    def prompt(self, turn_id: str) -> Vertex:
        """Return the vertex at which a turn's prompt ends."""
        return self._prompts[turn_id].vertex

    def answers(self, turn_id: str) -> tuple[Vertex, ...]:
        """Return the vertices at which the answers of a turn end, in the order of its choices."""
        return self._prompts[turn_id].answers

    def tools(self, turn_id: str) -> tuple[Tool, ...]:
        """Return the definitions of the tools that the model could call in a turn."""
        return self._prompts[turn_id].tools

    def messages(self, turn_id: str) -> tuple[Message, ...]:
        """Return all messages of a turn's prompt."""
        prompt: _Prompt | None = self._prompts[turn_id]
        assert prompt is not None
        count, choice, parts = prompt.turn.message_count, 0, []
        while prompt is not None and count:
            turn, reference = prompt.turn, prompt.turn.extends
            shared = reference.messages if reference else 0
            if count > shared:
                answer = (turn.choices[choice].message,) if count > turn.message_count else ()
                parts.append((*turn.messages, *answer)[: count - shared])
            if reference is not None:
                count, choice = min(count, shared), reference.choice
            prompt = prompt.base
        return tuple(message for part in reversed(parts) for message in part)

    def whole_turn(self, turn_id: str) -> Turn:
        """Return the event of a turn with its whole prompt, even if it extends another turn."""
        prompt = self._prompts[turn_id]
        if prompt.turn.extends is None:
            return prompt.turn
        changes = {
            "extends": None,
            "messages": self.messages(turn_id),
            "prompt_token_ids": token_ids_of(prompt.vertex.sequence()),
            "tools": prompt.tools,
        }
        return prompt.turn.model_copy(update=changes)

    def _add(self, turn: Turn, waiting: set[str]) -> bool:
        """Add a turn and return True, or return False if it extends one of the `waiting` turns, which are not added
        yet.
        """
        reference = turn.extends
        base = None if reference is None else self._prompts.get(reference.turn_id)
        start = self._root
        if reference is not None:
            if base is None and reference.turn_id in waiting and reference.turn_id not in self.unresolved:
                return False
            problem = "the turn that it extends is not known" if base is None else _reference_problem(base, reference)
            if base is None or problem is not None:
                self.unresolved[turn.turn_id] = problem or ""
                return True
            start = _end(base, reference).prefix(reference.tokens)
        vertex = start.insert(token_bytes(turn.prompt_token_ids))
        answers = tuple(vertex.insert(token_bytes(choice.token_ids)) for choice in turn.choices)
        tools = base.tools if base is not None and reference is not None and reference.tools else turn.tools
        self._prompts[turn.turn_id] = _Prompt(turn, base, vertex, answers, tools)
        return True


def _end(base: _Prompt, reference: TurnReference) -> Vertex:
    return base.answers[reference.choice]


def _reference_problem(base: _Prompt, reference: TurnReference) -> str | None:
    """Return why a turn cannot extend the turn `base` as its reference demands, or None if it can."""
    if reference.choice >= len(base.answers):
        return f"turn {reference.turn_id} has no choice {reference.choice}"
    end = _end(base, reference)
    if reference.messages > base.turn.message_count + 1:
        return f"turn {reference.turn_id} has fewer than {reference.messages} messages"
    if reference.tokens > end.length or end.prefix(reference.tokens).digest() != reference.digest:
        return f"turn {reference.turn_id} does not have the {reference.tokens} shared token ids"
    return None


async def resolve(tx: AsyncConnection, turn: Turn) -> tuple[Turn, SharedHistory]:
    """Resolve a turn's reference to the turn that it extends.

    Returns:
        The turn as it is to be stored, and the history that it shares with the extended turn.

    Raises:
        InvalidEvent: `unresolved_turn`: the session has no such turn, or the turn lacks the referenced choice, messages
            or tokens.
    """
    reference = turn.extends
    if reference is None:
        return turn, NOTHING_SHARED
    base = await _base(tx, turn, reference.turn_id)
    if base is None:
        raise unresolved(turn, "is not a turn of this session that was captured before")
    messages = base["shared_messages"] + len(facts.split_digests(base["prefixes"]))
    replies = facts.split_digests(base["replies"])
    if reference.choice >= len(replies):
        raise unresolved(turn, f"has no choice {reference.choice}")
    if reference.messages > messages + 1 or reference.tokens > base["tokens"]:
        raise unresolved(turn, f"has only {messages} messages and {base['tokens']} tokens")
    if base["closed_ms"] is not None:
        return await _whole_turn(tx, turn), NOTHING_SHARED
    answer = replies[reference.choice] if reference.messages > messages else None
    shared = min(reference.messages, messages)
    continues = reference.tokens == base["tokens"] and await _mark_continued(tx, reference.turn_id)
    return turn, SharedHistory(shared, await _digest(tx, turn, base, shared), answer, continues)


async def detach_open_turns(tx: AsyncConnection, session_key: str) -> None:
    """Store open turns of a session that extend a closed turn with their whole prompts.

    Turns whose prompt cannot be restored are not changed.
    """
    closed = turns.alias()
    query = (
        select(turns.c.turn_id)
        .join(closed, closed.c.turn_id == turns.c.extends)
        .where(turns.c.session_key == session_key, turns.c.closed_ms.is_(None), closed.c.closed_ms.is_not(None))
    )
    names = (await tx.execute(query)).scalars().all()
    events, prompts = await store.load_turns(tx, names)
    for event in events:
        if event.turn_id in prompts:
            turn = prompts.whole_turn(event.turn_id)
            values = {
                "payload": turn.to_json(),
                "extends": None,
                "shared_messages": 0,
                "prefixes": facts.join_digests(facts.prefix_digests(turn.messages)),
                "added_tokens": turn.usage.prompt_tokens + turn.usage.completion_tokens,
            }
            await tx.execute(update(turns).where(turns.c.turn_id == event.turn_id).values(values))


async def _base(tx: AsyncConnection, turn: Turn, turn_id: str) -> RowMapping | None:
    query = select(*_BASE).where(turns.c.turn_id == turn_id, turns.c.session_key == turn.session_key)
    return (await tx.execute(query)).mappings().one_or_none()


async def _mark_continued(tx: AsyncConnection, turn_id: str) -> bool:
    """Mark the answer of a turn as continued. Return whether this is the first time."""
    first = update(turns).where(turns.c.turn_id == turn_id, turns.c.continued.is_(False)).values(continued=True)
    return bool((await tx.execute(first)).rowcount)


async def _digest(tx: AsyncConnection, turn: Turn, base: RowMapping, count: int) -> bytes:
    """Return the digest of the conversation of the first `count` messages of the turn that `turn` extends."""
    while True:
        prefixes = facts.split_digests(base["prefixes"])[: max(0, count - base["shared_messages"])]
        digest = facts.conversation_digest(prefixes)
        if digest or base["extends"] is None:
            return digest
        earlier = await _base(tx, turn, base["extends"])
        if earlier is None:
            raise unresolved(turn, f"extends turn {base['extends']}, which is not stored")
        base, count = earlier, min(count, base["shared_messages"])


async def _whole_turn(tx: AsyncConnection, turn: Turn) -> Turn:
    """Return a turn that extends a closed turn, with its whole prompt."""
    assert turn.extends is not None
    _, prompts = await store.load_turns(tx, [turn.extends.turn_id])
    if turn.extends.turn_id not in prompts:
        raise unresolved(turn, "is closed, and its content is not stored any more")
    prompts.add(turn)
    if turn.turn_id in prompts.unresolved:
        raise unresolved(turn, prompts.unresolved[turn.turn_id])
    return prompts.whole_turn(turn.turn_id)
