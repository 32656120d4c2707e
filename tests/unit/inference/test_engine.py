"""Tests that the torch engine samples correctly, independently of the batch, the cache and other requests."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace_inference import metrics
from headrace_inference.engine import Sampling, Share, Start
from headrace_inference.errors import ContextLengthExceeded, EngineFailed, Overloaded, UnknownVersion
from headrace_inference.torch_engine.engine import TorchEngine, default_threads
from headrace_runtime.main import PYTHON_GARBAGE_THRESHOLD
from headrace_schemas.http.replica_api import TokensToScore
from tests.unit.inference.conftest import MakeEngine, Models, prompt_of, sample

LOGPROB_TOLERANCE = 1e-4


def recomputed(models: Models, prompt: list[int], sampled: list[int], temperature: float) -> torch.Tensor:
    """Return the logprobs of `sampled` from one plain forward pass of transformers, without cache, batch or our own
    code."""
    model = AutoModelForCausalLM.from_pretrained(models.first.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].float()
    logprobs: torch.Tensor = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
    return logprobs


@pytest.mark.parametrize("trace", [True, False], ids=["traced", "direct"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
async def test_logprobs_are_those_of_a_plain_forward(
    make_engine: MakeEngine, models: Models, temperature: float, trace: bool
) -> None:
    engine = await make_engine(trace=trace)
    prompts = [prompt_of(length, salt) for salt, length in enumerate((1, 2, 17, 40, 90))]
    work = [sample(engine, prompt, models.first.version, temperature=temperature, max_tokens=40) for prompt in prompts]
    for prompt, tokens in zip(prompts, await asyncio.gather(*work), strict=True):
        expected = recomputed(models, prompt, tokens.token_ids, temperature)
        difference = (expected - torch.tensor(tokens.logprobs)).abs()
        assert difference.mean() < LOGPROB_TOLERANCE
        assert difference.max() < 10 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_given_answers_are_scored_as_they_were_sampled(
    engine: TorchEngine, models: Models, temperature: float
) -> None:
    """The scored logprobs equal those that the version reported while sampling, and differ under another version."""
    await engine.load(models.second.folder, models.second.manifest)
    prompt = prompt_of(20)
    sampled = await sample(engine, prompt, models.first.version, temperature=temperature, max_tokens=12)
    plain = recomputed(models, prompt, sampled.token_ids, temperature)
    answer = TokensToScore(prompt_token_ids=tuple(prompt), token_ids=tuple(sampled.token_ids), temperature=temperature)
    (own_logprobs,) = await engine.score(models.first.version, [answer])
    assert own_logprobs == pytest.approx(sampled.logprobs, abs=1e-3)
    assert own_logprobs == pytest.approx(plain.tolist(), abs=1e-3)
    (other_logprobs,) = await engine.score(models.second.version, [answer])
    assert max(abs(a - b) for a, b in zip(own_logprobs, other_logprobs, strict=True)) > 1e-3
    with pytest.raises(ContextLengthExceeded):
        await engine.score(models.first.version, [answer.model_copy(update={"prompt_token_ids": (1,) * 100_000})])


async def test_temperature_zero_is_the_argmax_of_a_plain_forward(engine: TorchEngine, models: Models) -> None:
    prompt = prompt_of(20)
    tokens = await sample(engine, prompt, models.first.version, temperature=0.0, max_tokens=12)
    model = AutoModelForCausalLM.from_pretrained(models.first.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert tokens.token_ids == logits.argmax(-1).tolist()
    assert torch.tensor(tokens.logprobs) == pytest.approx(logits.log_softmax(-1).max(-1).values, abs=1e-4)


async def test_truncation_reports_the_renormalised_distribution(engine: TorchEngine, models: Models) -> None:
    """With `top_k` 2 the probabilities of the two tokens add up to one, and no other token is sampled."""
    prompt = prompt_of(20)
    tokens = await sample(engine, prompt, models.first.version, top_k=2, top_logprobs=3, max_tokens=40)
    for token, logprob, top in zip(tokens.token_ids, tokens.logprobs, tokens.top, strict=True):
        (first, p), (other, q), (_, impossible) = top
        assert {first, other} >= {token}
        assert logprob == dict(top)[token]
        assert torch.tensor([p, q]).exp().sum() == pytest.approx(1.0, abs=1e-5)
        assert impossible == float("-inf")


async def test_top_p_keeps_the_fewest_that_reach_it(engine: TorchEngine, models: Models) -> None:
    narrow = await sample(engine, prompt_of(20), models.first.version, top_p=1e-6, seed=3)
    greedy = await sample(engine, prompt_of(20), models.first.version, temperature=0.0)
    assert narrow.token_ids == greedy.token_ids
    assert narrow.logprobs == pytest.approx([0.0] * len(narrow.logprobs), abs=1e-6)


async def test_top_logprobs_are_the_best_ones(engine: TorchEngine, models: Models) -> None:
    tokens = await sample(engine, prompt_of(20), models.first.version, top_logprobs=5, temperature=0.0, max_tokens=6)
    for token, logprob, top in zip(tokens.token_ids, tokens.logprobs, tokens.top, strict=True):
        assert len(top) == 5
        assert top[0] == (token, logprob)
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)


async def test_frequency_penalty_pushes_repetition_away(engine: TorchEngine, models: Models) -> None:
    plain = await sample(engine, prompt_of(20), models.first.version, temperature=0.0, max_tokens=60)
    varied = await sample(
        engine, prompt_of(20), models.first.version, temperature=0.0, max_tokens=60, frequency_penalty=2.0
    )
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))
    assert varied.token_ids[0] == plain.token_ids[0], "nothing was sampled before the first token"


async def test_a_resumed_choice_counts_what_was_sampled_elsewhere(engine: TorchEngine, models: Models) -> None:
    """Penalties, seed and `max_tokens` continue as if the choice had never moved, so the tokens are the same."""
    how: dict[str, Any] = {"seed": 11, "frequency_penalty": 0.5, "temperature": 0.9, "max_tokens": 30}
    complete = await sample(engine, prompt_of(25), models.first.version, **how)
    for cut in (1, 7, 29):
        start = Start(resumed=complete.token_ids[:cut])
        rest = await sample(engine, prompt_of(25), models.first.version, start=start, **how)
        assert rest.token_ids == complete.token_ids[cut:]
        assert rest.logprobs == pytest.approx(complete.logprobs[cut:], abs=1e-4)
        assert rest.finish == "length"


async def test_a_seed_gives_the_same_tokens_whoever_else_is_in_the_batch(engine: TorchEngine, models: Models) -> None:
    version = models.first.version
    alone = await sample(engine, prompt_of(33, 5), version, seed=42, max_tokens=50)
    crowd = [
        sample(engine, prompt_of(5 + 9 * i, i), version, seed=i, max_tokens=10 + 5 * i, temperature=0.5 + 0.1 * i)
        for i in range(9)
    ]
    again, *_ = await asyncio.gather(sample(engine, prompt_of(33, 5), version, seed=42, max_tokens=50), *crowd)
    assert again.token_ids == alone.token_ids
    assert again.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    other = await sample(engine, prompt_of(33, 5), version, seed=43, max_tokens=50)
    assert other.token_ids != alone.token_ids


async def test_choices_of_one_request_differ_and_share_the_prompt(engine: TorchEngine, models: Models) -> None:
    generation = engine.generate(
        prompt_of(64), Sampling(max_tokens=20, seed=1), models.first.version, [Start(i) for i in range(4)], stream=False
    )
    by_choice = {tokens.choice: tokens async for tokens in generation}
    assert len({tuple(tokens.token_ids) for tokens in by_choice.values()}) == 4
    assert by_choice[0].cached_tokens == 0
    assert all(by_choice[i].cached_tokens == 63 for i in (1, 2, 3)), "their prompt was computed once"
    alone = await sample(engine, prompt_of(64), models.first.version, seed=1, max_tokens=20, start=Start(choice=2))
    assert alone.token_ids == by_choice[2].token_ids, "a choice's seed does not depend on the other choices"


async def test_a_stream_brings_the_same_tokens_one_by_one(engine: TorchEngine, models: Models) -> None:
    complete = await sample(engine, prompt_of(20), models.first.version, seed=5, top_logprobs=2)
    pieces = await sample(engine, prompt_of(20), models.first.version, seed=5, top_logprobs=2, stream=True)
    assert pieces.token_ids == complete.token_ids
    assert len(pieces.top) == len(pieces.token_ids) == len(pieces.logprobs)
    assert pieces.finish == complete.finish == "length"


async def test_stop_tokens_and_stop_conditions_end_a_choice(engine: TorchEngine, models: Models) -> None:
    complete = await sample(engine, prompt_of(20), models.first.version, seed=5)
    stop = complete.token_ids[6]
    first = complete.token_ids.index(stop)
    ended = await sample(engine, prompt_of(20), models.first.version, seed=5, stop_ids=frozenset({stop}))
    assert (ended.token_ids, ended.finish) == (complete.token_ids[: first + 1], "stop")
    seen: list[int] = []

    def fourth(token: int) -> bool:
        seen.append(token)
        return len(seen) == 4

    ended = await sample(engine, prompt_of(20), models.first.version, seed=5, start=Start(until=fourth))
    assert (ended.token_ids, ended.finish) == (seen, "stop")
    assert seen == complete.token_ids[:4]


async def test_a_prompt_that_goes_on_reuses_the_kv_of_its_beginning(engine: TorchEngine, models: Models) -> None:
    version = models.first.version
    prompt = prompt_of(50)
    answer = await sample(engine, prompt, version, seed=1, max_tokens=30)
    longer = [*prompt, *answer.token_ids, *prompt_of(9, 3)]
    fresh = await sample(engine, longer, version, seed=2)
    assert fresh.cached_tokens == len(prompt) + 29, "all but the last token, which was never computed"
    expected = recomputed(models, longer, fresh.token_ids, 1.0)
    assert torch.tensor(fresh.logprobs) == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    sibling = [*prompt[:40], *prompt_of(30, 4)]
    assert (await sample(engine, sibling, version, seed=2)).cached_tokens == 40, "a shared beginning is enough"


async def test_kv_is_never_used_across_versions(engine: TorchEngine, models: Models) -> None:
    """Pitfalls 16 and 17: new weights do not reuse the KV of the same prompt."""
    await engine.load(models.second.folder, models.second.manifest)
    prompt = prompt_of(60)
    old = await sample(engine, prompt, models.first.version, temperature=0.0)
    new = await sample(engine, prompt, models.second.version, temperature=0.0)
    assert old.cached_tokens == new.cached_tokens == 0
    assert new.logprobs != pytest.approx(old.logprobs, abs=1e-3)
    assert (await sample(engine, prompt, models.second.version, temperature=0.0)).cached_tokens == 59


async def test_sequences_join_and_leave_at_any_step(make_engine: MakeEngine, models: Models) -> None:
    """Sequences arrive, abort and end at random, more than fit at once; each completed one has the tokens it has
    alone."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    engine = await make_engine(sequences_max=5, prefill_tokens_max=24, prefix_mib_max=1)
    version = models.first.version
    plans: list[dict[str, Any]] = [
        {"salt": i, "length": dice.randint(1, 70), "seed": i, "max_tokens": dice.randint(1, 40), "temperature": 0.8}
        for i in range(40)
    ]

    async def run_plan(plan: dict[str, Any]) -> tuple[list[int], bool]:
        await asyncio.sleep(dice.random() * 0.15)
        prompt = prompt_of(plan["length"], plan["salt"] % 6)
        how = Sampling(max_tokens=plan["max_tokens"], temperature=plan["temperature"], seed=plan["seed"])
        generation = engine.generate(prompt, how, version, [Start()], stream=True)
        left = dice.random() < 0.2
        collected: list[int] = []
        async for tokens in generation:
            collected += tokens.token_ids
            if left:
                generation.close()
                break
        return collected, left

    results = await asyncio.gather(*map(run_plan, plans))
    assert engine.in_flight() == 0
    for plan, (collected, left) in zip(plans, results, strict=True):
        prompt = prompt_of(plan["length"], plan["salt"] % 6)
        options = {name: plan[name] for name in ("max_tokens", "temperature", "seed")}
        alone = await sample(engine, prompt, version, **options)
        assert collected == (alone.token_ids[: len(collected)] if left else alone.token_ids), plan


async def test_too_little_kv_memory_sets_sequences_back_and_loses_nothing(
    make_engine: MakeEngine, models: Models
) -> None:
    roomy = await make_engine(prefix_mib_max=0)
    tight = await make_engine(kv_mib_max=1, prefix_mib_max=0)
    tiny = tight._models[models.first.version][0].kv_shape
    assert 12 * (150 + 120) * tiny.token_bytes > 2**20 > 12 * 150 * tiny.token_bytes, "all fit at first, not later"
    set_back = metrics.PREEMPTIONS._value.get()
    prompts = [prompt_of(150, salt) for salt in range(12)]
    how: dict[str, Any] = {"max_tokens": 120, "temperature": 0.7}
    expected = [await sample(roomy, prompt, models.first.version, seed=i, **how) for i, prompt in enumerate(prompts)]
    work = [sample(tight, prompt, models.first.version, seed=i, **how) for i, prompt in enumerate(prompts)]
    results = await asyncio.gather(*work)
    assert [tokens.token_ids for tokens in results] == [tokens.token_ids for tokens in expected]
    assert metrics.PREEMPTIONS._value.get() > set_back


async def test_bounds_are_refused_by_name(make_engine: MakeEngine, models: Models) -> None:
    engine = await make_engine(sequences_max=2, waiting_max=1, context_tokens_max=100)
    version = models.first.version
    with pytest.raises(ContextLengthExceeded, match="100 tokens") as refused:
        engine.generate(prompt_of(60), Sampling(max_tokens=41), version, [Start()], stream=False)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ContextLengthExceeded):
        engine.generate(prompt_of(100), Sampling(), version, [Start()], stream=False)
    with pytest.raises(UnknownVersion):
        engine.generate(prompt_of(5), Sampling(), "tiny@000000000000", [Start()], stream=False)
    generations = [engine.generate(prompt_of(9), Sampling(), version, [Start()], stream=True) for _ in range(3)]
    with pytest.raises(Overloaded) as full:
        engine.generate(prompt_of(9), Sampling(), version, [Start()], stream=True)
    assert (full.value.status, full.value.code, full.value.retry_after_s) == (503, "overloaded", 1)
    for generation in generations:
        generation.close()
    await asyncio.wait_for(engine.drained(), 5)
    assert len((await sample(engine, prompt_of(60), version, max_tokens=40)).token_ids) == 40


async def test_without_max_tokens_a_choice_ends_with_the_context(make_engine: MakeEngine, models: Models) -> None:
    engine = await make_engine(context_tokens_max=100)
    tokens = await sample(engine, prompt_of(60), models.first.version, max_tokens=None)
    assert (len(tokens.token_ids), tokens.finish) == (40, "length")


async def test_an_unloaded_version_fails_what_it_had_begun_and_nothing_else(
    engine: TorchEngine, models: Models
) -> None:
    await engine.load(models.second.folder, models.second.manifest)
    lost = engine.generate(prompt_of(9), Sampling(), models.second.version, [Start()], stream=True)
    surviving = asyncio.create_task(sample(engine, prompt_of(9), models.first.version, max_tokens=200))
    await anext(aiter(lost))
    await engine.unload(models.second.version)
    with pytest.raises(EngineFailed, match="was unloaded"):
        async for _ in lost:
            pass
    assert len((await surviving).token_ids) == 200
    with pytest.raises(UnknownVersion):
        engine.generate(prompt_of(9), Sampling(), models.second.version, [Start()], stream=True)


async def test_a_failing_step_fails_its_batch_and_the_engine_goes_on(
    engine: TorchEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that the engine runs as a control after the failure fails as well."""
    with monkeypatch.context() as broken:
        broken.setattr(engine._models[models.first.version][0].program, "decode", lambda *_: 1 / 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            await sample(engine, prompt_of(9), models.first.version)
    assert len((await sample(engine, prompt_of(9), models.first.version)).token_ids) == 24
    engine.check()


async def test_logits_that_are_no_numbers_fail_their_own_sequence_only(
    engine: TorchEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision overflows on some prompts. Such a prompt must not fail the batch or the replica."""
    program = engine._models[models.first.version][0].program
    decode = program.decode

    def astray(*inputs: Any) -> Any:
        ids, logprobs, *rest = decode(*inputs)
        poisoned = inputs[2][:, 0] == 70
        return ids, logprobs.masked_fill(poisoned, float("nan")), *rest

    monkeypatch.setattr(program, "decode", astray)
    version = models.first.version
    starts = [Start(i) for i in range(3)]
    lost = engine.generate(prompt_of(66), Sampling(), version, starts, stream=True)
    surviving = asyncio.create_task(sample(engine, prompt_of(9), version, max_tokens=50, stream=True))
    with pytest.raises(EngineFailed, match="the logits are NaN after 71 tokens"):
        async for _ in lost:
            pass
    assert len((await surviving).token_ids) == 50
    assert engine.in_flight() == 0
    assert engine.alive


async def test_an_engine_that_only_fails_gives_up(
    engine: TorchEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._models[models.first.version][0].program, "decode", lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(EngineFailed):
            await sample(engine, prompt_of(9), models.first.version)
    await asyncio.to_thread(engine._worker._thread.join, 5)
    assert not engine.alive
    with pytest.raises(EngineFailed, match="restart"):
        engine.check()


def test_small_machines_leave_cores_to_others() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 8, 32)] == [1, 1, 1, 4, 16]


async def test_a_tenant_that_fills_the_waiting_room_keeps_no_other_tenant_out(make_engine: MakeEngine) -> None:
    engine = await make_engine(sequences_max=4, waiting_max=12)
    version = next(iter(engine._models))
    sampling = Sampling(max_tokens=200)
    greedy, modest = Share("greedy"), Share("modest")
    starts = [Start(choice) for choice in range(4)]
    opened = [engine.generate(prompt_of(8, n), sampling, version, starts, stream=True, share=greedy) for n in range(4)]
    with pytest.raises(Overloaded):
        engine.generate(prompt_of(8, 9), sampling, version, starts, stream=True, share=greedy)
    late = engine.generate(prompt_of(8, 10), Sampling(max_tokens=2), version, starts[:2], stream=True, share=modest)
    async with asyncio.timeout(30):
        assert sum([len(tokens.token_ids) async for tokens in late]) == 4
    for generation in opened:
        generation.close()


_START = """
import asyncio, gc, sys
from headrace_inference.app import start_engine
from headrace_inference.settings import InferenceSettings
from headrace_runtime.settings.sections import complete

async def main():
    engine = start_engine(complete(InferenceSettings).model_validate({"torch": {"device": "cpu"}}))
    try:
        assert "transformers" in sys.modules
        print(gc.get_freeze_count(), len(gc.get_objects()), gc.get_threshold()[0])
    finally:
        await engine.stop()

asyncio.run(main())
"""


def test_start_engine_exempts_imported_libraries_from_garbage_collections() -> None:
    """A full garbage collection that visits torch and transformers stops all threads for 0.2 s."""
    process = subprocess.run([sys.executable, "-c", _START], check=True, capture_output=True, text=True, timeout=240)
    exempt, visited, threshold = map(int, process.stdout.splitlines()[0].split())
    assert exempt > 100_000
    assert visited < exempt / 20
    assert threshold == PYTHON_GARBAGE_THRESHOLD
