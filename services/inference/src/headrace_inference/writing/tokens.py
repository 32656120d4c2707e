"""From a conversation that somebody wrote to the token sequences that it would have been, had the model said it.

At serving time a prompt is rendered and tokenized as a whole, the model answers until its end-of-turn token, and the
next prompt continues these exact tokens (`headrace_inference.chat.exact`). Here the same is done with answers that are
known: what stands before an answer is tokenized as a prompt is, the answer as the text that the template writes for it,
and its end-of-turn token belongs to it. A later prompt that does not begin with what was there, because the template
drops earlier reasoning for example, begins another branch, as it would in traffic.

An answer is only taken when the service would read from its text what was written: the same content, reasoning and tool
calls. So a template that drops or changes what it is given is found here, and not in what the model has learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_inference.chat.answer import Reading
from headrace_inference.chat.exact import Meaning, meaning
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_runtime.chat_messages import argument_value, template_message
from headrace_runtime.errors import HeadraceError, Refused
from headrace_schemas import Message, Tool
from headrace_schemas.written import WrittenBranch, WrittenSpan

_SHOWN_LENGTH = 60


class Unwritable(HeadraceError):
    """These messages have no tokens that could be trained. `kind` is a stable word for it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class _Sequence:
    """A branch that may go on. `text` is what its tokens say, as rendered."""

    text: str
    token_ids: list[int]
    spans: list[WrittenSpan] = field(default_factory=list)


class ConversationWriter:
    """Of one base. `tokens_max`: a longer sequence is refused."""

    def __init__(self, tokenizer: ChatTokenizer, parsers: Parsers, tokens_max: int) -> None:
        self._tokenizer = tokenizer
        self._parsers = parsers
        self.tokens_max = tokens_max

    def write(
        self,
        prompt: Sequence[Message],
        answer: Sequence[Message],
        tools: Sequence[Tool] = (),
        untrained: frozenset[int] = frozenset(),
        *,
        shown: bool = False,
    ) -> tuple[WrittenBranch, ...]:
        """The branches of `prompt` and `answer`; spans are what the assistant says in the latter. Raises
        `Unwritable`."""
        messages = [*prompt, *answer]
        offered = [tool.model_dump(mode="json", exclude_none=True) for tool in tools]
        sequences: list[_Sequence] = []
        for place, message in enumerate(messages):
            if message.role == "assistant" and place >= len(prompt) and place not in untrained:
                self._add(sequences, messages[: place + 1], offered)
        if not sequences:
            raise Unwritable("empty", "nobody says anything that could be trained")
        return tuple(self._branch(one, shown=shown) for one in sequences)

    def _add(self, sequences: list[_Sequence], messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Another answer, the last of `messages`: in the last sequence where its prompt continues that one."""
        place = len(messages) - 1
        before, said, eos = self._rendered(messages, tools)
        self._check_shown(messages[:-1], before)
        self._check_read(messages[-1], before, said, place, tools=bool(tools))
        last = sequences[-1] if sequences else None
        if last is not None and before.startswith(last.text):
            last.token_ids += self._tokenizer.encode(before[len(last.text) :])
            found = last
        else:
            found = _Sequence("", self._tokenizer.encode(before))
            sequences.append(found)
        answer = [*self._answer(before, said, place), eos]
        if not found.token_ids:
            raise Unwritable("template", f"message {place + 1}: the chat template writes nothing before the answer")
        found.spans.append(WrittenSpan(start=len(found.token_ids), length=len(answer), message=place))
        found.token_ids += answer
        found.text = before + said + self._tokenizer.eos_text
        if len(found.token_ids) > self.tokens_max:
            raise Unwritable("too_long", f"{len(found.token_ids)} tokens; at most {self.tokens_max} can be trained")

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, str, int]:
        """The prompt of the last message, that message as the template writes it, and the token that ends it."""
        place = len(messages) - 1
        tokenizer = self._tokenizer
        if not tokenizer.eos_text or tokenizer.eos_id is None:
            raise Unwritable("template", "the tokenizer names no eos_token, so no answer would end")
        given = list(map(template_message, messages))
        try:
            before = tokenizer.render(given[:-1], tools, {})
            whole = tokenizer.render(given, tools, {}, open_answer=False)
        except Refused as error:
            raise Unwritable("template", f"message {place + 1}: {error}") from None
        if not whole.startswith(before):
            raise Unwritable(
                "template",
                f"message {place + 1}: with this answer the chat template writes another prompt than without it; "
                f"{_apart(before, whole)}",
            )
        rest = whole[len(before) :]
        end = rest.find(tokenizer.eos_text)
        if end < 0:
            raise Unwritable(
                "template", f"message {place + 1}: the chat template does not end an answer with {tokenizer.eos_text!r}"
            )
        return before, rest[:end], tokenizer.eos_id

    def _answer(self, before: str, said: str, place: int) -> list[int]:
        """Its tokens behind the prompt: as part of the whole text where that leaves the prompt as it is, else alone."""
        tokenizer = self._tokenizer
        prompt, whole = tokenizer.encode(before), tokenizer.encode(before + said)
        found = whole[len(prompt) :] if whole[: len(prompt)] == prompt else tokenizer.encode(said)
        back, meant = tokenizer.spelled(found), tokenizer.plain(said)
        if _bare(back) != _bare(meant):
            raise Unwritable(
                "tokenizer",
                f"message {place + 1}: the tokenizer cannot write it; {_apart(meant.strip(), back.strip())}",
            )
        return found

    def _check_shown(self, messages: Sequence[Message], before: str) -> None:
        """What was said before the answer has to be in its prompt; earlier reasoning alone may be left out."""
        text = self._tokenizer.plain(before)
        for place, message in enumerate(messages):
            content = message.text
            if message.role == "assistant":
                content = meaning(self._tokenizer, content, Reading(reasoning=self._parsers.reasoning))[1]
            if not any(form in text for form in _forms(content.strip())):
                raise Unwritable(
                    "template",
                    f"message {place + 1}: the chat template drops or changes what the {message.role} says: "
                    f"{_short(content)}",
                )

    def _check_read(self, message: Message, before: str, said: str, place: int, *, tools: bool) -> None:
        """The service has to read from the text what the row says."""
        offered = tools or bool(message.tool_calls)
        how = Reading.of(self._tokenizer.plain(before), self._parsers, tools=offered)
        found = meaning(self._tokenizer, self._tokenizer.plain(said), how)
        wanted = _wanted(self._tokenizer, message, how)
        if found == wanted:
            return
        words = ("reasoning", "content", "tool calls")
        part = next(number for number in range(3) if found[number] != wanted[number])
        raise Unwritable(
            "template",
            f"message {place + 1}: its {words[part]} would be read as {_short(found[part])}, and "
            f"{_short(wanted[part])} was written; the chat template drops or changes it, or inference.tool_parser and "
            "inference.reasoning_parser are not those of this model",
        )

    def _branch(self, found: _Sequence, *, shown: bool) -> WrittenBranch:
        texts = tuple(self._parts(found)) if shown else ()
        return WrittenBranch(token_ids=tuple(found.token_ids), spans=tuple(found.spans), texts=texts)

    def _parts(self, found: _Sequence) -> Iterator[str]:
        at = 0
        for span in found.spans:
            yield self._tokenizer.spelled(found.token_ids[at : span.start])
            at = span.start + span.length
            yield self._tokenizer.spelled(found.token_ids[span.start : at])


def _wanted(tokenizer: ChatTokenizer, message: Message, how: Reading) -> Meaning:
    """What the row says, read as an answer where it has tags of reasoning or calls in its content."""
    inside = Reading(how.tools, how.reasoning, how.reasoning_opened and "</" in message.text)
    reasoning, content, calls = meaning(tokenizer, message.text, inside)
    given = [(call.function.name, argument_value(call.function.arguments)) for call in message.tool_calls or ()]
    return (message.reasoning_content or reasoning).strip(), content, [*calls, *given]


def _forms(content: str) -> tuple[str, ...]:
    """As it stands, and inside a JSON string, as some templates write what tools say."""
    return content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]


def _bare(text: str) -> str:
    """Without whitespace, which tokenizers add and drop at edges."""
    return "".join(text.split())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"


def _apart(one: str, other: str) -> str:
    """Where two texts begin to differ."""
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, at - 10)
    return f"{_short(one[begin : at + 20])} becomes {_short(other[begin : at + 20])}"
