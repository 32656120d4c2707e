"""Check of a vocabulary for grammars: sample texts must survive a round trip through tokenizer, library and decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_runtime.grammars.vocabulary import (
    SAMPLES,
    LibraryVocabulary,
    VocabularyUnreadable,
    allows,
    library_vocabulary,
)
from headrace_runtime.process.logs import get_logger

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = get_logger(__name__)
_EXAMPLES_MAX = 5
_ANY_TEXT = "start: /(?s:.*)/"


def read_vocabulary(tokenizer: ChatTokenizer, vocabulary: int, end_id: int) -> LibraryVocabulary:
    """Return the grammar library's vocabulary for a model with `vocabulary` token ids. Takes up to a second.

    Raises:
        VocabularyUnreadable: the grammar library and the tokenizer disagree.
    """
    library = library_vocabulary(tokenizer.transformers_tokenizer.backend_tokenizer, vocabulary, end_id)
    for sample in SAMPLES:
        _check_round_trip(tokenizer, library.tokens, library.words, sample)
    if library.unlike:
        unlike = {name: text[:20] for name, text in list(library.unlike.items())[:_EXAMPLES_MAX]}
        log.warning("tokens_not_held", count=len(library.unlike), examples=unlike)
    return library


def _check_round_trip(tokenizer: ChatTokenizer, tokens: Sequence[bytes], words: LLTokenizer, sample: str) -> None:
    """Check that the tokens of a sample text decode to it, and that the library allows and accepts each of them."""
    from llguidance import LLMatcher

    ids = tokenizer.encode(sample)
    spelled = b"".join(tokens[number] for number in ids)
    if spelled.removeprefix(b" ") != sample.encode():
        raise VocabularyUnreadable(f"the tokens of {_difference(sample, spelled.decode('utf-8', 'replace'))}")
    text = tokenizer.text_of(ids)
    if text.removeprefix(" ") != sample:
        raise VocabularyUnreadable(f"decoding the tokens of {_difference(sample, text)}")
    matcher = LLMatcher(words, _ANY_TEXT, log_level=0)
    mask = np.zeros((words.vocab_size + 31) // 32, np.int32)
    for number in ids:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = allows(mask, number)
        if not allowed or not matcher.consume_token(number):
            token: Any = tokenizer.token(number).text
            verb = "consume" if allowed else "allow"
            raise VocabularyUnreadable(f"the grammar library does not {verb} token {number} ({token!r}) as text")


def _difference(sample: str, decoded: str) -> str:
    """Return a phrase that shows the first difference between a sample and its decoded tokens."""
    other = decoded.removeprefix(" ")
    at = next((n for n, (a, b) in enumerate(zip(sample, other, strict=False)) if a != b), min(len(sample), len(other)))
    return f"{sample[at : at + 12]!r} yields {other[at : at + 12]!r}"
