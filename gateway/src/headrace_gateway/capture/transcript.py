"""Tokens and texts of one call, collected from a plain answer or from the chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from pydantic import JsonValue

from headrace_gateway.requests.engine_wire import EngineAnswer, EngineChoice, EngineMessage, EngineToolCall, EngineUsage
from headrace_schemas import UnitAssignment
from headrace_schemas.events.turn import STORED_SETS_MAX
from headrace_schemas.http.replica_api import Resume


@dataclass(slots=True)
class PartialCall:
    """Tool call whose deltas are still arriving."""

    id: str = ""
    name: str = ""
    argument_pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.argument_pieces)


@dataclass(slots=True)
class PartialChoice:
    """Choice whose deltas are still arriving."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, PartialCall] = field(default_factory=dict)
    finish_reason: str | None = None
    stored_sets: list[int] | None = field(default_factory=list)
    """Encoded sets of the tokens that `top_p`, `top_k` and `min_p` allowed at each position, or None if they are not
    known for all positions."""

    def add(self, choice: EngineChoice, message: EngineMessage) -> None:
        self.token_ids += choice.token_ids or ()
        if choice.token_ids:
            self._add_sets(choice.headrace_stored_sets)
        if choice.logprobs is not None and choice.logprobs.content:
            self.logprobs += [entry["logprob"] for entry in choice.logprobs.content]
        if message.content:
            self.content.append(message.content)
        if message.reasoning_content:
            self.reasoning.append(message.reasoning_content)
        for index, call in message.indexed_calls:
            self._add_call(index, call)
        self.finish_reason = choice.finish_reason or self.finish_reason

    def _add_sets(self, stored: list[int] | None) -> None:
        if stored is None or self.stored_sets is None or len(self.stored_sets) + len(stored) > STORED_SETS_MAX:
            self.stored_sets = None
        else:
            self.stored_sets += stored

    def _add_call(self, index: int, added: EngineToolCall) -> None:
        call = self.calls.setdefault(index, PartialCall())
        call.id = call.id or added.id or ""
        call.name += added.function.name or ""
        call.argument_pieces.append(added.function.arguments or "")


@dataclass(slots=True)
class Transcript:
    """Tokens and texts of one answer, collected for its turn event."""

    replica_id: str = ""
    replica_started_at: datetime | None = None
    assignment: UnitAssignment | None = None
    """Rollout assignment under which the answer was sampled."""
    version: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_text: str | None = None
    """Text that the replica decoded from a prompt of token ids."""
    token_grammar: JsonValue = None
    """Grammar with which all replicas of the call sampled, or None if one of them reported none or a different one."""
    choices: dict[int, PartialChoice] = field(default_factory=dict)
    usage: EngineUsage | None = None
    other_prompt: bool = False
    """Whether a replica continued the answer after a different prompt than the replica before it."""

    def add(self, answer: EngineAnswer, *, streamed: bool) -> None:
        self.version = self.version or answer.model
        if answer.prompt_token_ids is not None:
            if not self.sampled:
                self.prompt_token_ids, self.token_grammar = answer.prompt_token_ids, answer.headrace_grammar
            else:
                self.other_prompt = self.other_prompt or self.prompt_token_ids != answer.prompt_token_ids
                self.token_grammar = self.token_grammar if self.token_grammar == answer.headrace_grammar else None
        self.prompt_text = answer.headrace_prompt_text or self.prompt_text
        self.usage = answer.usage or self.usage
        for choice in answer.choices:
            state = self.choices.setdefault(choice.index, PartialChoice())
            state.add(choice, choice.delta if streamed else choice.message)

    def forget(self) -> None:
        """Discard what a replica sent before its first token, because it failed and another replica begins again."""
        self.version, self.prompt_token_ids, self.token_grammar, self.usage = "", [], None, None
        self.choices.clear()

    @property
    def recorded_sets(self) -> dict[int, list[int]]:
        """Encoded sets of the tokens that could be sampled at each position, by the index of the choice.

        Empty if the sets of one choice are unknown, or if all sets together are too large for an event.
        """
        sets = {index: choice.stored_sets for index, choice in self.choices.items() if choice.stored_sets is not None}
        complete = len(sets) == len(self.choices) and sum(map(len, sets.values())) <= STORED_SETS_MAX
        return sets if complete else {}

    @property
    def has_begun(self) -> bool:
        """Whether the answer has begun: a token or the end of a choice has arrived."""
        return any(choice.token_ids or choice.finish_reason for choice in self.choices.values())

    @property
    def sampled(self) -> int:
        """Number of sampled tokens of all choices so far."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def finished(self, choices: int) -> bool:
        """Return whether all `choices` (their number) have ended."""
        ended = [choice for choice in self.choices.values() if choice.finish_reason is not None]
        return len(ended) == choices

    def disagreement(self) -> str | None:
        """Return a message about the first contradiction between token ids, logprobs and usage, or None if they
        agree."""
        for index, choice in self.choices.items():
            if len(choice.token_ids) != len(choice.logprobs):
                return f"choice {index} has {len(choice.token_ids)} token ids and {len(choice.logprobs)} logprobs"
        if self.other_prompt:
            return "the replica that went on with the stream has other prompt ids than the one that began it"
        if not self.prompt_token_ids:
            return "the engine sent no prompt_token_ids"
        if self.usage is None:
            return "the engine sent no usage"
        gathered = (len(self.prompt_token_ids), self.sampled)
        counted = (self.usage.prompt_tokens, self.usage.completion_tokens)
        if gathered != counted:
            return (
                f"prompt and sampled ids are {gathered[0]} and {gathered[1]}, usage says {counted[0]} and {counted[1]}"
            )
        return None

    def resume(self) -> Resume | None:
        """Return the tokens sampled so far, as the part of a request with which another replica continues the answer.
        None before the first token.

        Raises:
            ValidationError: The numbers of tokens and logprobs differ, so the stream cannot be continued.
        """
        if not self.sampled:
            return None
        return Resume.model_validate(
            {
                "prompt_token_ids": self.prompt_token_ids or None,
                "choices": [
                    {
                        "index": index,
                        "token_ids": choice.token_ids,
                        "logprobs": choice.logprobs,
                        "finish_reason": choice.finish_reason,
                    }
                    for index, choice in sorted(self.choices.items())
                ],
            }
        )
