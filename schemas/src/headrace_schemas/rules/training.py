"""Rules that decide how a turn can be trained, and how dead-lettered records may be published again."""

from __future__ import annotations

from typing import Literal

from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.events.dead_letter import RETRY_HEADER, DeadLetter
from headrace_schemas.events.envelope import SEQUENCE_HEADER
from headrace_schemas.events.opinion import Kind
from headrace_schemas.events.trajectory import LeftOutReason, NoLogprobs
from headrace_schemas.events.turn import Turn

TABLES = frozenset({"replicas", "routing"})
"""Compacted topics: an old record would replace the newest one."""
_NOT_RETRIABLE = frozenset({("collector", "invalid_trajectory")})
"""Service and reason of letters about records that took effect before the refusal; a retry would be a duplicate."""
_KEY_LENGTH_MAX = 512


def left_out_reason(turn: Turn) -> LeftOutReason | None:
    """Return the reason why the turn cannot be in a branch, or None if it can.

    The reason `retried` is missing here, because only a later turn reveals a retry.
    """
    if not turn.delivered:
        return "undelivered"
    return None if any(choice.token_ids for choice in turn.choices) else "empty"


def no_logprobs_reason(turn: Turn) -> NoLogprobs | None:
    """Return the reason why algorithms that need the logprobs of the sampling policy cannot train the turn, or None.

    The distribution that the tokens were sampled from cannot be computed from the model's logits, or there is none, as
    in greedy decoding. The reason names a grammar, which the client may not have requested itself.
    """
    if turn.recomputable:
        return None
    return "truncated_sampling" if turn.sampling.grammar is None else "truncated_sampling (grammar)"


def untrained_reason(turn: Turn) -> str | None:
    """Return the reason why no algorithm trains the turn, as the account names it, or None if some algorithm does."""
    return "eval" if turn.purpose == "eval" else turn.untrained or left_out_reason(turn)


TokenKind = Literal["free", "held", "stored", "shifted", "left_out"]
"""How tokens were sampled: from the model's own distribution, from the tokens of a grammar, from sets of tokens that
are stored with the turn, from all tokens with penalties or a bias, or so that algorithms that need logprobs leave them
out."""


def token_kind(turn: Turn) -> TokenKind:
    """Return how the tokens of the turn were sampled."""
    if untrained_reason(turn) is not None or no_logprobs_reason(turn) is not None:
        return "left_out"
    if turn.sampling.truncated:
        return "stored"
    if turn.sampling.grammar is not None:
        return "held"
    return "free" if turn.sampling.logit_shift is None else "shifted"


def unused_reason(kind: Kind, untrained: str | None, no_logprobs: str | None, learns: LearnedSignals) -> str | None:
    """Return the reason why feedback about a turn trains nothing, or None if it may be trained.

    Args:
        kind: Kind of the feedback.
        untrained: The reason why no algorithm trains the turn, or None.
        no_logprobs: The reason why the turn lacks logprobs that feedback of this kind needs, or None.
        learns: The signals that the algorithm trains.
    """
    if untrained is not None:
        return untrained
    if not {"value": learns.rewards, "edit": learns.edits, "preference": learns.preferences}[kind]:
        return "no_signal"
    return no_logprobs if learns.logprobs and kind != "edit" else None


def permanent_problem(letter: DeadLetter) -> str | None:
    """Return why the record of a letter must never be published again, or None if a valid record may be."""
    if letter.source_topic in TABLES:
        return (
            f"{letter.source_topic} is a table: its producer publishes the newest row again, and an old row would win"
        )
    if (letter.service, letter.reason) in _NOT_RETRIABLE:
        return "its session is closed; only a replay can apply the record"
    key = letter.source_key or ""
    if "\ufffd" in key or len(key) >= _KEY_LENGTH_MAX:
        return "its key is not text or is longer than a dead letter stores"
    return None


def retry_headers(letter: DeadLetter, *, keeps_partition: bool) -> tuple[tuple[str, bytes], ...]:
    """Return the headers of the record that is published again.

    Args:
        letter: the dead letter.
        keeps_partition: whether the record returns to its partition. Then it also keeps its place among the records of
            its key, so that records after the original one stay after it.
    """
    headers = [(name, text.encode()) for name, text in letter.headers.items() if name != RETRY_HEADER]
    headers.append((RETRY_HEADER, letter.event_id.encode()))
    if keeps_partition and letter.source_offset is not None and SEQUENCE_HEADER not in letter.headers:
        headers.append((SEQUENCE_HEADER, str(letter.source_offset).encode()))
    return tuple(headers)
