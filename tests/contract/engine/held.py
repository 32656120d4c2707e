"""Promises about choices that are held to a grammar (`Sampling.grammar`, `Start.guide`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.engine import Start, Tokens
from headrace_inference.grammar.compiler import CompiledGrammar, GrammarCompiler
from headrace_inference.grammar.forms import AnswerForm
from headrace_inference.grammar.settings import GrammarSettings
from headrace_runtime.errors import Refused
from tests.contract.engine.ground import Ground, prompt_of, recomputed

FORM = AnswerForm({"type": "array", "items": {"enum": ["on", "off"]}, "minItems": 3, "maxItems": 3})


async def compiled(ground: Ground, *resumed: Sequence[int]) -> tuple[CompiledGrammar, ChatTokenizer]:
    of = ground.versions.first
    tokenizer = ChatTokenizer(of.folder, of.manifest)
    grammars = GrammarCompiler(Parsers(HERMES), GrammarSettings())
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


async def a_held_answer_goes_on_or_is_refused(ground: Ground, _: Path) -> None:
    """After tokens that another replica sampled: never a grammar that begins in the middle."""
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
