"""Guide that constrains one choice to a grammar, with llguidance. Replicas sample by it, the trainer masks by it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def match_grammar(words: LLTokenizer, text: str) -> LLMatcher:
    """Compile a grammar in the library's dialect of Lark. The caller must check `LLMatcher.is_error`."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(words, text, log_level=0, limits=LLParserLimits(verbose_errors=False))


def allows(mask: NDArray[np.int32], token: int) -> bool:
    """Return whether the mask of a position allows a token."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def allow_stops(mask: NDArray[np.int32], end_id: int, stop_ids: Set[int]) -> None:
    """Allow all `stop_ids` in the mask of a position if it allows `end_id`."""
    if allows(mask, end_id):
        for token in stop_ids:
            mask[token // 32] |= _BITS[token % 32]


class GrammarGuide:
    """Restriction of one choice to the tokens that a grammar allows: a `headrace_inference.engine.Guide`.

    All `stop_ids` are allowed where the grammar allows `end_id`.
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
        return "the grammar needs more than a step may take" if self._matcher.is_error() else ""

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
