"""Vocabulary of a tokenizer in the form that the grammar library needs, and the guide that restricts sampling to a
grammar.

The library could read `tokenizer.json` itself, but its rules differ from those of the tokenizer's decoder, so it would
allow text that differs from the decoded answers. So it gets the bytes to which each token is decoded. Tokens whose
decoded text differs from their spelling are not allowed in constrained answers.

Masks depend on all of this. Replicas and trainer must build vocabularies with the same code from the same tokenizer.

Byte-level vocabularies write a byte as a printable letter (GPT-2's table). SentencePiece writes a space as `▁` and a
byte without a piece as `<0xE2>`. Converted vocabularies mix both. So each interpretation of a token's spelling is
compared with the text that the decoder adds for the token after another token.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import string
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace_runtime.errors import HeadraceError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHORS = ("a", "x", "0", "e")
LIBRARY = "llguidance"
SAMPLES = (
    '{"name": "search", "arguments": {"query": "two  words", "limit": 3, "exact": true, "none": null}}',
    f'{{"all": "{string.ascii_letters}{string.digits}"}}\n[1.5e-3, -2]',
    "".join(character for character in string.printable if character.isprintable()),
)
"""Texts whose tokenization is part of the vocabulary's digest."""
_EXAMPLES_MAX = 5
_REASON_LENGTH_MAX = 300
_TEXT_BYTES = (ord("\n"), *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes of UTF-8 text for which a vocabulary must have tokens. Those of planes without characters are left out: some
bytes."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of each token of a vocabulary.

    `data[i]` are the bytes of token `i`, or None if it has none, or if decoding it yields text that differs from its
    spelling. `unlike` contains that text by the spelling of the token.
    """

    data: Sequence[bytes | None]
    unlike: Mapping[str, str]


@cache
def byte_level_table() -> Mapping[str, int]:
    """Return GPT-2's table, which assigns a byte to each letter of byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(unprintable)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


def read_token_bytes(inner: Any, size: int) -> TokenBytes:
    """Compute the bytes of the tokens with ids below `size`.

    Args:
        inner: a `tokenizers.Tokenizer`.
        size: number of token ids of the model.
    """
    added = {number: token.content for number, token in inner.get_added_tokens_decoder().items()}
    names = {number: name for name, number in inner.get_vocab(with_added_tokens=True).items() if number < size}
    decoded = _decode_after_token(inner, names)
    data: list[bytes | None] = [None] * size
    unlike: dict[str, str] = {}
    for number, name in names.items():
        text = decoded.get(number)
        if text is None:
            unlike[name] = "(decoding it changes the token before it)"
            continue
        spelled = [added[number].encode()] if number in added else _spellings(name, text)
        data[number] = next((spelling for spelling in spelled if spelling.decode("utf-8", "replace") == text), None)
        if data[number] is None:
            unlike[name] = text
    return TokenBytes(data, unlike)


def _spellings(name: str, text: str) -> Iterator[bytes]:
    """Yield the byte sequences that a token may represent: each interpretation of its spelling, then its decoded text.

    Args:
        name: the token's spelling in the vocabulary.
        text: its decoded text. It is not yielded if it contains U+FFFD, which stands for an incomplete character.
    """
    byte = _BYTE.fullmatch(name)
    if byte is not None:
        yield bytes([int(byte[1], 16)])
    table = byte_level_table()
    if all(letter in table for letter in name):
        yield bytes(table[letter] for letter in name)
    if "\N{REPLACEMENT CHARACTER}" not in text or name == text:
        yield text.encode()


def _decode_after_token(inner: Any, names: Mapping[int, str]) -> dict[int, str]:
    """Return the text that each token adds when it follows another token. At the beginning of a text, decoders strip
    spaces."""
    anchor = next((ids[-1] for text in _ANCHORS if (ids := inner.encode(text, add_special_tokens=False).ids)), None)
    if anchor is None:
        return {}
    before = inner.decode([anchor, anchor], skip_special_tokens=False)
    numbers = list(names)
    pairs = inner.decode_batch([[anchor, anchor, number] for number in numbers], skip_special_tokens=False)
    return {number: text[len(before) :] for number, text in zip(numbers, pairs, strict=True) if text.startswith(before)}


def library_version() -> str:
    """Return the installed version of the grammar library. Other versions may compute different masks."""
    return importlib.metadata.version(LIBRARY)


class VocabularyUnreadable(HeadraceError):
    """Raised if the tokenizer cannot be used with grammars. The message is the reason."""


@dataclass(frozen=True)
class LibraryVocabulary:
    """Vocabulary of a tokenizer as an object of the grammar library, with the data that belong to it."""

    words: LLTokenizer
    tokens: list[bytes]
    """Bytes of each token."""
    unlike: Mapping[str, str]
    """Decoded text of the tokens that are not allowed because it differs from their spelling."""
    end_id: int
    digest: str
    """SHA-256 of all data that masks depend on: the bytes of the tokens, which tokens are special, and how text is
    tokenized."""


class _LibraryTokenizer:
    """Adapter of a tokenizer to the interface that `llguidance.TokenizerWrapper` requires."""

    def __init__(self, inner: Any, data: list[bytes | None], vocabulary: int, end_id: int) -> None:
        self._inner = inner
        self.eos_token_id = end_id
        self.bos_token_id = None
        control_ids = {number for number, token in inner.get_added_tokens_decoder().items() if token.special}
        without_text = {number for number, text in enumerate(data) if not text}
        without_row = range(vocabulary, len(data))
        self.special_token_ids = sorted(control_ids | {end_id} | without_text | {*without_row})
        self.tokens = [text or f"<without text {number}>".encode() for number, text in enumerate(data)]
        special = frozenset(self.special_token_ids)
        self._spelled = {text: number for number, text in enumerate(self.tokens) if number not in special}
        self._longest = max(map(len, self._spelled), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokenize text that a grammar requires, which may be in the middle of an answer.

        The tokenizer's own ids are used if their bytes are exactly this text. Some tokenizers add a space before it;
        then the longest matching tokens are used.
        """
        if not isinstance(text, str):
            raise TypeError("only text can be tokenized")
        data = text.encode()
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids if b"".join(self.tokens[number] for number in ids) == data else self._longest_first(data)

    def digest(self) -> str:
        digest = hashlib.sha256()
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        tokenized = [self(sample) for sample in SAMPLES]
        digest.update(repr((self.eos_token_id, self.special_token_ids, tokenized)).encode())
        return digest.hexdigest()

    def bytes_without_token(self) -> bytes:
        """Return the bytes of `_TEXT_BYTES` that no token of the vocabulary consists of."""
        return bytes(byte for byte in _TEXT_BYTES if bytes([byte]) not in self._spelled)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._spelled), None)
            if end is None:
                break
            ids.append(self._spelled[data[at:end]])
            at = end
        return ids


def library_vocabulary(inner: Any, vocabulary: int, end_id: int) -> LibraryVocabulary:
    """Build the grammar library's vocabulary of a tokenizer. This takes up to a second.

    Args:
        inner: a `tokenizers.Tokenizer`, as transformers opens it.
        vocabulary: number of token ids of the model.
        end_id: token that ends an answer.

    Raises:
        VocabularyUnreadable: some bytes of text have no token, or the library refuses the vocabulary.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    last_id = max(inner.get_vocab(with_added_tokens=True).values(), default=0)
    read = read_token_bytes(inner, max(vocabulary, last_id + 1))
    source = _LibraryTokenizer(inner, list(read.data), vocabulary, end_id)
    missing = source.bytes_without_token()
    if missing:
        examples = ", ".join(f"0x{byte:02X}" for byte in missing[:_EXAMPLES_MAX])
        raise VocabularyUnreadable(f"{len(missing)} bytes of UTF-8 have no token of their own, among them {examples}")
    try:
        words = LLTokenizer(TokenizerWrapper(source), n_vocab=len(source.tokens), eos_token=end_id)
    except Exception as error:
        reason = str(error)[:_REASON_LENGTH_MAX]
        raise VocabularyUnreadable(f"the grammar library refuses the vocabulary: {reason}") from error
    return LibraryVocabulary(words, source.tokens, read.unlike, end_id, source.digest())


def match_grammar(words: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar in the library's dialect of Lark to a matcher. The caller must check `LLMatcher.is_error`."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(words, text, log_level=0, limits=LLParserLimits(verbose_errors=False))


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Return whether the mask of a position allows `token`."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def allow_stops(mask: NDArray[np.int32], end_id: int, stop_ids: Set[int]) -> None:
    """Allow all `stop_ids` in the mask of a position if the mask allows `end_id`."""
    if allows(mask, end_id):
        for token in stop_ids:
            mask[token // 32] |= _BITS[token % 32]


class GrammarGuide:
    """Restriction of one choice to the tokens that a grammar allows. It implements `headrace_inference.engine.Guide`.

    At positions where the grammar allows `end_id`, all `stop_ids` are allowed.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end_id: int, stop_ids: Set[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._end_id = end_id
        self.stop_ids = stop_ids
        self._mask = np.zeros((vocabulary + 31) // 32, np.int32)
        self._violated = False

    def fresh(self) -> GrammarGuide:
        """Return a copy of the guide in its initial state, for another choice."""
        return GrammarGuide(self._matcher.deep_copy(), self._vocabulary, self._end_id, self.stop_ids)

    def replay(self, tokens: Sequence[int]) -> bool:
        """Accept tokens that another replica sampled, and return whether the grammar allows them."""
        for token in tokens:
            self.accept(token)
        return not self.error

    @property
    def error(self) -> str:
        if self._violated:
            return "the grammar does not allow a token that was sampled"
        return "the grammar needs more work for one token than the library allows" if self._matcher.is_error() else ""

    def allowed(self) -> NDArray[np.int32]:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        allow_stops(self._mask, self._end_id, self.stop_ids)
        return self._mask

    def accept(self, token: int) -> None:
        if token in self.stop_ids or self.error:
            return
        allowed = self._matcher.consume_token(token)
        self._violated = not allowed and not self._matcher.is_error()


_BITS = np.left_shift(np.ones(32, np.uint32), np.arange(32, dtype=np.uint32)).view(np.int32)
