"""`python -m headrace_inference.written`: tokenizes written conversations, by the same code that builds prompts and
parses answers in traffic.

When a model serves, a prompt is rendered and tokenized as a whole, the model answers up to its end-of-turn token, and
the next prompt continues these exact tokens (`headrace_inference.chat.exact`). Here the answers are known. The text
before an answer is tokenized like a prompt, the answer as the text that the template writes for it, and the end-of-turn
token is part of the answer. A later prompt that does not begin with the earlier text, for example because the template
drops earlier reasoning, begins another branch, as in traffic.

An answer is accepted only if the service would parse its text into the written content, reasoning and tool calls. So a
template that drops or changes messages is detected here, and not in what the model has learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace_inference.chat.answer import AnswerSyntax
from headrace_inference.chat.exact import Meaning, meaning
from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import VersionUnusable
from headrace_inference.settings import InferenceSettings
from headrace_runtime.chat_messages import argument_value, template_message
from headrace_runtime.errors import HeadraceError, Refused
from headrace_runtime.main import Service
from headrace_runtime.process.programs import Lines
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage import versions
from headrace_schemas import Message, Tool
from headrace_schemas.programs import (
    BaseLine,
    OpenedLine,
    RefusedLine,
    RowLine,
    WrittenBranch,
    WrittenLine,
    WrittenSpan,
)
from headrace_schemas.values.blobs import BlobRef, File, Fingerprint, Manifest
from headrace_schemas.values.text import read_user_text

SERVICE = Service(
    "inference",
    "Tokenizes conversations as a replica would.",
    InferenceSettings,
    "headrace_inference.written:run",
)
_TEXT_LENGTH_MAX = 60
_PLACEHOLDER = Fingerprint(token_ids=(0, 0), logprobs=(0.0,))
_UNBOUNDED = 1 << 30


class UntrainableConversation(HeadraceError):
    """Error: a written conversation cannot be tokenized for training. `kind` is a stable code of the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class _Sequence:
    """A token sequence that a later answer may continue. `text` is the rendered text of its tokens."""

    text: str
    token_ids: list[int]
    spans: list[WrittenSpan] = field(default_factory=list)


class ConversationWriter:
    """Tokenizer of conversations that people wrote, for one base. It refuses sequences longer than `tokens_max`."""

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
        with_texts: bool = False,
    ) -> tuple[WrittenBranch, ...]:
        """Return the token sequences (branches) of a conversation, whose spans are the assistant's messages in
        `answer`.

        Args:
            prompt: the messages before the answer, which are not trained.
            answer: the further messages, which end with an assistant's message.
            tools: the tools that the model was offered.
            untrained: indices, counted from the first message of `prompt`, of messages that are not trained.
            with_texts: whether the branches contain the texts of their tokens.

        Raises:
            UntrainableConversation: the conversation has no tokens that could be trained.
        """
        messages = [*prompt, *answer]
        offered = [tool.model_dump(mode="json", exclude_none=True) for tool in tools]
        sequences: list[_Sequence] = []
        for index, message in enumerate(messages):
            if message.role == "assistant" and index >= len(prompt) and index not in untrained:
                self._add_answer(sequences, messages[: index + 1], offered)
        if not sequences:
            raise UntrainableConversation("empty", "the row has no answer that could be trained")
        return tuple(self._branch(sequence, with_texts=with_texts) for sequence in sequences)

    def _add_answer(self, sequences: list[_Sequence], messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """Add the answer `messages[-1]` to the last sequence if its prompt continues it, otherwise to a new
        sequence."""
        index = len(messages) - 1
        prompt, answer, eos = self._render(messages, tools)
        self._check_prompt(messages[:-1], prompt)
        self._check_answer(messages[-1], prompt, answer, index, tools=bool(tools))
        last = sequences[-1] if sequences else None
        if last is not None and prompt.startswith(last.text):
            last.token_ids += self._tokenizer.encode(prompt[len(last.text) :])
            sequence = last
        else:
            sequence = _Sequence("", self._tokenizer.encode(prompt))
            sequences.append(sequence)
        answer_ids = [*self._encode_answer(prompt, answer, index), eos]
        if not sequence.token_ids:
            raise UntrainableConversation(
                "template", f"message {index + 1}: the chat template writes nothing before the answer"
            )
        sequence.spans.append(WrittenSpan(start=len(sequence.token_ids), length=len(answer_ids), message=index))
        sequence.token_ids += answer_ids
        sequence.text = prompt + answer + self._tokenizer.eos_text
        if len(sequence.token_ids) > self.tokens_max:
            raise UntrainableConversation(
                "too_long", f"{len(sequence.token_ids)} tokens; at most {self.tokens_max} can be trained"
            )

    def _render(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[str, str, int]:
        """Return the rendered prompt of the last message, the rendered message, and the token that ends it."""
        index = len(messages) - 1
        tokenizer = self._tokenizer
        if not tokenizer.eos_text or tokenizer.eos_id is None:
            raise UntrainableConversation("template", "the tokenizer has no eos_token, so no answer would end")
        template_messages = list(map(template_message, messages))
        try:
            prompt = tokenizer.render(template_messages[:-1], tools, {})
            conversation = tokenizer.render(template_messages, tools, {}, open_answer=False)
        except Refused as error:
            raise UntrainableConversation("template", f"message {index + 1}: {error}") from None
        if not conversation.startswith(prompt):
            raise UntrainableConversation(
                "template",
                f"message {index + 1}: the chat template renders the earlier messages differently once this answer is "
                f"added; {_difference(prompt, conversation)}",
            )
        rest = conversation[len(prompt) :]
        end = rest.find(tokenizer.eos_text)
        if end < 0:
            raise UntrainableConversation(
                "template", f"message {index + 1}: the chat template does not end an answer with {tokenizer.eos_text!r}"
            )
        return prompt, rest[:end], tokenizer.eos_id

    def _encode_answer(self, prompt: str, answer: str, index: int) -> list[int]:
        """Return the tokens of an answer: tokenized together with `prompt` if the prompt's tokens stay equal, else
        alone.

        `index` is the number of the message, for error messages.
        """
        tokenizer = self._tokenizer
        prompt_ids, all_ids = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
        separable = all_ids[: len(prompt_ids)] == prompt_ids
        ids = all_ids[len(prompt_ids) :] if separable else tokenizer.encode(answer)
        decoded, original = tokenizer.decode(ids), tokenizer.plain(answer)
        if _without_whitespace(decoded) != _without_whitespace(original):
            raise UntrainableConversation(
                "tokenizer",
                f"message {index + 1}: the tokenizer cannot represent it; "
                f"{_difference(original.strip(), decoded.strip())}",
            )
        return ids

    def _check_prompt(self, messages: Sequence[Message], prompt: str) -> None:
        """Check that the rendered prompt contains the content of all earlier messages, except their reasoning."""
        text = self._tokenizer.plain(prompt)
        for index, message in enumerate(messages):
            content = message.text
            if message.role == "assistant":
                content = meaning(self._tokenizer, content, AnswerSyntax(reasoning=self._parsers.reasoning))[1]
            if not any(form in text for form in _spellings(content.strip())):
                raise UntrainableConversation(
                    "template",
                    f"message {index + 1}: the chat template drops or changes the content of the {message.role}: "
                    f"{_short(content)}",
                )

    def _check_answer(self, message: Message, prompt: str, answer: str, index: int, *, tools: bool) -> None:
        """Check that the service would parse the rendered answer into the written message."""
        offered = tools or bool(message.tool_calls)
        syntax = AnswerSyntax.of(self._tokenizer.plain(prompt), self._parsers, tools=offered)
        parsed = meaning(self._tokenizer, self._tokenizer.plain(answer), syntax)
        written = _written_meaning(self._tokenizer, message, syntax)
        if parsed == written:
            return
        words = ("reasoning", "content", "tool calls")
        part = next(number for number in range(3) if parsed[number] != written[number])
        raise UntrainableConversation(
            "template",
            f"message {index + 1}: its {words[part]} would be read as {_short(parsed[part])}, and "
            f"{_short(written[part])} was written; the chat template drops or changes it, or inference.tool_parser and "
            "inference.reasoning_parser are not those of this model",
        )

    def _branch(self, sequence: _Sequence, *, with_texts: bool) -> WrittenBranch:
        texts = tuple(self._texts(sequence)) if with_texts else ()
        return WrittenBranch(token_ids=tuple(sequence.token_ids), spans=tuple(sequence.spans), texts=texts)

    def _texts(self, sequence: _Sequence) -> Iterator[str]:
        """Yield the texts of a sequence's tokens, alternately before a span and in it."""
        end = 0
        for span in sequence.spans:
            yield self._tokenizer.decode(sequence.token_ids[end : span.start])
            end = span.start + span.length
            yield self._tokenizer.decode(sequence.token_ids[span.start : end])


def _written_meaning(tokenizer: ChatTokenizer, message: Message, syntax: AnswerSyntax) -> Meaning:
    """Return content, reasoning and tool calls of a written message, after parsing such tags in its content."""
    inside = AnswerSyntax(syntax.tools, syntax.reasoning, syntax.reasoning_opened and "</" in message.text)
    reasoning, content, calls = meaning(tokenizer, message.text, inside)
    written = [(call.function.name, argument_value(call.function.arguments)) for call in message.tool_calls or ()]
    return (message.reasoning_content or reasoning).strip(), content, [*calls, *written]


def _spellings(content: str) -> tuple[str, ...]:
    """Return the content unchanged and as the inside of a JSON string, as some templates write tool results."""
    return content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]


def _without_whitespace(text: str) -> str:
    """Return the text without whitespace, which tokenizers may add and drop at its edges."""
    return "".join(text.split())


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _TEXT_LENGTH_MAX else f"{text[:_TEXT_LENGTH_MAX]}…"


def _difference(original: str, changed: str) -> str:
    """Describe the first difference between two texts."""
    pairs = enumerate(zip(original, changed, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(original), len(changed)))
    begin = max(0, at - 10)
    return f"{_short(original[begin : at + 20])} becomes {_short(changed[begin : at + 20])}"


async def run(_common: Common, settings: InferenceSettings) -> None:
    """Run the filter on standard input and output. Raises `VersionUnusable` if the base has no usable tokenizer."""
    lines = Lines()
    writer: ConversationWriter | None = None
    async for word, value in lines.read():
        if word == "base":
            writer = open_writer(BaseLine.model_validate_json(value), settings)
            lines.write("opened", OpenedLine(tokens_max=writer.tokens_max).model_dump_json().encode())
            lines.flush()
            continue
        if writer is None:
            raise ValueError(f"a line begins with {word!r}, but the first line must begin with 'base'")
        answer = write_row(writer, RowLine.model_validate_json(value))
        lines.write("refused" if isinstance(answer, RefusedLine) else "written", answer.model_dump_json().encode())
    lines.flush()


def open_writer(line: BaseLine, settings: InferenceSettings) -> ConversationWriter:
    """Create the tokenizer of written conversations for the base model in the folder that `line` names.

    Raises `VersionUnusable` if the folder has no tokenizer or no model configuration.
    """
    folder = Path(line.folder)
    for name in (versions.TOKENIZER_FILE, "config.json"):
        if not (folder / name).is_file():
            raise VersionUnusable(f"{folder} has no {name}; name a Hugging Face folder with a fast tokenizer")
    parsers = Parsers(TOOL_PARSERS.get(settings.tool_parser), REASONING_PARSERS.get(settings.reasoning_parser))
    context = _context(folder)
    return ConversationWriter(
        ChatTokenizer(folder, _manifest(folder)), parsers, min(context, line.tokens_max or context)
    )


def write_row(writer: ConversationWriter, row: RowLine) -> WrittenLine | RefusedLine:
    """Return the tokens of a row, or the reason why it cannot be tokenized."""
    try:
        answers = tuple(
            writer.write(row.prompt, answer, row.tools, frozenset(row.untrained), with_texts=row.shown)
            for answer in row.answers
        )
    except UntrainableConversation as error:
        return RefusedLine(number=row.number, kind=error.kind, reason=str(error))
    return WrittenLine(number=row.number, answers=answers)


def _manifest(folder: Path) -> Manifest:
    """Return a manifest of a folder without weights and with a placeholder fingerprint, to open its tokenizer."""
    paths = [path for path in versions.model_files(folder) if not versions.is_weights(path.name)]
    files = [(path.relative_to(folder).as_posix(), versions.file_digest(path), path.stat().st_size) for path in paths]
    return Manifest(
        name="base",
        lineage="written",
        step=0,
        files=tuple(File(path=name, blob=BlobRef(uri="none", sha256=sha, size=size)) for name, sha, size in files),
        fingerprint=_PLACEHOLDER,
        tokenizer_sha256=versions.file_digest(folder / versions.TOKENIZER_FILE),
        template_sha256=versions.template_digest(folder),
    )


def _context(folder: Path) -> int:
    """Return the context length in the model's configuration."""
    try:
        config: Any = json.loads(read_user_text(folder / "config.json"))
        text = config.get("text_config") or config
        return int(text.get("max_position_embeddings") or _UNBOUNDED)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise VersionUnusable(f"{folder}: its config.json cannot be read: {error}") from None


if __name__ == "__main__":
    SERVICE.main()
