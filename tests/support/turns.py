"""Turns and trajectories of an agent, with a chat template of one token per character.

`ask` renders the messages, so that the history of a conversation is an exact token prefix of its continuation as long
as answers are sent back unchanged. Trajectories have the form that the collector produces.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any

from headrace_schemas import (
    Branch,
    Choice,
    DeadLetter,
    Dialogue,
    Event,
    Experience,
    Feedback,
    LeftOut,
    Message,
    RestoredOutcome,
    RevertedOutcome,
    Sampling,
    SessionEnd,
    Span,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
    Usage,
)
from headrace_schemas.events.turn import TurnReference
from headrace_schemas.rules.turn_history import token_digest
from headrace_schemas.values import ids
from headrace_schemas.values.ids import derived_id

START = datetime(2026, 1, 1, tzinfo=UTC)
"""Time of the first event."""
ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
EOS = 5
VERSION = "m@0123456789ab"
_count = itertools.count(1)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id="c")


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def text_ids(text: str) -> list[int]:
    return [10 + ord(letter) for letter in text]


def render(messages: Sequence[Message]) -> tuple[int, ...]:
    """Return the prompt: each message with its role before and a stop token after it, then the role of the answer."""
    tokens = [token for message in messages for token in (ROLES[message.role], *text_ids(message.text), EOS)]
    return (*tokens, ROLES["assistant"])


def ask(
    messages: Sequence[Message],
    *replies: str,
    session: str = "s",
    tenant: str = "default",
    at: float = 0.0,
    stop: bool = True,
    **fields: Any,
) -> Turn:
    """Return a turn that starts `at` seconds after `START` and takes a second. Several replies are several choices.

    Without `stop` the answer was cut off before its stop token.
    """
    key = ids.session_key(tenant, session)
    prompt = fields.pop("prompt_token_ids", None) or render(messages)
    choices = tuple(_choice(index, text, stop) for index, text in enumerate(replies or ("ok",)))
    digest = sha256(repr([message.model_dump() for message in messages]).encode()).hexdigest()
    defaults = {
        "time": START + timedelta(seconds=at + 1),
        "turn_id": ids.response_id(key, uuid.UUID(int=next(_count))),
        "session_key": key,
        "session_id": session,
        "session_source": "header",
        "tenant": tenant,
        "model": "m",
        "version": VERSION,
        "replica_id": "r",
        "request_digest": digest,
        "messages": tuple(messages),
        "sampling": Sampling(),
        "prompt_token_ids": prompt,
        "choices": choices,
        "usage": Usage(prompt_tokens=len(prompt), completion_tokens=sum(len(choice.token_ids) for choice in choices)),
        "started_at": START + timedelta(seconds=at),
    }
    return Turn.model_validate({**defaults, **fields})


def _choice(index: int, text: str, stop: bool) -> Choice:
    tokens = text_ids(text) + [EOS] * stop
    logprobs = tuple(-0.125 * (1 + at % 7) for at in range(len(tokens)))
    return Choice(
        index=index,
        token_ids=tuple(tokens),
        logprobs=logprobs,
        finish_reason="stop" if stop else "length",
        message=said(text),
    )


def after(turn: Turn, *messages: Message, choice: int = 0) -> list[Message]:
    """Return a client's next messages: the conversation, the chosen answer, and the new messages."""
    return [*turn.messages, turn.choices[choice].message, *messages]


def extending(turn: Turn, earlier: Turn, choice: int = 0, *, tokens: int | None = None) -> Turn:
    """Return `turn` in the stored form that refers to the prefix of `earlier`, which must be complete.

    The prefix is the longest common one, or `tokens` tokens.
    """
    history = earlier.prompt_token_ids + earlier.choices[choice].token_ids
    shared = _shared_length(history, turn.prompt_token_ids) if tokens is None else tokens
    messages = _shared_length((*earlier.messages, earlier.choices[choice].message), turn.messages[:-1])
    same_tools = turn.tools == earlier.tools
    reference = TurnReference(
        turn_id=earlier.turn_id,
        choice=choice,
        tokens=shared,
        messages=messages,
        tools=same_tools,
        digest=token_digest(history[:shared]),
    )
    fields = dict(turn) | {
        "extends": reference,
        "messages": turn.messages[messages:],
        "prompt_token_ids": turn.prompt_token_ids[shared:],
        "tools": () if same_tools else turn.tools,
    }
    return Turn.model_validate(fields)


def _shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(first), len(second)))


def feedback(
    session: str = "s",
    *turns: Turn,
    value: float | None = 1.0,
    tenant: str = "default",
    at: float = 50.0,
    **fields: Any,
) -> Feedback:
    """Return feedback that lists `turns`, or that is about the session if there are none."""
    defaults = {
        "time": START + timedelta(seconds=at),
        "feedback_id": f"f{next(_count)}",
        "session_key": ids.session_key(tenant, session),
        "tenant": tenant,
        "value": value,
        "msg_ids": tuple(turn.turn_id for turn in turns),
    }
    return Feedback.model_validate({**defaults, **fields})


def end(session: str = "s", *, tenant: str = "default", at: float = 50.0) -> SessionEnd:
    return SessionEnd(
        time=START + timedelta(seconds=at),
        end_id=f"e{next(_count)}",
        session_key=ids.session_key(tenant, session),
        session_id=session,
        tenant=tenant,
    )


def commit(partition: int = 0, *, tenant: str = "default", before: float | None = None) -> SessionEnd:
    return SessionEnd(
        time=START + timedelta(seconds=60),
        end_id=f"e{next(_count)}",
        scope="tenant",
        tenant=tenant,
        reason="commit",
        partition=partition,
        before=None if before is None else START + timedelta(seconds=before),
    )


def branch(turn: Turn) -> Branch:
    """Return a branch with one turn's prompt and first answer."""
    choice = turn.choices[0]
    span = Span(start=len(turn.prompt_token_ids), logprobs=choice.logprobs, turn_id=turn.turn_id, version=turn.version)
    return Branch(token_ids=turn.prompt_token_ids + choice.token_ids, spans=(span,))


def closed(*turns: Turn, session: str = "s", at: float = 10.0, **fields: Any) -> Trajectory:
    """Return a trajectory that was closed `at` seconds after `START`, with a branch for each turn."""
    run_turns = turns or (ask([user("q")], session=session),)
    first = run_turns[0]
    defaults = {
        "time": START + timedelta(seconds=at),
        "trajectory_id": derived_id("trajectory", first.session_key, first.turn_id),
        "session_key": first.session_key,
        "session_id": first.session_id,
        "tenant": first.tenant,
        "model": first.model,
        "branches": tuple(branch(turn) for turn in run_turns),
        "dialogues": tuple(Dialogue(messages=(*turn.messages, turn.choices[0].message)) for turn in run_turns),
        "end_reason": "end_call",
        "started_at": first.started_at,
    }
    return Trajectory.model_validate({**defaults, **fields})


KEY = "abcdefghijklmnop"


def turn(turn_id: str, **more: Any) -> Turn:
    choice = Choice(
        index=0, token_ids=(3,), logprobs=(-0.5,), finish_reason="stop", message=Message(role="assistant", content="x")
    )
    fields = {
        "time": START, "turn_id": turn_id, "session_key": KEY, "session_id": "s", "session_source": "header",
        "model": "m", "version": VERSION, "replica_id": "r", "request_digest": "0" * 64,
        "messages": (Message(role="user", content="x"),), "sampling": Sampling(), "prompt_token_ids": (1, 2),
        "choices": (choice,), "usage": Usage(prompt_tokens=2, completion_tokens=1), "started_at": START, **more,
    }  # fmt: skip
    return Turn(**fields)


def branch_of_turns(*turn_ids: str) -> Branch:
    spans = tuple(
        Span(start=2 * n + 1, logprobs=(-0.5,), turn_id=name, version=VERSION) for n, name in enumerate(turn_ids)
    )
    return Branch(token_ids=(1,) * (2 * len(turn_ids)), spans=spans)


def trajectory(
    name: str, *branches: tuple[str, ...], left_out: dict[str, str] | None = None, **more: Any
) -> Trajectory:
    fields = {
        "time": START, "trajectory_id": name, "session_key": KEY, "session_id": "s", "model": "m",
        "branches": tuple(branch_of_turns(*ids) for ids in branches), "end_reason": "end_call", "started_at": START,
        "left_out": tuple(LeftOut.model_validate({"turn_id": t, "reason": r}) for t, r in (left_out or {}).items()),
        **more,
    }  # fmt: skip
    return Trajectory(**fields)


def experience(name: str, *turn_ids: str, of: str = "T", revision: int = 0, reward: float | None = 1.0) -> Experience:
    return Experience(
        time=START, experience_id=name, revision=revision, trajectory_id=of, session_key=KEY, session_id="s", model="m",
        branch=branch_of_turns(*turn_ids), turn_ids=turn_ids, reward=reward,
        no_reward="no_reward" if reward is None else None,
    )  # fmt: skip


def verdict(
    name: str, *turn_ids: str, revision: int = 0, dropped: str | None = None, detail: str | None = None
) -> TrainingOutcome:
    return TrainingOutcome.model_validate(
        {"experience_id": name, "revision": revision, "turn_ids": turn_ids, "dropped": dropped, "detail": detail}
    )


def report(*verdicts: TrainingOutcome, save: int = 0, lineage: str = "main", at_s: int = 0) -> TrainingMetrics:
    time = START + timedelta(seconds=at_s)
    return TrainingMetrics(time=time, model="m", lineage=lineage, step=save, account=save, verdicts=verdicts)


def undoes(name: str, *, revision: int = 0, queued: bool = False, save: int = 1) -> TrainingMetrics:
    undone = (RevertedOutcome(experience_id=name, revision=revision, queued=queued),)
    return TrainingMetrics(
        time=START + timedelta(seconds=save), model="m", lineage="main", step=save, account=save, undone=undone
    )


def restores(name: str, *, revision: int = 0, save: int = 2) -> TrainingMetrics:
    restored = (RestoredOutcome(experience_id=name, revision=revision),)
    return TrainingMetrics(
        time=START + timedelta(seconds=save), model="m", lineage="main", step=save, account=save, restored=restored
    )


def letter(event: Event, service: str) -> DeadLetter:
    return DeadLetter(
        time=START, service=service, source_topic=event.topic, source_partition=0, source_offset=0,
        source_id=event.event_id, source_key=event.key, value_base64="", reason="handler_error", error="boom",
    )  # fmt: skip


TWO = (turn("a"), turn("b"))
CLOSED = (*TWO, trajectory("T", ("a", "b")))
READY = (*CLOSED, experience("E", "a", "b"))
