"""A tokenizer's vocabulary as the grammar library wants it, checked by a round trip.

The library would read `tokenizer.json` itself, and by other rules than the tokenizer decodes by: what it then allows is
not what is read. So it gets the bytes that decoding really yields (`headrace_inference.chat.vocabulary`). A token that
decodes to something else than it is spelled takes no part in held answers.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.vocabulary import TokenBytes, read_token_bytes
from headrace_runtime.errors import HeadraceError
from headrace_runtime.logs import get_logger

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = get_logger(__name__)
_SHOWN = 5
_SAMPLES = (
    '{"name": "search", "arguments": {"query": "two  words", "limit": 3, "exact": true, "none": null}}',
    f'{{"all": "{string.ascii_letters}{string.digits}"}}\n[1.5e-3, -2]',
    "".join(character for character in string.printable if character.isprintable()),
)
_TEXT_BYTES = (ord("\n"), *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""The bytes that JSON in UTF-8 is made of, of the planes that have characters: some vocabularies lack the others."""
_ANY_TEXT = "start: /(?s:.*)/"


class VocabularyUnreadable(HeadraceError):
    """No answer of this tokenizer's model can be held to a form; the message names the cause."""


class _Source:
    """What `llguidance.TokenizerWrapper` asks of a tokenizer."""

    def __init__(self, tokenizer: ChatTokenizer, read: TokenBytes, vocabulary: int, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = end_id
        self.bos_token_id = None
        without_text = {number for number, data in enumerate(read.data) if not data}
        without_row = range(vocabulary, len(read.data))
        self.special_token_ids = sorted(tokenizer.control_ids | {end_id} | without_text | {*without_row})
        self.tokens = [data or f"<without text {number}>".encode() for number, data in enumerate(read.data)]
        apart = frozenset(self.special_token_ids)
        spelled = {data: number for number, data in enumerate(self.tokens) if number not in apart}
        self._spelled = spelled
        self._longest = max(map(len, spelled), default=0)

    def __call__(self, text: str) -> list[int]:
        """Tokenize what a grammar forces, which may stand in the middle of an answer.

        The tokenizer's own ids are taken where they spell exactly this text; some put a space before it.
        """
        if not isinstance(text, str):
            raise TypeError("text alone can be tokenized")
        data = text.encode()
        ids = self._tokenizer.encode(text)
        return ids if b"".join(self.tokens[number] for number in ids) == data else self._longest_first(data)

    def unspelled(self) -> bytes:
        """Return the bytes of text that no token alone spells."""
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
    """Return the vocabulary of a model with so many token ids; up to a second for a large one.

    Raises `VocabularyUnreadable` where the grammar library and the tokenizer disagree.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    read = read_token_bytes(tokenizer.outer.backend_tokenizer, max(vocabulary, tokenizer.last_id + 1))
    source = _Source(tokenizer, read, vocabulary, end_id)
    missing = source.unspelled()
    if missing:
        shown = ", ".join(f"0x{byte:02X}" for byte in missing[:_SHOWN])
        raise VocabularyUnreadable(f"{len(missing)} bytes of UTF-8 have no token of their own, among them {shown}")
    try:
        words = LLTokenizer(TokenizerWrapper(source), n_vocab=len(source.tokens), eos_token=end_id)
    except Exception as error:
        raise VocabularyUnreadable(f"the grammar library refuses the vocabulary: {str(error)[:300]}") from error
    for sample in _SAMPLES:
        _check_round_trip(tokenizer, source, words, sample)
    if read.unlike:
        examples = {name: text[:20] for name, text in list(read.unlike.items())[:_SHOWN]}
        log.warning("tokens_not_held", count=len(read.unlike), examples=examples)
    return words


def _check_round_trip(tokenizer: ChatTokenizer, source: _Source, words: LLTokenizer, sample: str) -> None:
    """Text, tokens, bytes and text again are one; and each token is allowed where it is then consumed."""
    from llguidance import LLMatcher

    ids = tokenizer.encode(sample)
    spelled = b"".join(source.tokens[number] for number in ids)
    if spelled.removeprefix(b" ") != sample.encode():
        raise VocabularyUnreadable(f"the tokens of {_apart(sample, spelled.decode('utf-8', 'replace'))}")
    text = tokenizer.text_of(ids)
    if text.removeprefix(" ") != sample:
        raise VocabularyUnreadable(f"decoding the tokens of {_apart(sample, text)}")
    matcher = LLMatcher(words, _ANY_TEXT, log_level=0)
    mask = np.zeros((words.vocab_size + 31) // 32, np.int32)
    for number in ids:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = int(mask[number // 32]) >> (number % 32) & 1
        if not allowed or not matcher.consume_token(number):
            shown: Any = tokenizer.token(number).text
            verb = "consume" if allowed else "allow"
            raise VocabularyUnreadable(f"the grammar library does not {verb} token {number} ({shown!r}) as text")


def _apart(sample: str, found: str) -> str:
    """Show where a sample and what became of it begin to differ."""
    other = found.removeprefix(" ")
    at = next((n for n, (a, b) in enumerate(zip(sample, other, strict=False)) if a != b), min(len(sample), len(other)))
    return f"{sample[at : at + 12]!r} yields {other[at : at + 12]!r}"
