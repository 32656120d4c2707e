"""Tests of the conversion to vLLM's requests and from its outputs, of engine cores, and of adapter folders.

Unsupported parameters are refused. An engine core ends by itself if its service is killed. Adapter folders that vLLM
would load only in part are refused with the reason.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest

from headrace_inference.engine import Sampling, Start, Tokens
from headrace_inference.errors import EngineFailed, VersionUnusable
from headrace_inference.vllm_engine import orphans
from headrace_inference.vllm_engine.orphans import VARIABLE, end_with_the_service
from headrace_inference.vllm_engine.probing import CONFIG, check_adapter
from headrace_inference.vllm_engine.requests import (
    KEPT_MAX,
    cut_at_stop,
    refuse_unsupported,
    request_of,
    seed_of,
    tokens_of,
)
from headrace_runtime.errors import Refused
from tests.unit.inference.conftest import Models


@dataclass(frozen=True)
class Entry:
    logprob: float
    rank: int | None = None


@dataclass(frozen=True)
class Piece:
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Entry]] | None
    finish_reason: str | None = None


@dataclass(frozen=True)
class ScriptedRequest:
    outputs: Sequence[Piece]
    num_cached_tokens: int | None = None


@dataclass
class Watch:
    stop: int
    seen: list[int] = field(default_factory=list)

    def __call__(self, token: int) -> bool:
        self.seen.append(token)
        return token == self.stop


def test_every_field_of_a_sampling_is_passed_on() -> None:
    sampling = Sampling(
        max_tokens=99,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((4, 1.0),),
        stop_ids=frozenset({7, 3}),
        top_logprobs=4,
    )
    request = request_of(sampling, Start(), 50, stream=True)
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (50, 0.7, 0.9, 40)
    assert (request.min_p, request.presence_penalty, request.frequency_penalty) == (0.05, 0.5, 0.25)
    assert request.logprobs == 41, "those of top_k, and one more by which ties would show"
    assert request.stop_token_ids == (3, 7)
    assert request.seed is None
    assert request.logit_bias == {4: 1.0}


def test_no_limit_of_the_best_is_zero_for_vllm() -> None:
    assert request_of(Sampling(top_k=-1), Start(), 5, stream=False).top_k == 0


@pytest.mark.parametrize(
    ("start", "stream", "delta"),
    [(Start(), False, False), (Start(), True, True), (Start(until=lambda _: False), False, True)],
    ids=["whole", "stream", "whole with a stop string"],
)
def test_tokens_are_asked_for_as_they_come_where_somebody_watches(start: Start, stream: bool, delta: bool) -> None:
    assert request_of(Sampling(), start, 5, stream=stream).delta is delta


def test_a_frequency_penalty_counts_what_was_sampled_elsewhere() -> None:
    """vLLM treats resumed tokens as prompt and does not count them, so a logit bias applies the penalty to them."""
    sampling = Sampling(frequency_penalty=0.5, logit_bias=((9, 1.0), (3, 2.0)))
    request = request_of(sampling, Start(resumed=[9, 4, 9, 9]), 5, stream=True)
    assert request.logit_bias == {9: -0.5, 4: -0.5, 3: 2.0}


def test_seeds_are_of_a_choice_and_of_a_place() -> None:
    seeds = {seed_of(seed, choice, resumed) for seed in (1, 2) for choice in (0, 1) for resumed in (0, 5)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds), "as torch takes them"
    assert seed_of(-(2**70), 3, 0) == seed_of(-(2**70), 3, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0, 2.0])
def test_temperatures_that_vllm_samples_at(temperature: float) -> None:
    refuse_unsupported(Sampling(temperature=temperature), [Start()])


def test_a_temperature_that_vllm_would_change_is_refused() -> None:
    """vLLM would raise the temperature to 0.01, so the logprobs would be of another distribution than requested."""
    with pytest.raises(Refused, match=r"at 0 \(greedy\) or at 0.01 and above") as refused:
        refuse_unsupported(Sampling(temperature=0.009), [Start()])
    assert (refused.value.status, refused.value.param) == (400, "temperature")


def test_a_presence_penalty_on_a_resumed_choice_is_refused_alone() -> None:
    penalised = Sampling(presence_penalty=0.1)
    refuse_unsupported(penalised, [Start(0), Start(1)])
    refuse_unsupported(Sampling(frequency_penalty=0.1), [Start(resumed=[5])])
    with pytest.raises(Refused, match="headrace_resume") as refused:
        refuse_unsupported(penalised, [Start(0), Start(1, resumed=[5])])
    assert refused.value.param == "presence_penalty"


def test_an_output_becomes_tokens() -> None:
    entries = [{5: Entry(-0.5, 1), 6: Entry(-1.0, 2)}, {7: Entry(-3.0, 9), 5: Entry(-0.1, 1), 6: Entry(-0.2, 2)}]
    tokens = tokens_of(ScriptedRequest([Piece([5, 7], entries, "length")], 30), 2, 20, 2)
    assert (tokens.choice, tokens.token_ids, tokens.logprobs, tokens.finish) == (2, [5, 7], [-0.5, -3.0], "length")
    assert tokens.top == [[(5, -0.5), (6, -1.0)], [(5, -0.1), (6, -0.2)]], "the sampled one is no more than sampled"
    assert tokens.cached_tokens == 20, "of the prompt; what was resumed is none of it"


def test_kept_sets_are_the_tokens_with_finite_logprobs() -> None:
    out = Entry(-math.inf)
    entries = [{5: Entry(-0.5), 9: out, 6: Entry(-1.0)}, {7: Entry(0.0), 5: out, 6: out}]
    output = ScriptedRequest([Piece([5, 7], entries)])
    assert tokens_of(output, 0, 9, 0, ranked=3).sets == [2, 5, 6, 1, 7]
    assert tokens_of(output, 0, 9, 0, ranked=2).sets is None, "there may be more than two"
    assert tokens_of(output, 0, 9, 0).sets is None
    tokens = cut_at_stop(tokens_of(output, 0, 9, 0, ranked=3), Start(until=Watch(5)))
    assert (tokens.token_ids, tokens.sets) == ([5], [2, 5, 6])


@pytest.mark.parametrize(
    ("sampling", "ranked"),
    [
        (Sampling(), 0),
        (Sampling(temperature=0.0, top_p=0.5), 0),
        (Sampling(top_p=0.5), KEPT_MAX),
        (Sampling(top_p=0.5, top_k=20), 21),
        (Sampling(min_p=0.1, top_k=1000), KEPT_MAX),
    ],
)
def test_truncation_needs_the_best_logprobs_as_they_come(sampling: Sampling, ranked: int) -> None:
    request = request_of(sampling, Start(), 9, stream=False)
    assert (request.logprobs, request.delta) == (ranked, ranked > 0)


def test_nobody_asked_for_the_best() -> None:
    assert tokens_of(ScriptedRequest([Piece([5], [{5: Entry(-0.5, 1)}])]), 0, 9, 0).top == []


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        (Piece([5], None), "0 logprobs for 1 tokens"),
        (Piece([5], [{5: Entry(float("nan"))}]), "the logits are NaN"),
        (Piece([], [], "abort"), "ended a request with 'abort'"),
        (Piece([], [], "error"), "ended a request with 'error'"),
    ],
    ids=["without logprobs", "nan", "aborted", "error"],
)
def test_what_is_no_answer_fails(piece: Piece, reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        tokens_of(ScriptedRequest([piece]), 0, 9, 0)


def piece(ids: Sequence[int], finish: str | None = None) -> Tokens:
    top = [[(token, -1.0)] for token in ids]
    return Tokens(0, [*ids], [-1.0] * len(ids), top, "stop" if finish == "stop" else None, 3)


def test_what_was_sampled_behind_a_stop_string_was_never_asked_for() -> None:
    watch = Watch(6)
    tokens = cut_at_stop(piece([5, 6, 7, 8]), Start(until=watch))
    assert (tokens.token_ids, tokens.finish, tokens.cached_tokens) == ([5, 6], "stop", 3)
    assert len(tokens.logprobs) == len(tokens.top) == 2
    assert watch.seen == [5, 6]


def test_a_stop_token_is_no_text_to_look_at() -> None:
    watch = Watch(6)
    tokens = cut_at_stop(piece([5, 6], "stop"), Start(until=watch))
    assert (tokens.token_ids, tokens.finish) == ([5, 6], "stop")
    assert watch.seen == [5]
    assert cut_at_stop(piece([5, 6]), Start()).finish is None, "nobody watches"


CORE = """
import os, time
from headrace_inference.vllm_engine.orphans import end_with_the_service
end_with_the_service()
print(os.getpid(), flush=True)
time.sleep(300)
"""
SERVICE = f"""
import os, subprocess, sys
os.environ["{VARIABLE}"] = str(os.getpid())
subprocess.run([sys.executable, "-c", {CORE!r}])
"""


def test_a_core_ends_with_its_service() -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    core = psutil.Process(int(service.stdout.readline()))
    try:
        assert core.is_running()
        service.kill()
        service.wait(10)
        _, alive = psutil.wait_procs([core], 30)
        assert alive == []
    finally:
        if core.is_running():
            os.kill(core.pid, signal.SIGKILL)


def test_the_service_itself_watches_nobody() -> None:
    before = psutil.Process().num_threads()
    end_with_the_service()
    os.environ[VARIABLE] = str(os.getpid())
    try:
        end_with_the_service()
    finally:
        del os.environ[VARIABLE]
    assert psutil.Process().num_threads() == before


def test_vllm_is_told_of_its_plugins() -> None:
    plugins = {plugin.name: plugin for plugin in entry_points(group="vllm.general_plugins")}
    assert plugins["headrace"].load() is orphans.end_with_the_service
    assert plugins["headrace_masks"].value == "headrace_inference.vllm_engine.masks:use_own_masks"


def changed(models: Models, folder: Path, **changes: object) -> Path:
    shutil.copytree(models.adapter.folder, folder, dirs_exist_ok=True)
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_a_plain_adapter_is_taken(models: Models) -> None:
    check_adapter(models.adapter.folder, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 5}, "the adapter has rank 5, inference.vllm.adapter_rank_max allows 4"),
        ({"peft_type": "IA3"}, "adapters of type IA3"),
        ({"use_dora": True}, "sets use_dora = true, which vLLM does not support"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "the adapter has rank 8"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": None, "rank_pattern": {"q_proj": 2}}, "cannot be read: TypeError"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_what_vllm_would_leave_out_is_refused(
    models: Models, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(VersionUnusable, match=reason):
        check_adapter(changed(models, tmp_path / "changed", **changes), 4)


@pytest.mark.parametrize("name", [CONFIG, "adapter_model.safetensors"])
def test_a_missing_file_is_named(models: Models, tmp_path: Path, name: str) -> None:
    folder = changed(models, tmp_path / "changed")
    (folder / name).unlink()
    with pytest.raises(VersionUnusable, match=name):
        check_adapter(folder, 4)


def test_a_configuration_that_is_no_json_is_named(models: Models, tmp_path: Path) -> None:
    folder = changed(models, tmp_path / "changed")
    (folder / CONFIG).write_text("{")
    with pytest.raises(VersionUnusable, match=f"{CONFIG} cannot be read: JSONDecodeError"):
        check_adapter(folder, 4)
