"""Memory of the latest captured turns of each session.

It serves two purposes. An event of a later turn can refer to an earlier turn that it extends, and a replica that did
not answer the earlier turns can continue their exact tokens.

A session of many calls repeats its history in each of them. So `reference` names an earlier turn with the beginning of
the prompt, and the event contains the rest (`Turn.extends`). A chain of such turns begins again with a complete turn
once it has as many bytes as the complete turn, like key frames of video codecs. So a reader resolves a turn from at
most about twice the bytes of the complete turn, and a session has at most about twice the bytes that its turns add.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from headrace_gateway.requests.chat_call import ChatCall
from headrace_gateway.requests.chat_messages import message_json
from headrace_gateway.requests.identity import CallIdentity
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import Replica, Tool, Turn, UnitAssignment
from headrace_schemas.events.turn import TurnReference
from headrace_schemas.http.replica_api import History
from headrace_schemas.rules.turn_history import shared_bytes, token_bytes, token_ids_of

ReplicaProcess = tuple[str, datetime]
"""Process of a replica: its id, and the time of its start."""

_ID_BYTES = 4
_DIGEST_BYTES = 16
_SHARED_TOKENS_MIN = 64
"""Tokens that a turn must share with an earlier turn to be stored as a reference to it."""
_LINE_BYTES_MIN = 65_536
"""Bytes that a chain of references may add in any case before the next complete turn."""
_TURNS_PER_SESSION = 4
"""Number of remembered turns per session. Several conversations of one session may alternate."""
_EVENT_BYTES = 1024
_PROMPT_TOKEN_BYTES = 6
_SAMPLED_TOKEN_BYTES = 18
"""Estimated bytes of a turn event without its messages: its other fields, one id of its prompt, one sampled token."""


@dataclass(frozen=True, slots=True)
class CapturedTurn:
    """Parts of a captured turn that a later turn of the session may refer to."""

    turn_id: str
    version: str
    replica: ReplicaProcess | None
    """Process of the replica that answered."""
    assignment: UnitAssignment | None
    tools: tuple[Tool, ...]
    prompt: bytes
    """Prompt ids as int32 bytes."""
    answers: tuple[bytes, ...]
    messages: bytes
    """Digests of the conversation up to each message of the prompt (`message_digests`)."""
    replies: tuple[bytes, ...]
    """For each choice, the digest of the conversation that ends with the choice."""
    request_bytes: int
    event_bytes: int
    """Estimated bytes of this turn's event."""
    whole_bytes: int
    """Estimated bytes of the complete turn at the beginning of the chain of references."""
    line_bytes: int = 0
    """Estimated bytes of the turns of the chain after the complete turn."""

    @property
    def size_bytes(self) -> int:
        return len(self.prompt) + len(self.messages) + sum(map(len, self.answers)) + 1024


class CapturedTurns:
    """Memory of captured turns of at most `bytes_max` bytes. With 0 nothing is remembered, and every turn is stored
    complete. Thread-safe."""

    def __init__(self, bytes_max: int, *, recalls: bool = False) -> None:
        """Create the memory. With `recalls`, turns of earlier processes are also added (`recall`), until `end_recall`
        is called."""
        self.remembers = bytes_max > 0
        """Whether any turn is remembered."""
        self._is_recalling = recalls
        self._own: set[str] = set()
        """Keys of sessions with turns that were captured since the start, while turns of the bus are read."""
        self._sessions: TenantMemory[str, tuple[CapturedTurn, ...]] = TenantMemory(bytes_max)
        self._lock = threading.Lock()

    def of_session(self, identity: CallIdentity) -> tuple[CapturedTurn, ...]:
        """Return the remembered turns of a session, the newest first."""
        with self._lock:
            return self._sessions.get(identity.tenant, identity.session_key) or ()

    def add(self, identity: CallIdentity, turn: CapturedTurn) -> None:
        """Remember a turn that was stored durably, and drop earlier turns that its prompt contains completely."""
        with self._lock:
            if self._is_recalling:
                self._own.add(identity.session_key)
            self._add(identity, turn)

    def recall(self, identity: CallIdentity, turn: CapturedTurn) -> None:
        """Remember a turn of an earlier process, which was read from the bus. It is ignored if this process has
        captured turns of the same session, because these are newer."""
        with self._lock:
            if identity.session_key not in self._own:
                self._add(identity, turn)

    def end_recall(self) -> None:
        """Stop accepting turns of earlier processes, because all of them have been read."""
        with self._lock:
            self._is_recalling = False
            self._own.clear()

    def _add(self, identity: CallIdentity, turn: CapturedTurn) -> None:
        earlier = self._sessions.get(identity.tenant, identity.session_key) or ()
        others = (other for other in earlier if other.turn_id != turn.turn_id and not _continues(turn, other))
        turns = (turn, *others)[:_TURNS_PER_SESSION]
        size_bytes = sum(turn.size_bytes for turn in turns)
        self._sessions.set(identity.tenant, identity.session_key, turns, size_bytes)


def find_reference(
    call: ChatCall, prompt: bytes, assignment: UnitAssignment | None, earlier: Sequence[CapturedTurn]
) -> tuple[TurnReference, CapturedTurn] | None:
    """Choose the earlier turn that shares the most tokens with a prompt. Return a reference to it and the turn, or None
    if no turn shares enough tokens.

    Turns of another rollout arm are not used, because the registry stores the turns of one arm only.
    """
    best: tuple[int, int, CapturedTurn] | None = None
    for turn in earlier:
        if turn.assignment == assignment and turn.line_bytes <= max(turn.whole_bytes, _LINE_BYTES_MIN):
            for choice, answer in enumerate(turn.answers):
                shared = _shared_tokens(prompt, turn.prompt, answer)
                if shared >= _SHARED_TOKENS_MIN and (best is None or shared > best[0]):
                    best = shared, choice, turn
    if best is None:
        return None
    tokens, choice, turn = best
    named = TurnReference(
        turn_id=turn.turn_id,
        choice=choice,
        tokens=tokens,
        messages=min(_shared_messages(call.message_digests, turn, choice), len(call.messages) - 1),
        tools=bool(turn.tools) and tuple(call.request.tools or ()) == turn.tools,
        digest=hashlib.sha256(memoryview(prompt)[: tokens * _ID_BYTES]).hexdigest(),
    )
    return named, turn


def find_unseen_answer(
    call: ChatCall, version: str, replica: Replica, earlier: Sequence[CapturedTurn]
) -> tuple[CapturedTurn, int] | None:
    """Return the earlier answer that `call` continues if the replica must get its exact tokens from the gateway, else
    None.

    A replica needs no tokens of an answer that its present process has sampled.

    Args:
        call: the new call.
        version: version that will answer. Only its turns count, because other versions may have other tokenizers.
        replica: replica that will answer.
        earlier: remembered turns of the session.

    Returns:
        The turn, and the number of the answer (choice) among its answers.
    """
    continued = [
        (turn, choice)
        for turn in (earlier if replica.histories else ())
        if turn.version == version and (choice := _continued_choice(call, turn)) is not None and turn.answers[choice]
    ]
    newest = max(continued, key=lambda pair: len(pair[0].messages), default=None)
    life = (replica.replica_id, replica.started_at)
    is_known = newest is not None and newest[0].replica == life and call.request.functions is None
    return None if is_known else newest


def history_of(turn: CapturedTurn, choice: int) -> History:
    """Convert the prompt and one answer of a turn to exact token ids, for a replica that has not sampled the answer."""
    return History(
        messages=len(turn.messages) // _DIGEST_BYTES,
        prompt_token_ids=token_ids_of(turn.prompt),
        token_ids=token_ids_of(turn.answers[choice]),
    )


def _continued_choice(call: ChatCall, turn: CapturedTurn) -> int | None:
    """Return the index of the choice of an earlier turn that `call` continues, or None. The only answer of a turn
    counts even if the client changed it."""
    shared = len(turn.messages)
    if not call.message_digests.startswith(turn.messages) or len(call.message_digests) == shared:
        return None
    answer = call.message_digests[shared : shared + _DIGEST_BYTES]
    if answer in turn.replies:
        return turn.replies.index(answer)
    is_answer = call.messages[shared // _DIGEST_BYTES].role == "assistant"
    return 0 if is_answer and len(turn.answers) == 1 else None


def build_captured_turn(
    call: ChatCall, event: Turn, prompt: bytes, extended: CapturedTurn | None, replica: ReplicaProcess | None = None
) -> CapturedTurn:
    """Return the parts of a captured turn that later turns may refer to.

    Args:
        call: The finished call.
        event: The turn event of the call.
        prompt: The prompt ids as int32 bytes.
        extended: The earlier turn that the event refers to, or None.
        replica: The replica that answered.
    """
    request_bytes = len(call.core) - (extended.request_bytes if extended else 0)
    tokens = len(event.prompt_token_ids) * _PROMPT_TOKEN_BYTES + event.usage.completion_tokens * _SAMPLED_TOKEN_BYTES
    event_bytes = _EVENT_BYTES + max(0, request_bytes) + tokens
    last = call.message_digests[-_DIGEST_BYTES:]
    return CapturedTurn(
        turn_id=event.turn_id,
        version=event.version,
        replica=replica,
        assignment=event.assignment,
        tools=tuple(call.request.tools or ()),
        prompt=prompt,
        answers=tuple(token_bytes(choice.token_ids) for choice in event.choices),
        messages=call.message_digests,
        replies=tuple(_extended_digest(last, message_json(choice.message)) for choice in event.choices),
        request_bytes=len(call.core),
        event_bytes=event_bytes,
        whole_bytes=extended.whole_bytes if extended else event_bytes,
        line_bytes=extended.line_bytes + event_bytes if extended else 0,
    )


def read_turn(turn: Turn) -> CapturedTurn:
    """Return the parts of `turn` that later turns of its session may refer to, for example its tokens and tools.

    `turn` is an event read from the bus, and complete: it refers to no earlier turn.
    """
    encoded = [message_json(message) for message in turn.messages]
    digests = message_digests(encoded)
    last = digests[-_DIGEST_BYTES:]
    request_bytes = sum(map(len, encoded))
    tokens = turn.usage.prompt_tokens * _PROMPT_TOKEN_BYTES + turn.usage.completion_tokens * _SAMPLED_TOKEN_BYTES
    event_bytes = _EVENT_BYTES + request_bytes + tokens
    return CapturedTurn(
        turn_id=turn.turn_id,
        version=turn.version,
        replica=None,
        assignment=turn.assignment,
        tools=turn.tools,
        prompt=token_bytes(turn.prompt_token_ids),
        answers=tuple(token_bytes(choice.token_ids) for choice in turn.choices),
        messages=digests,
        replies=tuple(_extended_digest(last, message_json(choice.message)) for choice in turn.choices),
        request_bytes=request_bytes,
        event_bytes=event_bytes,
        whole_bytes=event_bytes,
    )


def message_digests(messages: Sequence[bytes]) -> bytes:
    """Return the concatenated digests of a conversation, one for each message: the digest of all messages up to and
    including it. Equal digests mean equal beginnings of two conversations."""
    digests = []
    digest = b""
    for message in messages:
        digest = _extended_digest(digest, message)
        digests.append(digest)
    return b"".join(digests)


def _extended_digest(digest: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(digest + message, digest_size=_DIGEST_BYTES).digest()


def _continues(turn: CapturedTurn, other: CapturedTurn) -> bool:
    """Return whether the prompt of `turn` begins with the prompt and the only answer of `other`."""
    return len(other.answers) == 1 and turn.prompt.startswith(other.prompt + other.answers[0])


def _shared_tokens(prompt: bytes, earlier_prompt: bytes, answer: bytes) -> int:
    shared = shared_bytes(prompt, 0, earlier_prompt, _ID_BYTES)
    if shared == len(earlier_prompt):
        shared += shared_bytes(prompt, shared, answer, _ID_BYTES)
    return shared // _ID_BYTES


def _shared_messages(digests: bytes, turn: CapturedTurn, choice: int) -> int:
    shared = shared_bytes(digests, 0, turn.messages, _DIGEST_BYTES)
    if shared == len(turn.messages) and digests[shared : shared + _DIGEST_BYTES] == turn.replies[choice]:
        shared += _DIGEST_BYTES
    return shared // _DIGEST_BYTES
