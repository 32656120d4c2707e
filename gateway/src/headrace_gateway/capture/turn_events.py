"""Conversion of a finished call to an event: a `Turn`, or a dead letter if its token counts do not agree."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from pydantic import JsonValue, ValidationError
from pydantic_core import to_json

from headrace_gateway import metrics
from headrace_gateway.capture.captured_turns import CapturedTurn, build_captured_turn, find_reference
from headrace_gateway.capture.transcript import PartialChoice, Transcript
from headrace_gateway.requests.chat_call import ChatCall
from headrace_runtime.metrics import DEAD_LETTERS
from headrace_runtime.process.logs import get_logger
from headrace_schemas import DeadLetter, Message, Turn
from headrace_schemas.events.turn import TurnReference
from headrace_schemas.rules.turn_history import token_bytes
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.text import storable

log = get_logger(__name__)
_NAME_LENGTH_MAX, _LENGTH_MAX = 512, 1_048_576
"""Maximum characters of a name and of a text in an event."""
_RAW_BYTES_MAX = 1_500_000
"""Maximum bytes of JSON that fit into the value of a dead letter after base64."""


def capture(
    call: ChatCall,
    transcript: Transcript,
    earlier: Sequence[CapturedTurn],
    *,
    delivered: bool,
    untrained: str | None = None,
) -> tuple[Turn | DeadLetter, CapturedTurn | None]:
    """Convert a finished call to its event. Return the event, and the parts that later turns of the session may refer
    to (None for a dead letter).

    Args:
        call: The call.
        transcript: The tokens and texts of the answer.
        earlier: Turns of the session that the event may refer to.
        delivered: Whether the client was still connected at the end of the answer.
        untrained: Reason why turns of the version are never trained, or None.
    """
    try:
        prompt = token_bytes(transcript.prompt_token_ids)
    except OverflowError:  # no token id; the event names it
        return event_of(call, transcript, delivered=delivered, untrained=untrained), None
    extended = find_reference(call, prompt, transcript.assignment, earlier)
    named = extended[0] if extended else None
    event = event_of(call, transcript, delivered=delivered, untrained=untrained, extends=named)
    if isinstance(event, DeadLetter):
        return event, None
    started_at = transcript.replica_started_at
    replica = (transcript.replica_id, started_at) if started_at is not None else None
    return event, build_captured_turn(call, event, prompt, extended[1] if extended else None, replica)


def event_of(
    call: ChatCall,
    transcript: Transcript,
    *,
    delivered: bool,
    untrained: str | None = None,
    extends: TurnReference | None = None,
) -> Turn | DeadLetter:
    """Convert a finished call to its turn, or to a dead letter if the turn would be invalid."""
    disagreement = transcript.disagreement()
    if disagreement:
        return _refused(call, transcript, "token_mismatch", disagreement)
    try:
        turn = _turn(call, transcript, delivered, untrained, extends)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        return _refused(call, transcript, "invalid_turn", f"{where}: {problem['msg']}")
    metrics.TURNS.labels(turn.model, turn.purpose).inc()
    metrics.TOKENS.labels("prompt").inc(turn.usage.prompt_tokens)
    metrics.TOKENS.labels("sampled").inc(turn.usage.completion_tokens)
    if not delivered:
        metrics.UNDELIVERED.inc()
    return turn


def _turn(
    call: ChatCall, transcript: Transcript, delivered: bool, untrained: str | None, extends: TurnReference | None
) -> Turn:
    identity = call.identity
    usage = transcript.usage
    assert usage is not None
    sets = transcript.recorded_sets if call.sampling.truncated else {}
    return Turn.model_validate(
        {
            "time": utcnow(),
            "turn_id": call.response_id,
            "session_key": identity.session_key,
            "session_id": identity.session_id,
            "session_source": identity.source,
            "tenant": identity.tenant,
            "purpose": identity.purpose,
            "task_id": identity.task_id,
            "run_id": identity.run_id,
            "model": call.target.model,
            "version": transcript.version,
            "replica_id": transcript.replica_id,
            "request_digest": call.digest,
            "retry": call.retry,
            "delivered": delivered,
            "untrained": untrained,
            "extends": extends,
            "messages": _messages(call, transcript)[extends.messages if extends else 0 :],
            "tools": () if extends and extends.tools else call.request.tools or (),
            "sampling": call.sampling,
            "token_grammar": transcript.token_grammar if call.sampling.grammar else None,
            "prompt_token_ids": transcript.prompt_token_ids[extends.tokens if extends else 0 :],
            "choices": [
                _choice(index, choice) | {"stored_sets": sets.get(index)}
                for index, choice in sorted(transcript.choices.items())
            ],
            "usage": {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens},
            "started_at": call.started_at,
            "assignment": transcript.assignment,
            "shadow_of": identity.shadow_of,
            "side_call": call.side_call,
            "repeats": call.repeats,
            "sub_agent": call.sub_agent,
            "response": call.response,
            "rendered": call.request.raw_prompt is None,
        }
    )


def _messages(call: ChatCall, transcript: Transcript) -> tuple[Message, ...]:
    """Return the messages of the prompt for the event. For a prompt of token ids this is one message with the text that
    the engine decoded."""
    if transcript.prompt_text is None or call.request.raw_prompt is None:
        return call.messages
    return (Message(role="user", content=storable(transcript.prompt_text)[:_LENGTH_MAX]),)


def _choice(index: int, choice: PartialChoice) -> dict[str, object]:
    """Convert one choice of an answer to the format of the turn event.

    Texts that exceed the event's limits are cut; the token ids contain the complete answer.
    """
    calls = [
        {
            "id": call.id[:_NAME_LENGTH_MAX] or f"call_{number}",
            "function": {"name": call.name[:_NAME_LENGTH_MAX] or "(none)", "arguments": call.arguments[:_LENGTH_MAX]},
        }
        for number, call in sorted(choice.calls.items())
    ]
    return {
        "index": index,
        "token_ids": choice.token_ids,
        "logprobs": choice.logprobs,
        "finish_reason": choice.finish_reason,
        "message": {
            "role": "assistant",
            "content": "".join(choice.content)[:_LENGTH_MAX] or None,
            "reasoning_content": "".join(choice.reasoning)[:_LENGTH_MAX] or None,
            "tool_calls": calls or None,
        },
    }


def _refused(call: ChatCall, transcript: Transcript, reason: str, error: str) -> DeadLetter:
    DEAD_LETTERS.labels(Turn.topic, reason).inc()
    log.error("capture_refused", turn_id=call.response_id, reason=reason, error=error)
    raw = _raw(call, transcript)
    return DeadLetter(
        time=utcnow(),
        service="gateway",
        source_topic=Turn.topic,
        source_id=call.response_id,
        source_key=call.identity.session_key,
        value_base64=base64.b64encode(raw).decode(),
        reason=reason,
        error=error,
    )


def _raw(call: ChatCall, transcript: Transcript) -> bytes:
    """Return the captured call as JSON for a dead letter. If that is too large, return only the numbers of token ids
    and logprobs, without tokens and texts."""
    tokens: dict[str, JsonValue] = {
        "turn_id": call.response_id,
        "session_id": call.identity.session_id,
        "tenant": call.identity.tenant,
        "version": transcript.version,
        "replica_id": transcript.replica_id,
        "usage": transcript.usage.model_dump(mode="json") if transcript.usage else None,
    }
    choices = {index: _choice(index, choice) for index, choice in transcript.choices.items()}
    document = to_json(
        {**tokens, "prompt_token_ids": transcript.prompt_token_ids, "choices": choices, "messages": call.messages}
    )
    if len(document) <= _RAW_BYTES_MAX:
        return document
    lengths = {index: [len(c.token_ids), len(c.logprobs)] for index, c in transcript.choices.items()}
    return to_json({**tokens, "prompt_token_count": len(transcript.prompt_token_ids), "choice_lengths": lengths})
