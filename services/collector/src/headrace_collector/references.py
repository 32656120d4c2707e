"""Turns that extend an earlier turn: the history that they share, and when they are stored with the whole prompt.

An open turn extends only open turns, whose content is stored at least as long. A turn that extends a closed turn is
stored with its whole prompt when it arrives. When a turn is closed, the open turns that extend it are stored with their
whole prompts.
"""

from __future__ import annotations

from sqlalchemy import RowMapping, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_collector import facts, store
from headrace_collector.facts import NOTHING_SHARED, SharedHistory
from headrace_collector.schema import turns
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import unresolved

_BASE = [
    turns.c.turn_id,
    turns.c.extends,
    turns.c.shared_messages,
    turns.c.prefixes,
    turns.c.replies,
    turns.c.tokens,
    turns.c.closed_ms,
]


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
