"""Incremental conversion of tokens to text, for tokenizers that are byte-level, have byte fallback, or neither.

`tokenizers.DecodeStream` raises an error for bytes that are not a character, and loses the end of a text that stops
inside one. A model samples both. docs/decisions/archive describes what was tried.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from itertools import groupby
from typing import Any

_HALF = "\N{REPLACEMENT CHARACTER}"
"""Decoders return this for bytes that are not, or not yet, a complete character."""
_CONTEXT = 8
"""Number of preceding tokens on which the text of a token may depend."""
_INCOMPLETE_MAX = 3
"""Largest number of tokens that an incomplete character has, one for each of its bytes."""
_OPEN_MAX = 16
"""Number of tokens without certain text from which on the text of the first of them is determined."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder:
    """Stateless decoder of token lists, shared by all `Detokenizer`s of a tokenizer. Tokens in `silent` have no
    text."""

    def __init__(self, tokenizer: Any, silent: AbstractSet[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self.silent = silent

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens that are decoded together.

        A run of byte tokens that is not valid UTF-8 becomes replacement characters only.
        """
        text: str = self._tokenizer.decode([i for i in ids if i not in self.silent], skip_special_tokens=False)
        return text

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of tokens after the tokens in `before`, on which it may depend."""
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    @cached_property
    def bytes_of(self) -> dict[int, int]:
        """Byte of each token that spells one as `<0xE2>` (SentencePiece's byte fallback)."""
        if "ByteFallback" not in repr(self._tokenizer.decoder):
            return {}
        named = ((number, _BYTE.fullmatch(name)) for name, number in self._tokenizer.get_vocab().items())
        return {number: int(match[1], 16) for number, match in named if match}

    @cached_property
    def placeholder_tokens(self) -> list[int]:
        """The byte token of "?" as a list, which is empty if the tokenizer has no byte tokens.

        When words are decoded after a character that consists of byte tokens, it replaces these byte tokens.
        """
        return [token for token, byte in self.bytes_of.items() if byte == ord("?")]


class Detokenizer:
    """Incremental decoder of one answer's tokens to whole characters. `end` returns the remaining text.

    The text depends on the tokens alone, not on the portions in which they arrive, so a resumed stream continues
    exactly where the earlier one stopped. A token's text can depend on its neighbours, so new tokens are decoded
    together with a few preceding tokens, whose own text is cut off. Byte tokens are decoded as UTF-8, character by
    character: decoders of tokenizers replace a whole run of bytes if one of them is invalid, and a stream cannot take
    text back.
    """

    def __init__(self, decoding: TokenDecoder) -> None:
        self._decoding = decoding
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] = []
        self._open: list[int] = []
        """Tokens whose text was not returned yet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text of the next tokens. NUL is replaced, because events and databases cannot store it."""
        return self._text(token_ids).replace("\0", _HALF)

    def _text(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._decoding.bytes_of
        if not bytes_of:
            return self._words(token_ids)
        with_text = [token for token in token_ids if token not in self._decoding.silent]
        texts = []
        for are_bytes, part in groupby(with_text, bytes_of.__contains__):
            if are_bytes:
                texts += [self._rest(), self._characters(bytes(bytes_of[token] for token in part))]
            else:
                texts += [self._characters(b"", final=True), self._words(list(part))]
        return "".join(texts)

    def end(self) -> str:
        """Return the remaining text. Incomplete characters become replacement characters."""
        return (self._rest() + self._characters(b"", final=True)).replace("\0", _HALF)

    def _characters(self, data: bytes, *, final: bool = False) -> str:
        text = self._bytes.decode(data, final)
        if text:
            self._before = self._decoding.placeholder_tokens
        return text

    def _words(self, token_ids: Sequence[int]) -> str:
        text = self._open_text(token_ids)
        if text.endswith(_HALF) and len(token_ids) > 1:
            return "".join(self._words((token,)) for token in token_ids)
        self._open += token_ids
        if not text or text.endswith(_HALF):
            return self._certain_text(text) if len(self._open) >= _OPEN_MAX else ""
        self._before, self._open = self._open[-_CONTEXT:], []
        return text

    def _certain_text(self, text: str) -> str:
        """Return the beginning of `text` that later tokens cannot change: all but its last three bytes.

        This bounds the buffered text if a model samples endless bytes that are no characters. Decoding all of them for
        each token would take seconds per thousand tokens.
        """
        for count in range(len(self._open) - _INCOMPLETE_MAX, 0, -1):
            first, rest = self._open[:count], self._open[count:]
            head = self._decoding.decode_after(self._before, first)
            if head + self._decoding.decode_after(first[-_CONTEXT:], rest) == text:
                self._before, self._open = [*self._before, *first][-_CONTEXT:], rest
                return head
        return self._rest() if len(self._open) >= 4 * _OPEN_MAX else ""

    def _rest(self) -> str:
        if not self._open:
            return ""
        text = self._open_text(())
        self._before, self._open = [*self._before, *self._open][-_CONTEXT:], []
        return text

    def _open_text(self, more: Sequence[int]) -> str:
        return self._decoding.decode_after(self._before, [*self._open, *more])
