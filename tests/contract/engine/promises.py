"""Promises of `headrace_inference.engine.Engine`, each as a function that fails for an engine that breaks it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_inference.engine import Sampling, Start
from headrace_inference.errors import (
    ContextLengthExceeded,
    EngineFailed,
    Overloaded,
    UnknownVersion,
    VersionUnusable,
)
from headrace_runtime.errors import Refused
from tests.contract.engine.ground import (
    CONTEXT,
    RANK_MAX,
    SEQUENCES_MAX,
    WAITING_MAX,
    Ground,
    Stored,
    a_held_answer_goes_on_or_is_refused,
    answers_keep_to_their_grammar,
    held_logprobs_are_over_the_masks_of_the_guide,
    kept_sets_are_those_that_the_logprobs_are_of,
    logprobs_are_those_after_a_bias,
    prompt_of,
    recomputed,
    truncation_is_in_the_logprobs,
)
from tests.support import tiny_model

Figures = dict[str, float]
Promise = Callable[[Ground, Path], Awaitable[Figures | None]]
TEMPERATURES = (0.7, 1.0, 1.3)
MEAN_MAX, SINGLE_MAX, OTHER_MIN = 1e-6, 1e-5, 0.1
WAIT_S = 60.0


async def logprobs_are_the_trainers(ground: Ground, _: Path) -> Figures:
    """The reported logprobs are those of the requested version, whatever else is sampled at the same time."""
    prompts = [prompt_of(length, salt) for salt, length in enumerate((3, 33))]
    each = max(4, ground.tokens // (len(ground.versions.all) * len(prompts) * (len(TEMPERATURES) + 1)))
    cases = [(of, p, t) for of in ground.versions.all for p in prompts for t in (*TEMPERATURES, 0.0)]
    samples = []
    for begin in range(0, len(cases), SEQUENCES_MAX):
        some = cases[begin : begin + SEQUENCES_MAX]
        samples += await asyncio.gather(*(ground.sample(p, of, temperature=t, max_tokens=each) for of, p, t in some))
    differences, foreign_differences = [], []
    for (of, prompt, temperature), tokens in zip(cases, samples, strict=True):
        reported = torch.tensor(tokens.logprobs)
        differences.append((reported - recomputed(of, prompt, tokens.token_ids, temperature)).abs())
        if of is ground.versions.adapter:
            foreign_differences.append(
                (reported - recomputed(ground.versions.other, prompt, tokens.token_ids, temperature)).abs()
            )
    away, wrong = torch.cat(differences), torch.cat(foreign_differences)
    assert away.mean() <= MEAN_MAX
    assert away.max() <= SINGLE_MAX
    assert wrong.mean() > OTHER_MIN
    return {"tokens": len(away), "mean": float(away.mean()), "max": float(away.max()), "other": float(wrong.mean())}


async def greedy_takes_the_most_likely(ground: Ground, _: Path) -> None:
    tokens = await ground.sample(prompt_of(20), ground.versions.first, temperature=0.0, top_logprobs=1, max_tokens=8)
    assert [(token, value) for [(token, value)] in tokens.top] == list(
        zip(tokens.token_ids, tokens.logprobs, strict=True)
    )


async def loaded_weights_answer_as_their_fingerprint(ground: Ground, _: Path) -> Figures:
    deltas, parents = [], []
    for of in ground.versions.all:
        probe = await ground.engine.probe(of.version)
        assert probe.passed, of.version
        deltas.append(probe.max_abs_delta)
        if of.manifest.parent is None:
            assert probe.parent_max_abs_delta is None
        else:
            assert probe.parent_max_abs_delta is not None
            parents.append(probe.parent_max_abs_delta)
    assert max(deltas) <= 1e-4
    assert min(parents) > OTHER_MIN
    return {"largest": max(deltas), "nearest_parent": min(parents)}


async def other_weights_than_the_fingerprints_do_not_pass(ground: Ground, _: Path) -> None:
    impostor = renamed(ground.versions.adapter, fingerprint=ground.versions.other.manifest.fingerprint)
    await ground.engine.load(impostor.folder, impostor.manifest)
    probe = await ground.engine.probe(impostor.version)
    await ground.engine.unload(impostor.version)
    assert not probe.passed
    assert probe.max_abs_delta > OTHER_MIN


async def the_best_tokens_come_first(ground: Ground, _: Path) -> None:
    tokens = await ground.sample(prompt_of(20), ground.versions.first, top_logprobs=5, max_tokens=6)
    assert len(tokens.top) == 6
    for top in tokens.top:
        assert len(top) == 5
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)


async def a_probe_takes_nothing_from_whom_it_is_beside(ground: Ground, _: Path) -> None:
    """Probes of versions do not disturb requests that are served at the same time."""
    of = ground.versions.first
    how: dict[str, Any] = {"top_logprobs": 4, "max_tokens": 20}
    before = [asyncio.create_task(ground.sample(prompt_of(9, n), of, **how)) for n in range(2)]
    await asyncio.sleep(0.05)
    probe = asyncio.create_task(ground.engine.probe(of.version))
    await asyncio.sleep(0.01)
    after = [asyncio.create_task(ground.sample(prompt_of(9, n), of, **how)) for n in range(2)]
    assert (await probe).passed
    for tokens in await asyncio.gather(*before, *after):
        assert [len(top) for top in tokens.top] == [4] * 20
        assert all(sum(torch.tensor([value]).exp().item() for _, value in top) > 4 / 400 for top in tokens.top)


async def a_stream_brings_what_a_whole_answer_does(ground: Ground, _: Path) -> None:
    how: dict[str, Any] = {"seed": 5, "top_logprobs": 2}
    complete = await ground.sample(prompt_of(20), ground.versions.adapter, **how)
    pieces = await ground.sample(prompt_of(20), ground.versions.adapter, stream=True, **how)
    assert pieces.token_ids == complete.token_ids
    assert len(pieces.top) == len(pieces.token_ids) == len(pieces.logprobs)
    assert pieces.finish == complete.finish == "length"


async def a_seed_gives_the_same_tokens_in_any_company(ground: Ground, _: Path) -> None:
    of = ground.versions.first
    alone = await ground.sample(prompt_of(30), of, seed=42)
    # Together they are longer than what any of the engines under test computes in one step.
    concurrent = [
        ground.sample(prompt_of(100 + 9 * i, i), of, seed=i, max_tokens=5 + i) for i in range(SEQUENCES_MAX - 1)
    ]
    again, *_rest = await asyncio.gather(ground.sample(prompt_of(30), of, seed=42), *concurrent)
    assert again.token_ids == alone.token_ids
    assert (await ground.sample(prompt_of(30), of, seed=43)).token_ids != alone.token_ids


async def choices_differ_and_have_streams_of_their_own(ground: Ground, _: Path) -> None:
    of, starts = ground.versions.first, [Start(choice) for choice in range(4)]
    choices = await ground.choices(prompt_of(30), of, starts, seed=1)
    assert len({tuple(tokens.token_ids) for tokens in choices}) == 4
    alone = await ground.sample(prompt_of(30), of, seed=1, start=Start(choice=2))
    assert alone.token_ids == choices[2].token_ids, "whichever others are asked for"
    unseeded = [await ground.sample(prompt_of(30), of) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids


async def a_stop_token_ends_a_choice_and_belongs_to_it(ground: Ground, _: Path) -> None:
    of = ground.versions.first
    complete = await ground.sample(prompt_of(20), of, seed=5)
    stop = complete.token_ids[6]
    end = complete.token_ids.index(stop) + 1
    for stream in (False, True):
        ended = await ground.sample(prompt_of(20), of, seed=5, stop_ids=frozenset({stop}), stream=stream)
        assert (ended.token_ids, ended.finish) == (complete.token_ids[:end], "stop")


async def a_stop_condition_sees_each_token_once(ground: Ground, _: Path) -> None:
    of = ground.versions.first
    complete = await ground.sample(prompt_of(20), of, seed=5, top_logprobs=1)
    for stream in (False, True):
        seen: list[int] = []

        def fifth(token: int, seen: list[int] = seen) -> bool:
            seen.append(token)
            return len(seen) == 5

        start = Start(until=fifth)
        ended = await ground.sample(prompt_of(20), of, seed=5, top_logprobs=1, start=start, stream=stream)
        assert seen == complete.token_ids[:5]
        assert (ended.token_ids, ended.finish) == (seen, "stop")
        assert len(ended.logprobs) == len(ended.top) == 5
    await asyncio.wait_for(ground.engine.drained(), WAIT_S)


async def a_resumed_greedy_choice_goes_on_as_if_it_had_never_moved(ground: Ground, _: Path) -> None:
    for frequency_penalty in (0.0, 0.7):
        how: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": frequency_penalty, "max_tokens": 24}
        complete = await ground.sample(prompt_of(25), ground.versions.adapter, **how)
        for cut in (1, 12, 23):
            start = Start(resumed=complete.token_ids[:cut])
            rest = await ground.sample(prompt_of(25), ground.versions.adapter, start=start, **how)
            assert rest.token_ids == complete.token_ids[cut:]
            assert rest.logprobs == pytest.approx(complete.logprobs[cut:], abs=1e-4)
            assert rest.finish == "length"


async def a_penalty_is_counted_or_refused(ground: Ground, _: Path) -> None:
    """Tokens that another replica sampled count in penalties of a resumed choice, or the penalty is refused."""
    how: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 1.5, "max_tokens": 24}
    complete = await ground.sample(prompt_of(25), ground.versions.first, **how)
    assert len(set(complete.token_ids)) > 1
    start = Start(resumed=complete.token_ids[:12])
    refused = None
    try:
        rest = await ground.sample(prompt_of(25), ground.versions.first, start=start, **how)
    except Refused as error:
        refused = error
    if refused is None:
        assert rest.token_ids == complete.token_ids[12:]
    else:
        assert (refused.status, refused.param) == (400, "presence_penalty")


async def what_is_kept_of_a_prompt_belongs_to_a_version_and_a_salt(ground: Ground, _: Path) -> Figures:
    prompt = prompt_of(400, 5)
    how: dict[str, Any] = {"max_tokens": 2}
    (first,) = await ground.choices(prompt, ground.versions.first, [Start()], salt="a", **how)
    (again,) = await ground.choices(prompt, ground.versions.first, [Start()], salt="a", **how)
    assert first.cached_tokens == 0
    assert 0 < again.cached_tokens < len(prompt)
    (salted,) = await ground.choices(prompt, ground.versions.first, [Start()], salt="b", **how)
    assert salted.cached_tokens == 0, "of another tenant"
    for of in (ground.versions.second, ground.versions.adapter, ground.versions.other):
        (other,) = await ground.choices(prompt, of, [Start()], salt="a", **how)
        assert other.cached_tokens == 0, of.version
    return {"reused": again.cached_tokens / len(prompt)}


async def bounds_are_refused_by_name(ground: Ground, _: Path) -> None:
    engine, version = ground.engine, ground.versions.first.version
    with pytest.raises(ContextLengthExceeded, match=f"{CONTEXT} tokens") as refused:
        engine.generate(prompt_of(60), Sampling(max_tokens=CONTEXT - 59), version, [Start()], stream=False)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    with pytest.raises(ContextLengthExceeded):
        engine.generate(prompt_of(CONTEXT), Sampling(), version, [Start()], stream=False)
    with pytest.raises(UnknownVersion):
        engine.generate(prompt_of(5), Sampling(), "tiny@0000000000000000", [Start()], stream=False)
    assert engine.context_tokens(version) == CONTEXT
    assert engine.vocabulary(version) >= 256 + len(tiny_model.SPECIAL)


async def more_than_may_wait_are_refused_and_leaving_makes_room(ground: Ground, _: Path) -> None:
    engine, version = ground.engine, ground.versions.first.version
    capacity = SEQUENCES_MAX + WAITING_MAX
    begun = [engine.generate(prompt_of(9), Sampling(), version, [Start()], stream=True) for _ in range(capacity)]
    with pytest.raises(Overloaded) as full:
        engine.generate(prompt_of(9), Sampling(), version, [Start()], stream=True)
    assert (full.value.status, full.value.code) == (503, "overloaded")
    assert engine.in_flight(version) == engine.in_flight() == capacity
    for generation in begun:
        generation.close()
    await asyncio.wait_for(engine.drained(), WAIT_S)
    assert len((await ground.sample(prompt_of(9), ground.versions.first)).token_ids) == 16


async def without_a_limit_a_choice_ends_with_the_context(ground: Ground, _: Path) -> None:
    prompt = prompt_of(CONTEXT - 7)
    tokens = await ground.sample(prompt, ground.versions.first, max_tokens=None)
    assert (len(tokens.token_ids), tokens.finish) == (7, "length")


async def a_client_that_leaves_frees_its_place(ground: Ground, _: Path) -> None:
    engine = ground.engine
    generation = engine.generate(prompt_of(9), Sampling(), ground.versions.first.version, [Start()], stream=True)
    first = await anext(aiter(generation))
    assert first.token_ids
    generation.close()
    assert engine.in_flight() == 0
    await asyncio.wait_for(engine.drained(), WAIT_S)


async def what_is_unusable_is_refused_by_name_and_disturbs_nobody(ground: Ground, folder: Path) -> None:
    going = asyncio.create_task(ground.sample(prompt_of(9), ground.versions.adapter, max_tokens=100))
    await asyncio.sleep(0)
    corrupt = _copied(ground.versions.adapter, folder / "corrupt")
    (corrupt / "adapter_model.safetensors").write_bytes(b"garbage" * 100)
    adapters = {
        corrupt: ".",
        _configured(ground.versions.adapter, folder / "kind", peft_type="LOHA"): "LOHA",
        _copied(ground.versions.adapter, folder / "empty", without="adapter_model.safetensors"): "adapter_model",
    }
    for number, (path, reason) in enumerate(adapters.items()):
        unusable = renamed(ground.versions.adapter, step=100 + number)
        with pytest.raises(VersionUnusable, match=reason) as refused:
            await ground.engine.load(path, unusable.manifest)
        assert str(refused.value).startswith(unusable.version)
        with pytest.raises(UnknownVersion):
            ground.engine.generate(prompt_of(5), Sampling(), unusable.version, [Start()], stream=False)
    stray = renamed(ground.versions.adapter, base="tiny@0000000000000000")
    with pytest.raises(VersionUnusable, match="its base tiny@0000000000000000 is not loaded"):
        await ground.engine.load(stray.folder, stray.manifest)
    assert len((await going).token_ids) == 100
    ground.engine.check()


async def an_unloaded_version_fails_what_it_had_begun_and_nothing_else(ground: Ground, _: Path) -> None:
    engine, another = ground.engine, renamed(ground.versions.other, step=200)
    await engine.load(another.folder, another.manifest)
    lost = engine.generate(prompt_of(9), Sampling(max_tokens=250), another.version, [Start()], stream=True)
    other_stream = asyncio.create_task(ground.sample(prompt_of(9), ground.versions.adapter, max_tokens=100))
    await anext(aiter(lost))
    await engine.unload(another.version)
    with pytest.raises(EngineFailed, match="was unloaded"):
        async for _tokens in lost:
            pass
    assert len((await other_stream).token_ids) == 100
    with pytest.raises(UnknownVersion):
        engine.generate(prompt_of(9), Sampling(), another.version, [Start()], stream=True)


async def versions_come_and_go_beside_streams(ground: Ground, _: Path) -> Figures:
    """No stream fails while versions are loaded and unloaded, and each has the logprobs of its version."""
    engine, stop, sampled = ground.engine, asyncio.Event(), []

    async def client(number: int) -> None:
        of = ground.versions.all[number % 4]
        while not stop.is_set():
            prompt = prompt_of(12, number)
            tokens = await ground.sample(prompt, of, stream=True, max_tokens=12, temperature=0.9)
            sampled.append((of, prompt, tokens))

    async with asyncio.TaskGroup() as tasks:
        for number in range(SEQUENCES_MAX):
            tasks.create_task(client(number))
        for step in range(300, 303):
            newcomer = renamed(ground.versions.other, step=step)
            await engine.load(newcomer.folder, newcomer.manifest)
            assert (await engine.probe(newcomer.version)).passed
            sampled_tokens = await ground.sample(prompt_of(20), newcomer, max_tokens=8)
            expected = recomputed(ground.versions.other, prompt_of(20), sampled_tokens.token_ids, 1.0)
            assert torch.tensor(sampled_tokens.logprobs) == pytest.approx(expected, abs=1e-4)
            await engine.unload(newcomer.version)
        stop.set()
    assert {of.version for of, _, _ in sampled} == {of.version for of in ground.versions.all}
    for of, prompt, tokens in sampled:
        expected = recomputed(of, prompt, tokens.token_ids, 0.9)
        assert torch.tensor(tokens.logprobs) == pytest.approx(expected, abs=1e-4)
    return {"streams": len(sampled)}


PROMISES: tuple[Promise, ...] = (
    logprobs_are_the_trainers,
    greedy_takes_the_most_likely,
    loaded_weights_answer_as_their_fingerprint,
    other_weights_than_the_fingerprints_do_not_pass,
    truncation_is_in_the_logprobs,
    kept_sets_are_those_that_the_logprobs_are_of,
    the_best_tokens_come_first,
    a_probe_takes_nothing_from_whom_it_is_beside,
    a_stream_brings_what_a_whole_answer_does,
    a_seed_gives_the_same_tokens_in_any_company,
    choices_differ_and_have_streams_of_their_own,
    a_stop_token_ends_a_choice_and_belongs_to_it,
    a_stop_condition_sees_each_token_once,
    a_resumed_greedy_choice_goes_on_as_if_it_had_never_moved,
    a_penalty_is_counted_or_refused,
    logprobs_are_those_after_a_bias,
    what_is_kept_of_a_prompt_belongs_to_a_version_and_a_salt,
    bounds_are_refused_by_name,
    more_than_may_wait_are_refused_and_leaving_makes_room,
    without_a_limit_a_choice_ends_with_the_context,
    a_client_that_leaves_frees_its_place,
    what_is_unusable_is_refused_by_name_and_disturbs_nobody,
    an_unloaded_version_fails_what_it_had_begun_and_nothing_else,
    versions_come_and_go_beside_streams,
    answers_keep_to_their_grammar,
    held_logprobs_are_over_the_masks_of_the_guide,
    a_held_answer_goes_on_or_is_refused,
)


def renamed(of: Stored, **changes: object) -> Stored:
    """Return the same files as a version with another name."""
    return Stored(of.manifest.model_copy(update=changes), of.folder, of.base)


def _copied(of: Stored, folder: Path, without: str = "") -> Path:
    shutil.copytree(of.folder, folder)
    if without:
        (folder / without).unlink()
    return folder


def _configured(of: Stored, folder: Path, **changes: object) -> Path:
    path = _copied(of, folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def beyond(of: Stored, folder: Path) -> Path:
    """Return an adapter of the same base whose rank is above `RANK_MAX`."""
    assert of.base is not None
    return tiny_model.adapter(of.base, folder, seed=9, rank=2 * RANK_MAX)
