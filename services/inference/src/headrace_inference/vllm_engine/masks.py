"""Grammars in vLLM's engine cores, with the masks that the trainer computes again.

vLLM's back end `guidance` reads the tokenizer by rules of its own and allows one end token alone. Its masks would then
differ from those of `headrace_runtime.grammars`. vLLM calls `use_own_masks` in each of its processes, because it is
announced as a plugin of vLLM. The module imports vLLM, so `library` imports it only when a core is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vllm.v1.structured_output as vllm_grammars
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

from headrace_runtime.grammars.vocabulary import VocabularyUnreadable, allow_stops, library_vocabulary


class HeadraceBackend(GuidanceBackend):  # type: ignore[misc]
    """vLLM's back end `guidance` with the vocabulary of `headrace_runtime.grammars`.

    The trainer uses the same vocabulary, so its masks are equal to those of this back end.
    """

    @staticmethod
    def _build_ll_tokenizer(tokenizer: Any, vocab_size: int) -> Any:
        try:
            return library_vocabulary(tokenizer.backend_tokenizer, vocab_size, tokenizer.eos_token_id).words
        except VocabularyUnreadable:  # the service refuses grammars of this model before they come here
            return GuidanceBackend._build_ll_tokenizer(tokenizer, vocab_size)

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None) -> Any:
        grammar = super().compile_grammar(request_type, grammar_spec, stop_token_ids)
        stop_ids = frozenset(token for token in stop_token_ids or () if token < grammar.vocab_size)
        return HeadraceGrammar(grammar.ll_matcher, grammar.ll_tokenizer, grammar.vocab_size, stop_ids)


class HeadraceGrammar(GuidanceGrammar):  # type: ignore[misc]
    """vLLM's grammar of one choice, with the masks of `headrace_runtime.grammars.vocabulary.GrammarGuide`."""

    def __init__(self, matcher: Any, words: Any, vocabulary: int, stop_ids: frozenset[int]) -> None:
        super().__init__(ll_matcher=matcher, ll_tokenizer=words, vocab_size=vocabulary)
        self._stop_ids = stop_ids

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        end_id = self.ll_tokenizer.eos_token
        accepted: bool = super().accept_tokens(
            request_id, [end_id if token in self._stop_ids else token for token in tokens]
        )
        return accepted

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        super().fill_bitmask(bitmask, idx)
        allow_stops(bitmask[idx].numpy(), self.ll_tokenizer.eos_token, self._stop_ids)


def use_own_masks() -> None:
    """Make vLLM use `HeadraceBackend` in this process instead of its own back end `guidance`.

    vLLM calls it as its plugin `headrace_masks`, in each of its processes.
    """
    vllm_grammars.GuidanceBackend = HeadraceBackend


def check_masks() -> None:
    """Raise `RuntimeError` if vLLM does not use `HeadraceBackend`, so that its masks would differ from the
    trainer's."""
    if vllm_grammars.GuidanceBackend is not HeadraceBackend:
        raise RuntimeError(
            "vLLM has not loaded its plugin 'headrace_masks', so its masks would differ from those that turns "
            "record; install headrace-inference with its entry points, and leave VLLM_PLUGINS unset or name it there"
        )
