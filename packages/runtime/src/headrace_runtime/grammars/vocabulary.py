"""The vocabulary of a tokenizer in the form that the grammar library reads.

The library could read `tokenizer.json` itself, but with other rules than the tokenizer's decoder. Then it would allow
other text than answers contain. So it gets the bytes that decoding yields (`headrace_runtime.grammars.token_bytes`).
Tokens whose decoded text differs from their spelling are not allowed in constrained answers.

Masks depend on everything here. Replicas and trainer must build vocabularies by the same code from the same tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace_runtime.errors import HeadraceError
from headrace_runtime.grammars.token_bytes import read_token_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llguidance import LLTokenizer

LIBRARY = "llguidance"
SAMPLES = (
    '{"name": "search", "arguments": {"query": "two  words", "limit": 3, "exact": true, "none": null}}',
    f'{{"all": "{string.ascii_letters}{string.digits}"}}\n[1.5e-3, -2]',
    "".join(character for character in string.printable if character.isprintable()),
)
"""Texts by which tokenizers are compared."""
_EXAMPLES_MAX = 5
_REASON_LENGTH_MAX = 300
_TEXT_BYTES = (ord("\n"), *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes of JSON in UTF-8, limited to the Unicode planes with characters: some vocabularies lack the other bytes."""


def library_version() -> str:
    """Return the installed version of the grammar library. Masks of other versions may differ."""
    return importlib.metadata.version(LIBRARY)


class VocabularyUnreadable(HeadraceError):
    """The tokenizer cannot be used with grammars. The message names the cause."""


@dataclass(frozen=True)
class LibraryVocabulary:
    """A vocabulary as the grammar library reads it."""

    words: LLTokenizer
    tokens: list[bytes]
    """Bytes of each token."""
    unlike: Mapping[str, str]
    """Decoded text of the tokens that are not allowed, because it differs from their spelling."""
    end_id: int
    digest: str
    """SHA-256 of all that masks depend on: the tokens' bytes, which of them are special, and how text is tokenized."""


class _LibraryTokenizer:
    """The interface that `llguidance.TokenizerWrapper` requires of a tokenizer."""

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
        """Tokenize text that a grammar forces, which may be in the middle of an answer.

        The tokenizer's own ids are used if they spell exactly this text. Some tokenizers add a space before it.
        """
        if not isinstance(text, str):
            raise TypeError("text alone can be tokenized")
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


def library_vocabulary(inner: Any, vocabulary: int, end_id: int) -> LibraryVocabulary:
    """Return the grammar library's vocabulary for a model with `vocabulary` token ids. Takes up to a second.

    Args:
        inner: a `tokenizers.Tokenizer`, as transformers opens it.
        vocabulary: number of token ids of the model.
        end_id: token that ends an answer.

    Raises:
        VocabularyUnreadable: some text has no tokens, or the library refuses the vocabulary.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    last_id = max(inner.get_vocab(with_added_tokens=True).values(), default=0)
    read = read_token_bytes(inner, max(vocabulary, last_id + 1))
    source = _LibraryTokenizer(inner, list(read.data), vocabulary, end_id)
    missing = source.unspelled()
    if missing:
        examples = ", ".join(f"0x{byte:02X}" for byte in missing[:_EXAMPLES_MAX])
        raise VocabularyUnreadable(f"{len(missing)} bytes of UTF-8 have no token of their own, among them {examples}")
    try:
        words = LLTokenizer(TokenizerWrapper(source), n_vocab=len(source.tokens), eos_token=end_id)
    except Exception as error:
        reason = str(error)[:_REASON_LENGTH_MAX]
        raise VocabularyUnreadable(f"the grammar library refuses the vocabulary: {reason}") from error
    return LibraryVocabulary(words, source.tokens, read.unlike, end_id, source.digest())
