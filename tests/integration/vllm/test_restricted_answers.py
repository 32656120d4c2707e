"""Tests that answers of vLLM restricted by a grammar or truncation are trained with the token sets that vLLM sampled
from.

The tolerances are those of float32 on a CPU. vLLM computes the masks through `HeadraceBackend`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.vllm_engine.engine import VllmEngine
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import TokenGrammar
from tests.support import presence, tiny_model
from tests.support.restricted import (
    PARALLEL,
    VOCABULARY,
    Json,
    Replica,
    play_forced_calls,
    play_json_answers,
    play_truncated_answers,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
DIFFERENCE_MAX = 1e-4
SETTINGS = VllmSettings(dtype="float32", sequences_max=PARALLEL, context_tokens_max=512, batch_tokens_max=256)
WAYS: tuple[Json, ...] = (
    {"top_k": 5}, {"top_p": 0.2}, {"top_p": 0.3, "top_k": 40, "temperature": 0.7}, {"min_p": 0.4, "top_k": 60},
    {"min_p": 0.4, "top_p": 0.2, "temperature": 1.25},
)  # fmt: skip
"""Each leaves fewer tokens than vLLM can report."""


def masks_of(tokenizer: ChatTokenizer, record: TokenGrammar, token_ids: Sequence[int]) -> list[NDArray[np.int32]]:
    """Return the masks that vLLM's engine core applies at each position of an answer."""
    from vllm.config import StructuredOutputsConfig
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    from headrace_inference.vllm_engine.masks import HeadraceBackend

    config: Any = SimpleNamespace(structured_outputs_config=StructuredOutputsConfig(backend="guidance"))
    backend = HeadraceBackend(config, tokenizer=tokenizer.transformers_tokenizer, vocab_size=VOCABULARY)
    grammar = backend.compile_grammar(StructuredOutputOptions.GRAMMAR, record.text, {*record.stop_ids})
    masks = []
    for token in token_ids:
        bitmask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(bitmask, 0)
        masks.append(bitmask[0].numpy().copy())
        assert grammar.accept_tokens("r", [token])
    return masks


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    presence.need("vllm")
    from headrace_inference.vllm_engine.library import VllmLibrary

    base = tiny_model.build(tmp_path / "base", layers=1)
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, base).manifest)
    engine = VllmEngine(SETTINGS, VllmLibrary(SETTINGS))
    await engine.load(base, manifest)
    tokenizer = ChatTokenizer(base, manifest)
    replica = Replica(engine, tokenizer, manifest, base, masks_of=partial(masks_of, tokenizer))
    yield replica
    replica.grammars.close()
    await engine.stop()


async def test_restricted_answers_of_vllm_are_trained(
    replica: Replica, record_property: Callable[[str, object], None]
) -> None:
    differences = {
        "schemas": await play_json_answers(replica, 200),
        "forced_calls": await play_forced_calls(replica, 500),
        "truncated": await play_truncated_answers(replica, 500, WAYS),
    }
    for name, difference in differences.items():
        record_property(name, difference)
    assert max(differences.values()) < DIFFERENCE_MAX
