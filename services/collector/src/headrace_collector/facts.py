"""Facts about a turn that determine its run, and the digests that show that it continues another turn.

Clients change the history that they send back: `content` null or empty, other spaces in tool arguments, added names,
missing reasoning and ids. So only role, text, and the functions and arguments of tool calls are compared. System
prompts are left out of conversations, because they may contain a clock or the state of a directory, which change with
each call.

Several conversations may be equal, and clients send some answers back in another form: with the stop string that the
engine cut, without spaces at the ends or without the reasoning, or with a tool call written as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b

from headrace_runtime.clock import epoch_ms
from headrace_schemas import Message, Turn
from headrace_schemas.rules.turn_history import token_bytes

_WORD = re.compile(r"[^\s\"'`,;=()\[\]{}<>\\]+")
SIZE = 8
"""Bytes of one digest. Digests must only distinguish the turns of one session."""

_SYSTEM_ROLES = ("system", "developer")
_IS_SYSTEM = 1
"""Bit of the first byte that only digests of system messages have set."""


def prefix_digests(messages: Iterable[Message], history: bytes = b"") -> tuple[bytes, ...]:
    """Return the digest of the conversation up to each message, the shortest first.

    A prefix that ends with a system message has the digest of this message alone, which no other prefix has.

    Args:
        history: the `conversation_digest` of the messages before `messages`.
    """
    digest = history
    digests = []
    for message in messages:
        if message.role in _SYSTEM_ROLES:
            digests.append(_system_digest(message))
        else:
            digest = _extend(digest, message)
            digests.append(digest)
    return tuple(digests)


def conversation_digest(prefixes: Sequence[bytes], history: bytes = b"") -> bytes:
    """Return the digest of a whole conversation, given its `prefix_digests`.

    It is the prefix digest of the last message that is no system message, or `history` if there is none.
    """
    return next((digest for digest in reversed(prefixes) if not digest[0] & _IS_SYSTEM), history)


def reply_digests(turn: Turn, history: bytes) -> tuple[bytes, ...]:
    """Return for each choice the digest of the turn's conversation followed by this choice's message.

    Args:
        history: the `conversation_digest` of the prompt.
    """
    return tuple(_extend(history, choice.message) for choice in turn.choices)


def join_digests(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + SIZE] for at in range(0, len(packed), SIZE))


def _system_digest(message: Message) -> bytes:
    digest = _extend(_SYSTEM_ROLES[0].encode(), message)
    return bytes([digest[0] | _IS_SYSTEM]) + digest[1:]


def _extend(history: bytes, message: Message) -> bytes:
    calls = [(call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()]
    content = json.dumps([message.role, message.text.strip(), calls], separators=(",", ":"))
    digest = blake2b(history + content.encode(), digest_size=SIZE).digest()
    return bytes([digest[0] & ~_IS_SYSTEM]) + digest[1:]


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # the model may write invalid JSON
        return text.strip()


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The tokens and messages of a turn, by which equal conversations are distinguished."""

    prompt: bytes
    """Token ids as int32, so that a prefix of a sequence is a prefix of its bytes."""
    sequences: tuple[bytes, ...]
    """For each choice, the token ids of the prompt and of the answer, as int32."""
    messages: tuple[Message, ...]
    answers: tuple[Message, ...]
    """The message of each choice."""

    @classmethod
    def of(cls, turn: Turn) -> TurnContent:
        prompt = token_bytes(turn.prompt_token_ids)
        sequences = tuple(prompt + token_bytes(choice.token_ids) for choice in turn.choices)
        return cls(prompt, sequences, turn.messages, tuple(choice.message for choice in turn.choices))

    def call_ids(self, choice: int) -> frozenset[str]:
        """Return the ids of the tool calls of the conversation with the answer `choice`."""
        messages = *self.messages, self.answers[choice]
        return frozenset(call.id for message in messages for call in message.tool_calls or ())

    def shared_bytes(self, history: bytes) -> int:
        """Return the size in bytes of the tokens `history` if the prompt begins with them, otherwise 0."""
        return len(history) if self.prompt.startswith(history) else 0

    def echoed_words(self, words: Container[str]) -> set[str]:
        """Return those of `words` that are ids of tool calls in the answers in this conversation, or words of their
        texts, because some clients write tool calls as text.
        """
        answers = [message for message in self.messages if message.role == "assistant"]
        ids = {call.id for message in answers for call in message.tool_calls or () if call.id in words}
        return ids.union(word for message in answers for word in _WORD.findall(message.text) if word in words)

    def rewrites(self, parent: TurnContent, choice: int, position: int) -> bool:
        """Return whether the message at `position` is the parent's answer in another form.

        The messages before it must be the parent's prompt.
        """
        echo, answer = self.messages[position], parent.answers[choice]
        if echo.role != "assistant":
            return False
        if self.shared_bytes(parent.sequences[choice]) or _has_call(
            echo, [call.id for call in answer.tool_calls or ()]
        ):
            return True
        shorter, longer = sorted((echo.text.strip(), answer.text.strip()), key=len)
        return bool(shorter) and (longer.startswith(shorter) or longer.endswith(shorter))


Contents = Mapping[str, TurnContent]
"""The content of turns by their ids."""


def _has_call(message: Message, ids: Iterable[str]) -> bool:
    echoed_ids = {call.id for call in message.tool_calls or ()}
    return any(call_id in echoed_ids or call_id in message.text for call_id in ids)


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """Facts about one captured turn, from which the collector finds the run that the turn belongs to.

    `prefixes` are digests of the conversation up to each message, and `replies` those of the conversation with each
    answer. Times are in ms since 1970. A turn that extends another one (`base`) has only the digests of messages after
    the first `shared_messages`.
    """

    turn_id: str
    model: str
    explicit: bool
    """Whether the client named the session. Otherwise several runs with the same opening may share its key."""
    task_id: str | None
    run_id: str | None
    request_digest: str
    retry: int
    delivered: bool
    log_offset: int
    """Offset of the turn on `turns`, which orders turns independently of all clocks."""
    time_ms: int
    seen_ms: int
    """Time at which this service first processed the turn."""
    completions: int
    tokens: int
    """Number of tokens of the prompt and the longest completion."""
    prefixes: tuple[bytes, ...]
    replies: tuple[bytes, ...]
    side_call: str | None = None
    """The kind of a call beside the client's task, as in the turn."""
    agent: str | None = None
    """The sub-agent that made the call."""
    repeats: str | None = None
    """The earlier turn whose request the call repeats."""
    trajectory_id: str | None = None
    """Id of the trajectory that contains the turn; None while the turn's run is open."""
    extends: str | None = None
    """Id of the turn that this turn extends, or None."""
    shared_messages: int = 0
    sequences: int = 1
    """Number of completions of the turn that may begin a token sequence, because they continue no other completion."""
    added_tokens: int = 0
    """Number of tokens of the turn without those that it shares with the turn that it extends."""
    base: TurnFacts | None = field(default=None, compare=False, repr=False)
    """Facts about the turn that this turn extends, if they were read too."""
    opening: bytes = field(init=False, compare=False, repr=False)
    """Digest of the first message."""

    def __post_init__(self) -> None:
        inherited = self.base.opening if self.base is not None and self.shared_messages else self.prefixes[0]
        object.__setattr__(self, "opening", inherited)

    @property
    def messages(self) -> int:
        """Number of messages of the turn's prompt."""
        return self.shared_messages + len(self.prefixes)

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Sort key that puts a turn after every turn that it continues or repeats."""
        return (self.messages, self.retry, self.log_offset, self.turn_id)

    def newest_prefixes(self) -> Iterator[bytes]:
        """Yield the digests of the prefixes of the turn's conversation, the longest first."""
        turn: TurnFacts | None = self
        count = self.messages
        while turn is not None:
            yield from reversed(turn.prefixes[: max(0, count - turn.shared_messages)])
            count = min(count, turn.shared_messages)
            turn = turn.base


@dataclass(frozen=True, slots=True)
class SharedHistory:
    """Facts about the part of a turn's prompt that is stored with the turn that it extends."""

    messages: int = 0
    digest: bytes = b""
    """Digest of the conversation of these messages."""
    answer: bytes | None = None
    """Digest of the next message if it is the answer of the extended turn, which the event then does not contain."""
    continues: bool = False
    """Whether the turn is the first that continues that answer's tokens."""


NOTHING_SHARED = SharedHistory()


def turn_facts(turn: Turn, seen: datetime, log_offset: int, shared: SharedHistory = NOTHING_SHARED) -> TurnFacts:
    """Compute the facts about a turn.

    Args:
        seen: time at which this service first processed the turn.
        log_offset: offset of the turn on `turns`.
        shared: the part of its prompt that is stored with the turn that it extends.
    """
    answer = () if shared.answer is None else (shared.answer,)
    prefixes = answer + prefix_digests(turn.messages, shared.answer or shared.digest)
    return TurnFacts(
        turn_id=turn.turn_id,
        model=turn.model,
        explicit=turn.session_source != "implicit",
        task_id=turn.task_id,
        run_id=turn.run_id,
        request_digest=turn.request_digest,
        retry=turn.retry,
        delivered=turn.delivered,
        log_offset=log_offset,
        time_ms=epoch_ms(turn.time),
        seen_ms=epoch_ms(seen),
        completions=len(turn.choices),
        tokens=turn.usage.prompt_tokens + max(len(choice.token_ids) for choice in turn.choices),
        prefixes=prefixes,
        replies=reply_digests(turn, conversation_digest(prefixes, shared.digest)),
        side_call=turn.side_call,
        agent=turn.sub_agent.agent if turn.sub_agent else None,
        repeats=turn.repeats,
        extends=turn.extends.turn_id if turn.extends else None,
        shared_messages=shared.messages,
        sequences=len(turn.choices) - shared.continues,
        added_tokens=len(turn.prompt_token_ids) + turn.usage.completion_tokens,
    )
