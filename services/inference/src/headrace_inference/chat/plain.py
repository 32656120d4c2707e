"""Tokenizes control tokens that occur in messages and tool results as plain text.

A chat template joins its own control tokens and the texts of messages to one string, in which `<|im_end|>` looks the
same wherever it comes from. So before rendering, each control token in the texts is replaced by a stand-in: digits that
nobody outside of this process knows, which templates, JSON and trimming leave alone. A text without control tokens is
not touched and its tokens are those that it always had. Afterwards only what lies between two real control tokens and
holds a stand-in is tokenized again, from its true text, by a tokenizer that knows no control tokens.
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
"""Drawn once: a prompt's stand-ins are compared with those of the prompt before it."""
_NUMBER_DIGITS = 6
_STAND_IN = re.compile(rf"{_SECRET}([0-9]{{{_NUMBER_DIGITS}}})")
_MARKER = re.compile(r"\W.*\W", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Control:
    """A token that is found in a text as a whole; `left` and `right`: with the whitespace beside it."""

    token_id: int
    text: str
    left: bool
    right: bool


class PlainText:
    """`inner` is a `tokenizers.Tokenizer`. Usable from several threads."""

    def __init__(self, inner: Any, template: str) -> None:
        self._inner = inner
        self._tags = tags()
        added = inner.get_added_tokens_decoder()
        self._added = {number: _Control(number, t.content, t.lstrip, t.rstrip) for number, t in added.items()}
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
    def _bare(self) -> Any:
        """A tokenizer like `inner` whose one added token is what a text follows that is not the first one."""
        from tokenizers import AddedToken, Tokenizer

        without: dict[str, object] = {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        bare = Tokenizer.from_str(json.dumps(json.loads(self._inner.to_str()) | without))
        bare.add_special_tokens([AddedToken(_SECRET, normalized=False)])
        return bare

    def mask(self, value: Any, *, answer: bool = False) -> Any:
        """`value`, or everything in it, with stand-ins for control tokens.

        In an `answer`, which a model wrote, the tags of calls and reasoning mean what they say.
        """
        if isinstance(value, str):
            return self._mask(value, self._controls if answer else self._markers)
        if isinstance(value, dict):
            return {self.mask(key, answer=answer): self.mask(inner, answer=answer) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.mask(inner, answer=answer) for inner in value]
        return value

    def unmask(self, text: str) -> str:
        """The text that was meant."""
        return _STAND_IN.sub(lambda found: self._names[int(found[1])], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, in which control tokens are spelled out and stand-ins are text."""
        ids = ids_of(self._inner, text)
        if _SECRET not in text:
            return ids
        places = [place for place, token in enumerate(ids) if token in self._added]
        found = self._every.finditer(text) if self._every else iter(())
        parts = _parts(text, [(match.start(), match.end()) for match in found])
        controls = [self._added[ids[place]] for place in places]
        if parts[1::2] != [control.text for control in controls]:
            parts, controls, places = self._by_offsets(text)
        encoded: list[int] = []
        begin = 0
        for number, end in enumerate([*places, len(ids)]):
            part = parts[2 * number]
            if _SECRET in part:
                part = part.lstrip() if number and controls[number - 1].right else part
                part = part.rstrip() if number < len(controls) and controls[number].left else part
                encoded += self._plain(self.unmask(part), first=number == 0)
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
        """Normalization may turn other letters into a control token, or into a word of the vocabulary that is one. It
        is found only by trying."""
        (found,) = self._inner.encode_batch([text], add_special_tokens=False)
        for token, (start, end) in reversed([*zip(found.ids, found.offsets, strict=True)]):
            if token in self._forbidden and self._added[token].text not in self._tags:
                text = text[:start] + self._number(self._added[token].text) + text[end:]
        return text

    def _stand_in(self, found: re.Match[str]) -> str:
        return self._number(found[0])

    def _number(self, control: str) -> str:
        return f"{_SECRET}{self._numbers[control]:0{_NUMBER_DIGITS}}"

    def _by_offsets(self, text: str) -> tuple[list[str], list[_Control], list[int]]:
        """As `encode` does it, slowly: from where the tokenizer says that it found control tokens."""
        found = self._inner.encode(text, add_special_tokens=False)
        places = [place for place, token in enumerate(found.ids) if token in self._added]
        parts = _parts(text, [found.offsets[place] for place in places])
        return parts, [self._added[found.ids[place]] for place in places], places

    def _plain(self, text: str, *, first: bool) -> list[int]:
        """Tokens of `text` without a control token among them."""
        if not text:
            return []
        ids = ids_of(self._bare, text) if first else ids_of(self._bare, _SECRET + text)[1:]
        if self._forbidden.isdisjoint(ids) or len(text) == 1:
            return ids
        half = self._cut(text)  # a vocabulary may hold a control token as if it were a word
        return self._plain(text[:half], first=first) + self._plain(text[half:], first=False)

    def _is_marker(self, text: str, template: str) -> bool:
        """Whether an added token that is not called special is one all the same: a tag, or what the template itself
        writes.

        Many vocabularies add runs of spaces, which are none.
        """
        return text in self._tags or (not text.isspace() and _MARKER.fullmatch(text) is not None and text in template)

    def _cut(self, text: str) -> int:
        """Inside the control token that is closest to the middle, or beside it where it is a single letter."""
        found = self._markers.finditer(text) if self._markers else iter(())
        places = [min(match.start() + 1, len(text) - 1) for match in found]
        return min(places or [len(text) // 2], key=lambda place: abs(place - len(text) // 2))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Without the interpreter's lock, which `Tokenizer.encode` would keep until it is done."""
    (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = found.ids
    return ids


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """The longest at each place, as tokenizers find them."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _parts(text: str, spans: Sequence[tuple[int, int]]) -> list[str]:
    """What lies before, in and after each span, in turn."""
    return list(_cut_at(text, spans))


def _cut_at(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    at = 0
    for start, end in spans:
        yield text[at:start]
        yield text[start:end]
        at = end
    yield text[at:]
