"""Tokenization of control tokens in messages and tool results as plain text.

A chat template joins its own control tokens and the texts of messages into one string, in which `<|im_end|>` looks the
same in both. So before rendering, each control token in a text is replaced by a stand-in: random digits that only this
process knows, which templates, JSON and trimming do not change. Texts without control tokens and their tokens do not
change. After rendering, each part between two real control tokens that contains a stand-in is tokenized again from its
original text, by a tokenizer without control tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from headrace_inference.chat.parsers import tags

_SECRET = "".join(secrets.choice("0123456789") for _ in range(24))
"""Drawn once per process, because a prompt is compared with the prompt before it."""
_NUMBER_DIGITS = 6
_STAND_IN = re.compile(rf"{_SECRET}([0-9]{{{_NUMBER_DIGITS}}})")
_MARKER = re.compile(r"\W.*\W", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _ControlToken:
    """A control token of the tokenizer. `left` and `right` are whether it strips the whitespace on that side."""

    token_id: int
    text: str
    left: bool
    right: bool


class PlainText:
    """Tokenizer of chat messages that treats control tokens in users' texts as plain text, so that a message cannot
    imitate the chat template. Thread-safe.

    Args:
        inner: a `tokenizers.Tokenizer`.
        template: the chat template.
    """

    def __init__(self, inner: Any, template: str) -> None:
        self._inner = inner
        self._tags = tags()
        added = inner.get_added_tokens_decoder()
        self._added = {number: _ControlToken(number, t.content, t.lstrip, t.rstrip) for number, t in added.items()}
        self._every = _any_of([token.text for token in self._added.values()])
        markers = [
            token.content for token in added.values() if token.special or self._is_marker(token.content, template)
        ]
        self._names = dict(enumerate(sorted({*markers})))
        self._numbers = {text: number for number, text in self._names.items()}
        self._markers = _any_of(markers)
        self._controls = _any_of(
            [token.content for token in added.values() if token.special and token.content not in self._tags]
        )
        self._forbidden = frozenset(number for number, token in added.items() if token.content in self._numbers)
        words = inner.get_vocab(with_added_tokens=False)
        made_up = any(token.normalized or token.content in words for token in added.values())
        self._normalizes = inner.normalizer is not None and made_up

    @cached_property
    def _plain_tokenizer(self) -> Any:
        """Copy of the tokenizer `inner` without control tokens. `_SECRET` is its only added token.

        `_SECRET` is prepended to a text inside of the prompt and its id is removed, because some tokenizers add a space
        at the beginning of a text.
        """
        from tokenizers import AddedToken, Tokenizer

        without: dict[str, object] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        bare = Tokenizer.from_str(json.dumps(json.loads(self._inner.to_str()) | without))
        bare.add_special_tokens([AddedToken(_SECRET, normalized=False)])
        return bare

    def mask(self, value: Any, *, answer: bool = False) -> Any:
        """Return a copy of the JSON value `value` with stand-ins for the control tokens in all strings.

        If `answer` is true, the model wrote the value, and the tags of tool calls and reasoning are not replaced.
        """
        if isinstance(value, str):
            return self._mask(value, self._controls if answer else self._markers)
        if isinstance(value, dict):
            return {self.mask(key, answer=answer): self.mask(inner, answer=answer) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.mask(inner, answer=answer) for inner in value]
        return value

    def unmask(self, text: str) -> str:
        """Return `text` with the original control tokens in place of stand-ins."""
        return _STAND_IN.sub(lambda match: self._names[int(match[1])], text)

    def encode(self, text: str) -> list[int]:
        """Tokenize text that the chat template rendered. The template's control tokens become special tokens; those
        that `PlainText` masked in users' texts become ordinary text.
        """
        ids = ids_of(self._inner, text)
        if _SECRET not in text:
            return ids
        positions = [position for position, token in enumerate(ids) if token in self._added]
        matches = self._every.finditer(text) if self._every else iter(())
        parts = _parts(text, [(match.start(), match.end()) for match in matches])
        controls = [self._added[ids[position]] for position in positions]
        if parts[1::2] != [control.text for control in controls]:
            parts, controls, positions = self._split_by_offsets(text)
        encoded: list[int] = []
        begin = 0
        for number, end in enumerate([*positions, len(ids)]):
            part = parts[2 * number]
            if _SECRET in part:
                part = part.lstrip() if number and controls[number - 1].right else part
                part = part.rstrip() if number < len(controls) and controls[number].left else part
                encoded += self._encode_plain(self.unmask(part), first=number == 0)
            else:
                encoded += ids[begin:end]
            encoded += ids[end : end + 1]
            begin = end + 1
        return encoded

    def _mask(self, text: str, marks: re.Pattern[str] | None) -> str:
        if marks is None:
            return text
        masked = marks.sub(self._stand_in, text)
        return self._mask_disguised(masked) if self._normalizes else masked

    def _mask_disguised(self, text: str) -> str:
        """Replace parts of `text` that become control tokens only by the tokenizer's normalization."""
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=False)
        for token, (start, end) in reversed([*zip(encoding.ids, encoding.offsets, strict=True)]):
            if token in self._forbidden and self._added[token].text not in self._tags:
                text = text[:start] + self._number(self._added[token].text) + text[end:]
        return text

    def _stand_in(self, match: re.Match[str]) -> str:
        return self._number(match[0])

    def _number(self, control: str) -> str:
        return f"{_SECRET}{self._numbers[control]:0{_NUMBER_DIGITS}}"

    def _split_by_offsets(self, text: str) -> tuple[list[str], list[_ControlToken], list[int]]:
        """Split a text at its control tokens, by the tokenizer's offsets. This is slower than the search in `encode`.

        Returns:
            The parts, the control tokens, and the positions of these among the token ids.
        """
        encoding = self._inner.encode(text, add_special_tokens=False)
        positions = [position for position, token in enumerate(encoding.ids) if token in self._added]
        parts = _parts(text, [encoding.offsets[position] for position in positions])
        return parts, [self._added[encoding.ids[position]] for position in positions], positions

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        """Tokenize `text` so that no control token results. `first` is whether it begins the prompt."""
        if not text:
            return []
        ids = ids_of(self._plain_tokenizer, text) if first else ids_of(self._plain_tokenizer, _SECRET + text)[1:]
        if self._forbidden.isdisjoint(ids) or len(text) == 1:
            return ids
        half = self._cut_position(text)  # a vocabulary may contain a control token as an ordinary word
        return self._encode_plain(text[:half], first=first) + self._encode_plain(text[half:], first=False)

    def _is_marker(self, text: str, template: str) -> bool:
        """Return whether an added token that is not marked as special is a control token.

        That is a tag of a parser, or a token that the template writes. Many vocabularies add runs of spaces, which are
        not control tokens.
        """
        return text in self._tags or (not text.isspace() and _MARKER.fullmatch(text) is not None and text in template)

    def _cut_position(self, text: str) -> int:
        """Return a position at which to cut `text`, inside the control token closest to its middle.

        It is the middle if there is no control token, and after a control token of a single character.
        """
        matches = self._markers.finditer(text) if self._markers else iter(())
        positions = [min(match.start() + 1, len(text) - 1) for match in matches]
        return min(positions or [len(text) // 2], key=lambda position: abs(position - len(text) // 2))


def ids_of(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Tokenize a text, and release the interpreter's lock meanwhile, which `Tokenizer.encode` does not."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the longest of `texts` at each position, as tokenizers do."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _parts(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """Split a text into the parts before, in and after each span."""
    return list(_cut_at(text, spans))


def _cut_at(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    at = 0
    for start, end in spans:
        yield text[at:start]
        yield text[start:end]
        at = end
    yield text[at:]
