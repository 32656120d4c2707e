"""Turns tokens into text as they come, for each kind of tokenizer: byte-level, with byte fallback, and neither.

`tokenizers.DecodeStream` raises where bytes are no characters, and keeps the end of a text that breaks off inside one.
A model samples both. docs/decisions/archive says what was tried.
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
"""How decoding shows bytes that are no whole character, or not yet."""
_CONTEXT = 8
"""Tokens before a portion that its text may depend on."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Decoding:
    """What a tokenizer makes of token ids. `silent` are those that are no part of the text."""

    def __init__(self, tokenizer: Any, silent: AbstractSet[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self.silent = silent

    def of(self, ids: Sequence[int]) -> str:
        """All of them at once. Of a run of byte tokens that is no text as a whole, this shows no character."""
        text: str = self._tokenizer.decode([i for i in ids if i not in self.silent], skip_special_tokens=False)
        return text

    @cached_property
    def bytes_of(self) -> dict[int, int]:
        """Token to byte, where a vocabulary spells what it lacks as `<0xE2>` (SentencePiece's byte fallback)."""
        if "ByteFallback" not in repr(self._tokenizer.decoder):
            return {}
        named = ((number, _BYTE.fullmatch(name)) for name, number in self._tokenizer.get_vocab().items())
        return {number: int(match[1], 16) for number, match in named if match}

    @cached_property
    def stand_in(self) -> list[int]:
        """A token that is one plain character. It takes the place of bytes among the neighbours of other tokens."""
        return [token for token, byte in self.bytes_of.items() if byte == ord("?")]


class Detokenizer:
    """Never gives out half a character; `end` gives what is left.

    What was given out depends on the tokens alone, not on the portions they came in: a resumed stream goes on exactly
    where the one before it stopped. A token's text can depend on its neighbours, so new tokens are decoded together
    with a few before them, whose own text is cut off. Byte tokens are decoded as UTF-8, each character by itself: the
    decoders of tokenizers take back a whole run of them when one byte of it is wrong, which a stream cannot.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._before: list[int] = []
        self._open: list[int] = []
        """Tokens whose text was not given out yet."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text of the next tokens. NUL comes out as a replacement character: it is in no event and in no
        database."""
        return self._text(token_ids).replace("\0", _HALF)

    def _text(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._decoding.bytes_of
        if not bytes_of:
            return self._words(token_ids)
        heard = [token for token in token_ids if token not in self._decoding.silent]
        found = []
        for are_bytes, part in groupby(heard, bytes_of.__contains__):
            if are_bytes:
                found += [self._rest(), self._characters(bytes(bytes_of[token] for token in part))]
            else:
                found += [self._characters(b"", final=True), self._words(list(part))]
        return "".join(found)

    def end(self) -> str:
        """Bytes that never became a character come out as replacement characters."""
        return (self._rest() + self._characters(b"", final=True)).replace("\0", _HALF)

    def _characters(self, data: bytes, *, final: bool = False) -> str:
        text = self._bytes.decode(data, final)
        if text:
            self._before = self._decoding.stand_in
        return text

    def _words(self, token_ids: Sequence[int]) -> str:
        text = self._open_text(token_ids)
        if text.endswith(_HALF) and len(token_ids) > 1:
            return "".join(self._words((token,)) for token in token_ids)
        self._open += token_ids
        if not text or text.endswith(_HALF):
            return ""
        self._before, self._open = self._open[-_CONTEXT:], []
        return text

    def _rest(self) -> str:
        if not self._open:
            return ""
        text = self._open_text(())
        self._before, self._open = [*self._before, *self._open][-_CONTEXT:], []
        return text

    def _open_text(self, more: Sequence[int]) -> str:
        before = self._decoding.of(self._before)
        return self._decoding.of([*self._before, *self._open, *more])[len(before) :]
