"""Ground of the engine contract, which serves two complete versions and two adapters, and promises about restricted
sampling.

Sampling is restricted by a grammar (`Sampling.grammar`, `Start.guide`), by truncation or by a logit bias.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import Engine, Sampling, Share, Start, Tokens
from headrace_inference.grammar.compiler import CompiledGrammar, GrammarCompiler
from headrace_inference.grammar.forms import AnswerForm
from headrace_inference.importer import load_model
from headrace_runtime.errors import Refused
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.events.turn import check_sets, iterate_sets
from headrace_schemas.values.blobs import Manifest
from tests.support import tiny_model

CONTEXT = 512
SEQUENCES_MAX, WAITING_MAX = 8, 8
RANK_MAX = 8


@dataclass(frozen=True)
class Stored:
    """Stored version with its files."""

    manifest: Manifest
    folder: Path
    base: Path | None = None

    @property
    def version(self) -> str:
        return self.manifest.version


@dataclass(frozen=True)
class Versions:
    """Stored versions: `second` is trained from `first`; `adapter` and `other` apply to `first`."""

    blobs: BlobStore
    first: Stored
    second: Stored
    adapter: Stored
    other: Stored

    @property
    def all(self) -> tuple[Stored, ...]:
        return (self.first, self.second, self.adapter, self.other)


def build(root: Path) -> Versions:
    """Build tiny versions in float32."""
    blobs = BlobStore((root / "blobs").as_uri())

    def stored(folder: Path, base: Stored | None = None, **options: Any) -> Stored:
        below = (base.version, base.folder) if base else None
        served = tiny_model.publish(blobs, folder, base=below, **options)
        return Stored(versions.read_manifest(blobs, served.manifest), folder, base.folder if base else None)

    first = stored(tiny_model.build(root / "first"))
    moved = tiny_model.perturbed(first.folder, root / "second", seed=1)
    second = stored(moved, step=1, parent=first.version)
    first_version, second_version = (
        stored(
            tiny_model.adapter(first.folder, root / f"adapter{seed}", seed=seed),
            first,
            step=seed,
            parent=first.version,
        )
        for seed in (2, 3)
    )
    return Versions(blobs, first, second, first_version, second_version)


@dataclass(frozen=True)
class Ground:
    """Engine that has loaded all `versions`. A promise should sample at most about `tokens` tokens in all."""

    engine: Engine
    versions: Versions
    tokens: int

    async def sample(
        self, prompt: Sequence[int], of: Stored, *, stream: bool = False, start: Start | None = None, **how: Any
    ) -> Tokens:
        """Return all tokens of one choice."""
        (choice_tokens,) = await self.choices(prompt, of, [start or Start()], stream=stream, **how)
        return choice_tokens

    async def choices(
        self,
        prompt: Sequence[int],
        of: Stored,
        starts: Sequence[Start],
        *,
        stream: bool = False,
        salt: str = "",
        **how: Any,
    ) -> list[Tokens]:
        """Return all tokens of each choice, in the order of `starts`."""
        sampling = Sampling(**{"max_tokens": 16, **how})
        tokens_of = {start.choice: Tokens(start.choice, sets=[]) for start in starts}
        pieces: dict[int, int] = {}
        async for tokens in self.engine.generate(
            prompt, sampling, of.version, starts, stream=stream, share=Share(salt)
        ):
            tokens_of[tokens.choice].add(tokens)
            pieces[tokens.choice] = pieces.get(tokens.choice, 0) + 1
        if not stream:
            assert set(pieces.values()) == {1}, "without a stream each choice is one piece"
        return [tokens_of[start.choice] for start in starts]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Return `length` ids of ordinary tokens. Prompts with different `salt` differ."""
    return [(7 * index + 11 * salt + 3) % 256 + len(tiny_model.SPECIAL) for index in range(length)]


def recomputed(of: Stored, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> torch.Tensor:
    """Return the logprobs of `sampled` as a trainer computes them."""
    logprobs: torch.Tensor = (logits_of(of, prompt, sampled) / (temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor([*sampled])[:, None])[:, 0]


def logits_of(of: Stored, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """Return the logits at the positions of `sampled` from one plain eager forward pass of transformers."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        logits: torch.Tensor = _model(of.folder, of.base)(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits


@cache
def _model(folder: Path, base: Path | None) -> Any:
    return load_model(base or folder, folder if base else None, torch.float32).eval()


FORM = AnswerForm({"type": "array", "items": {"enum": ["on", "off"]}, "minItems": 3, "maxItems": 3})


async def compiled(ground: Ground, *resumed: Sequence[int]) -> tuple[CompiledGrammar, ChatTokenizer]:
    of = ground.versions.first
    tokenizer = ChatTokenizer(of.folder, of.manifest)
    grammars = GrammarCompiler(Parsers(HERMES))
    try:
        vocabulary = ground.engine.vocabulary(of.version)
        return await grammars.compile(FORM, tokenizer, vocabulary, resumed or ((),), opened=False), tokenizer
    finally:
        grammars.close()


async def sampled(ground: Ground, begun: Sequence[int] = (), **how: Any) -> tuple[str, Tokens]:
    compiled_form, tokenizer = await compiled(ground, begun)
    start = Start(resumed=begun, guide=compiled_form.guides[0])
    options = {"max_tokens": 120, "stop_ids": tokenizer.stop_ids, "grammar": compiled_form.record.text, **how}
    tokens = await ground.sample(prompt_of(20), ground.versions.first, start=start, **options)
    return tokenizer.text_of([*begun, *tokens.token_ids]), tokens


async def answers_keep_to_their_grammar(ground: Ground, _: Path) -> None:
    """Plain and streamed answers are equal, and the logprobs are those under the grammar's mask."""
    assert ground.engine.grammars
    for how in ({"seed": 5}, {"seed": 5, "stream": True}, {"temperature": 0.0}):
        text, tokens = await sampled(ground, **how)
        assert tokens.finish == "stop"
        assert re.fullmatch(r'\[\s*"(on|off)"(\s*,\s*"(on|off)"){2}\s*\]', text)
    text, tokens = await sampled(ground, seed=6)
    free = recomputed(ground.versions.first, prompt_of(20), tokens.token_ids, 1.0)
    sampled_logprobs = torch.tensor(tokens.logprobs)
    assert (sampled_logprobs >= free - 1e-4).all(), "fewer tokens are possible, so each is more probable"
    assert sampled_logprobs.sum() > free.sum() + 5
    cut, tokens = await sampled(ground, seed=6, max_tokens=3)
    assert (tokens.finish, text.startswith(cut)) == ("length", True)


async def held_logprobs_are_over_the_masks_of_the_guide(ground: Ground, _: Path) -> None:
    """The softmax over the tokens that the guide allows gives the reported logprobs, also with several end tokens."""
    assert ground.engine.reports_sets
    of = ground.versions.first
    compiled_form, tokenizer = await compiled(ground)
    guide = compiled_form.guides[0].fresh()
    other_end_id = tokenizer.token_id(tiny_model.SPECIAL[0])
    assert other_end_id is not None
    assert not tokenizer.stop_ids & {other_end_id}
    guide.stop_ids = {*tokenizer.stop_ids, other_end_id}
    options: dict[str, Any] = {"stop_ids": guide.stop_ids, "grammar": compiled_form.record.text, "max_tokens": 120}
    for seed in range(4):
        start = Start(guide=guide.fresh())
        tokens = await ground.sample(prompt_of(20), of, start=start, seed=seed, stream=bool(seed % 2), **options)
        assert tokens.finish == "stop"
        logits_TV, again = logits_of(of, prompt_of(20), tokens.token_ids), guide.fresh()
        for logits_V, token, logprob in zip(logits_TV, tokens.token_ids, tokens.logprobs, strict=True):
            bits_V = np.unpackbits(again.allowed().view(np.uint8), bitorder="little")[: len(logits_V)]
            held_V = logits_V.masked_fill(torch.from_numpy(bits_V) == 0, float("-inf")).log_softmax(0)
            assert logprob == pytest.approx(float(held_V[token]), abs=1e-4)
            again.accept(token)
        assert tokens.logprobs[-1] < 0, "either of two tokens may end it"


async def a_held_answer_goes_on_or_is_refused(ground: Ground, _: Path) -> None:
    """A resumed answer continues its grammar after the tokens of another replica, or is refused."""
    complete, tokens = await sampled(ground, temperature=0.0)
    for cut in (1, len(tokens.token_ids) - 2):
        refused = None
        try:
            text, _rest = await sampled(ground, tokens.token_ids[:cut], temperature=0.0)
        except Refused as error:
            refused = error
        if refused is None:
            assert text == complete
        else:
            assert (refused.status, refused.param) == (400, "headrace_resume")
    with pytest.raises(Refused, match="headrace_resume"):
        await compiled(ground, prompt_of(3))


async def logprobs_are_those_after_a_bias(ground: Ground, _: Path) -> None:
    for stream in (False, True):
        how: dict[str, Any] = {"logit_bias": ((65, 90.0), (66, -90.0)), "max_tokens": 8, "stream": stream}
        biased = await ground.sample(prompt_of(20), ground.versions.first, **how)
        assert biased.token_ids == [65] * 8
        assert biased.logprobs == pytest.approx([0.0] * 8, abs=1e-4)


async def kept_sets_are_those_that_the_logprobs_are_of(ground: Ground, _: Path) -> None:
    """The trainer's softmax over the reported token sets gives the reported logprobs."""
    of = ground.versions.first
    bias = ((40, 1.5), (41, -2.0))
    ways: list[dict[str, Any]] = [
        {"top_k": 5}, {"top_p": 0.1, "temperature": 0.7}, {"min_p": 0.6, "top_k": 20}, {"top_k": 9, "logit_bias": bias},
        {"top_k": 7, "presence_penalty": 1.5}, {"top_k": 6, "frequency_penalty": -0.5},
    ]  # fmt: skip
    for number, how in enumerate(ways):
        prompt, stream = prompt_of(20, number), bool(number % 2)
        tokens = await ground.sample(prompt, of, max_tokens=12, stream=stream, **how)
        assert tokens.sets is not None
        check_sets(tokens.sets, tokens.token_ids)
        logits_TV = logits_of(of, prompt, tokens.token_ids)
        for position, token_set in enumerate(iterate_sets(tokens.sets)):
            logits_V = logits_TV[position].clone()
            for token, added in how.get("logit_bias", ()):
                logits_V[token] += added
            for token in {*tokens.token_ids[:position]}:
                count = tokens.token_ids[:position].count(token)
                logits_V[token] -= how.get("frequency_penalty", 0.0) * count + how.get("presence_penalty", 0.0)
            shares = (logits_V[list(token_set)] / how.get("temperature", 1.0)).log_softmax(0)
            assert tokens.logprobs[position] == pytest.approx(
                float(shares[list(token_set).index(tokens.token_ids[position])]), abs=1e-4
            )
    wide = await ground.sample(prompt_of(20), of, top_p=0.9999, max_tokens=4)
    assert wide.sets is None or all(len(token_set) > 100 for token_set in iterate_sets(wide.sets))


async def truncation_is_in_the_logprobs(ground: Ground, _: Path) -> None:
    """With `top_k` 2 the probabilities of two tokens add up to one."""
    tokens = await ground.sample(prompt_of(20), ground.versions.first, top_k=2, top_logprobs=2, max_tokens=12)
    for token, logprob, top in zip(tokens.token_ids, tokens.logprobs, tokens.top, strict=True):
        assert dict(top).get(token) == logprob
        assert sum(torch.tensor([value]).exp().item() for _, value in top) == pytest.approx(1.0, abs=1e-5)
    narrow = await ground.sample(prompt_of(20), ground.versions.first, top_p=1e-6, max_tokens=6)
    assert narrow.logprobs == pytest.approx([0.0] * 6, abs=1e-6)
