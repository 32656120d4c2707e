"""The vocabulary of a tokenizer in the form that the grammar library reads, checked by a round trip.

The library could read `tokenizer.json` itself, but with other rules than the tokenizer's decoder. Then it would allow
other text than answers contain. So it gets the bytes that decoding yields (`headrace_inference.chat.vocabulary`).
Tokens whose decoded text differs from their spelling are not allowed in constrained answers.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.vocabulary import TokenBytes, read_token_bytes
from headrace_runtime.errors import HeadraceError
from headrace_runtime.process.logs import get_logger

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = get_logger(__name__)
_EXAMPLES_MAX = 5
_SAMPLES = (
    '{"name": "search", "arguments": {"query": "two  words", "limit": 3, "exact": true, "none": null}}',
    f'{{"all": "{string.ascii_letters}{string.digits}"}}\n[1.5e-3, -2]',
    "".join(character for character in string.printable if character.isprintable()),
)
_TEXT_BYTES = (ord("\n"), *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes of JSON in UTF-8, limited to the Unicode planes with characters: some vocabularies lack the other bytes."""
_ANY_TEXT = "start: /(?s:.*)/"


class VocabularyUnreadable(HeadraceError):
    """The tokenizer cannot be used with grammars. The message names the cause."""


class _LibraryTokenizer:
    """The interface that `llguidance.TokenizerWrapper` requires of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer, read: TokenBytes, vocabulary: int, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_id
        self.bos_token_id = None
        without_text = {number for number, data in enumerate(read.data) if not data}
        without_row = range(vocabulary, len(read.data))
        self.special_token_ids = sorted(tokenizer.control_ids | {end_id} | without_text | {*without_row})
        self.tokens = [data or f"<without text {number}>".encode() for number, data in enumerate(read.data)]
        special = frozenset(self.special_token_ids)
        spelled = {data: number for number, data in enumerate(self.tokens) if number not in special}
        self._spelled = spelled
        self._longest = max(map(len, spelled), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokenize text that a grammar forces, which may be in the middle of an answer.

        The tokenizer's own ids are used if they spell exactly this text. Some tokenizers add a space before it.
        """
        if not isinstance(text, str):
            raise TypeError("text alone can be tokenized")
        data = text.encode()
        ids = self._tokenizer.encode(text)
        return ids if b"".join(self.tokens[number] for number in ids) == data else self._longest_first(data)

    def unspelled(self) -> bytes:
        """Return the bytes of text that have no token of their own."""
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


def read_vocabulary(tokenizer: ChatTokenizer, vocabulary: int, end_id: int) -> LLTokenizer:
    """Return the grammar library's tokenizer for a model with `vocabulary` token ids. Takes up to a second.

    Raises:
        VocabularyUnreadable: the grammar library and the tokenizer disagree.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    read = read_token_bytes(tokenizer.outer.backend_tokenizer, max(vocabulary, tokenizer.last_id + 1))
    source = _LibraryTokenizer(tokenizer, read, vocabulary, end_id)
    missing = source.unspelled()
    if missing:
        examples = ", ".join(f"0x{byte:02X}" for byte in missing[:_EXAMPLES_MAX])
        raise VocabularyUnreadable(f"{len(missing)} bytes of UTF-8 have no token of their own, among them {examples}")
    try:
        words = LLTokenizer(TokenizerWrapper(source), n_vocab=len(source.tokens), eos_token=end_id)
    except Exception as error:
        raise VocabularyUnreadable(f"the grammar library refuses the vocabulary: {str(error)[:300]}") from error
    for sample in _SAMPLES:
        _check_round_trip(tokenizer, source, words, sample)
    if read.unlike:
        unlike = {name: text[:20] for name, text in list(read.unlike.items())[:_EXAMPLES_MAX]}
        log.warning("tokens_not_held", count=len(read.unlike), examples=unlike)
    return words


def _check_round_trip(tokenizer: ChatTokenizer, source: _LibraryTokenizer, words: LLTokenizer, sample: str) -> None:
    """Check that the tokens of a sample spell and decode to it, and that the library allows and consumes each one."""
    from llguidance import LLMatcher

    ids = tokenizer.encode(sample)
    spelled = b"".join(source.tokens[number] for number in ids)
    if spelled.removeprefix(b" ") != sample.encode():
        raise VocabularyUnreadable(f"the tokens of {_difference(sample, spelled.decode('utf-8', 'replace'))}")
    text = tokenizer.text_of(ids)
    if text.removeprefix(" ") != sample:
        raise VocabularyUnreadable(f"decoding the tokens of {_difference(sample, text)}")
    matcher = LLMatcher(words, _ANY_TEXT, log_level=0)
    mask = np.zeros((words.vocab_size + 31) // 32, np.int32)
    for number in ids:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = int(mask[number // 32]) >> (number % 32) & 1
        if not allowed or not matcher.consume_token(number):
            token: Any = tokenizer.token(number).text
            verb = "consume" if allowed else "allow"
            raise VocabularyUnreadable(f"the grammar library does not {verb} token {number} ({token!r}) as text")


def _difference(sample: str, decoded: str) -> str:
    """Describe the first difference between a sample and its decoded tokens."""
    other = decoded.removeprefix(" ")
    at = next((n for n, (a, b) in enumerate(zip(sample, other, strict=False)) if a != b), min(len(sample), len(other)))
    return f"{sample[at : at + 12]!r} yields {other[at : at + 12]!r}"
