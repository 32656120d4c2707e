"""Tests of the loading of versions, of probes, and of heartbeats.

Invalid versions are refused. Probes detect wrong weights. Only parts that cannot change are shared. Heartbeats report
the loaded versions, the answer forms of their tokenizers, and whether token sets are recorded.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import httpx
import pytest
import structlog
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace_inference.announce import Announcer
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import VersionUnusable
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.torch_engine.loader import Loader
from headrace_inference.torch_engine.program import Programs, _attention, direct_program, forward, tensors_of
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import LoadedVersion, Replica, TokenGrammar
from headrace_schemas.events.routing import LoadState
from headrace_schemas.events.turn import check_sets, iterate_sets
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import Fingerprint
from tests.support import tiny_model
from tests.unit.inference.conftest import Json, MakeEngine, Models, client, prompt_of, sample
from tests.unit.inference.test_fleet import Rig
from tests.unit.inference.test_grammars import FORMAT, RealEngine, ask_real

CPU = torch.device("cpu")


def loader() -> Loader:
    return Loader(CPU, torch.float32, 4096, trace=True)


async def test_a_probe_passes_where_weights_and_fingerprint_agree(engine: TorchEngine, models: Models) -> None:
    alone = await engine.probe(models.first.version)
    assert alone.passed
    assert alone.max_abs_delta < 1e-5
    assert alone.parent_max_abs_delta is None
    await engine.load(models.second.folder, models.second.manifest)
    child = await engine.probe(models.second.version)
    assert child.passed
    assert child.max_abs_delta < 1e-5
    assert child.parent_max_abs_delta is not None
    assert child.parent_max_abs_delta > 1e-3


async def test_a_probe_fails_on_other_weights_than_the_trainers(engine: TorchEngine, models: Models) -> None:
    """Pitfalls 15 and 18: the loaded weights differ from the trained weights."""
    impostor = models.second.manifest.model_copy(update={"fingerprint": models.first.manifest.fingerprint})
    await engine.load(models.second.folder, impostor)
    probe = await engine.probe(impostor.version)
    assert not probe.passed
    assert probe.max_abs_delta > 1e-3


async def test_a_probe_fails_when_nothing_was_learned(engine: TorchEngine, models: Models) -> None:
    """Pitfall 15: the new version has the logprobs of its parent."""
    same = models.first.manifest.model_copy(update={"step": 1, "parent": models.first.version})
    await engine.load(models.first.folder, same)
    probe = await engine.probe(same.version)
    assert not probe.passed
    assert probe.parent_max_abs_delta == 0.0


async def test_a_probe_tells_a_decode_path_that_is_wrong(
    engine: TorchEngine, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs the traced programs that serve requests, not only the model's own code."""
    model = engine._models[models.first.version][0]
    other = loader().load(models.second.folder, models.second.manifest, None, None)
    monkeypatch.setitem(vars(model), "weights", other.weights)
    assert not (await engine.probe(models.first.version)).passed


async def test_an_adapter_is_a_version_of_its_own(engine: TorchEngine, models: Models) -> None:
    await engine.load(models.adapter.folder, models.adapter.manifest)
    probe = await engine.probe(models.adapter.version)
    assert probe.passed
    assert probe.parent_max_abs_delta is not None
    assert probe.parent_max_abs_delta > 1e-3
    assert (await engine.probe(models.first.version)).passed, "its base is what it was"
    tokens = await sample(engine, prompt_of(30), models.adapter.version, temperature=0.8)
    plain = AutoModelForCausalLM.from_pretrained(models.first.folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, str(models.adapter.folder)).eval()
    with torch.no_grad():
        logits = adapted(torch.tensor([prompt_of(30) + tokens.token_ids])).logits[0, 29:-1] / 0.8
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens.token_ids)[:, None])[:, 0]
    assert torch.tensor(tokens.logprobs) == pytest.approx(expected, abs=1e-4)


async def test_adapters_share_the_memory_of_their_base(engine: TorchEngine, models: Models) -> None:
    await engine.load(models.adapter.folder, models.adapter.manifest)
    base, adapted = (
        {tensor.data_ptr() for tensor in engine._models[version][0].weights if tensor.numel() > 64}
        for version in (models.first.version, models.adapter.version)
    )
    assert base <= adapted


async def test_an_adapter_without_its_base_is_refused(make_engine: MakeEngine, models: Models) -> None:
    engine = await make_engine()
    await engine.unload(models.first.version)
    with pytest.raises(VersionUnusable, match=f"its base {models.first.version} is not loaded"):
        await engine.load(models.adapter.folder, models.adapter.manifest)


def _damaged(models: Models, folder: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(models.first.folder, folder)
    change(folder)
    return folder


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _reshape_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 100), "Error"),
        (lambda folder: (folder / "model.safetensors").unlink(), "Error"),
        (_drop_a_tensor, "missing_keys"),
        (_reshape_a_tensor, "mismatch"),
        (_config(model_type="no_such_model"), "no_such_model"),
        (_config(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (_config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "dynamic"),
        (lambda folder: (folder / "config.json").write_text("{"), "Error"),
    ],
    ids=["corrupt", "absent", "missing", "reshaped", "unknown", "sliding", "unsteady", "config"],
)
def test_what_is_not_whole_is_refused_by_name(
    models: Models, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    folder = _damaged(models, tmp_path / "damaged", change)
    with pytest.raises(VersionUnusable, match=reason) as refused:
        loader().load(folder, models.first.manifest, None, None)
    assert str(refused.value).startswith(models.first.version)


def test_a_model_that_cannot_be_traced_runs_its_own_code(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("cannot trace")

    monkeypatch.setattr(torch.jit, "trace", broken)
    model = loader().load(models.first.folder, models.first.manifest, None, None)
    assert not model.program.traced


def test_a_recording_that_differs_is_not_used(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's code branches on a length in Python, so the trace has only the branch that was taken."""
    from headrace_inference.torch_engine import program

    def branching(module: torch.nn.Module, ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        logits = forward(module, ids, *rest)
        return logits * 2 if rest[1].shape[0] > 20 else logits

    monkeypatch.setattr(program, "forward", branching)
    model = loader().load(models.first.folder, models.first.manifest, None, None)
    assert not model.program.traced


@pytest.mark.parametrize(("share", "is_used"), [(1e-6, True), (1e-3, False), (math.nan, False)])
def test_roundings_of_large_logits_are_accepted_in_a_recording(
    models: Models, monkeypatch: pytest.MonkeyPatch, share: float, is_used: bool
) -> None:
    """A model of 135 million parameters differs by 1e-4 where its logits are 30, which is a few roundings."""
    from headrace_inference.torch_engine import program

    def large(module: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        return forward(module, *inputs) * 1000

    def rounded(module: torch.nn.Module, _scratch: object) -> program.Program:
        exact = direct_program(module)

        def prefill(*inputs: object) -> torch.Tensor:
            return exact.prefill(*inputs) * (1 + share)

        return program.Program(exact.decode, prefill, traced=True)

    monkeypatch.setattr(program, "forward", large)
    monkeypatch.setattr(program, "_trace", rounded)
    model = loader().load(models.first.folder, models.first.manifest, None, None)
    assert model.program.traced == is_used


def test_versions_of_one_architecture_share_one_recording(models: Models) -> None:
    shared_loader = loader()
    first = shared_loader.load(models.first.folder, models.first.manifest, None, None)
    second = shared_loader.load(models.second.folder, models.second.manifest, None, None)
    adapter = shared_loader.load(models.adapter.folder, models.adapter.manifest, first, models.first.folder)
    assert first.program is second.program
    assert adapter.program is not first.program, "LoRA's scaling is part of the recording"
    assert first.program.traced
    assert adapter.program.traced


def test_an_adapter_with_another_scaling_is_another_recording(models: Models, tmp_path: Path) -> None:
    scaled = shutil.copytree(models.adapter.folder, tmp_path / "scaled")
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3 * config["lora_alpha"]}))
    first = loader()
    base = first.load(models.first.folder, models.first.manifest, None, None)
    adapters = [
        first.load(folder, models.adapter.manifest, base, models.first.folder)
        for folder in (models.adapter.folder, scaled)
    ]
    kv = [adapter.kv_shape.zeros(1, 32) for adapter in adapters]
    ids, at = torch.tensor([[11, 12, 13]]), torch.arange(3)[None]
    with torch.inference_mode():
        answers = [a.program.prefill(a.weights, ids, at, torch.arange(3), k) for a, k in zip(adapters, kv, strict=True)]
        expected = [
            direct_program(a.module).prefill([], ids, at, torch.arange(3), k) for a, k in zip(adapters, kv, strict=True)
        ]
    assert not torch.allclose(answers[0], answers[1], atol=1e-3)
    for answer, right in zip(answers, expected, strict=True):
        assert torch.allclose(answer, right, atol=1e-5)


def test_recordings_can_be_switched_off(models: Models) -> None:
    model = Loader(CPU, torch.float32, 4096, trace=False).load(models.first.folder, models.first.manifest, None, None)
    assert not model.program.traced
    assert Programs(trace=False)._programs == {}
    assert len(tensors_of(model.module)) == len(model.weights)


def test_a_fingerprint_of_two_tokens_can_be_probed(models: Models) -> None:
    from headrace_inference.torch_engine.probe import probe

    short = tiny_model.fingerprint(models.first.folder, length=2)
    assert isinstance(short, Fingerprint)
    manifest = models.first.manifest.model_copy(update={"fingerprint": short})
    assert probe(loader().load(models.first.folder, manifest, None, None), None, 1e-3).passed


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "position_bias"])
def test_attention_that_is_not_plain_is_refused(argument: str) -> None:
    """The fused attention would silently ignore such an argument."""
    some, mask = torch.zeros(1, 2, 3, 8), torch.zeros(1, 1, 3, 3)
    _attention(torch.nn.Identity(), some, some, some, mask, None, **{argument: None})
    with pytest.raises(NotImplementedError, match="Identity needs more than plain attention"):
        _attention(torch.nn.Identity(), some, some, some, mask, None, **{argument: some})


async def test_a_heartbeat_names_the_ready_versions_when_there_are_more_than_it_holds() -> None:
    counts: dict[LoadState, int] = {"failed": 50, "draining": 10, "loading": 10, "ready": 8}
    states = [state for state, count in counts.items() for _ in range(count)]
    versions = tuple(LoadedVersion(version=f"m@{number:016x}", state=state) for number, state in enumerate(states))
    now, producer = utcnow(), mock.AsyncMock(spec=EventProducer)
    identity = Replica(
        time=now, replica_id="r", url="http://127.0.0.1:1", engine="e", capacity=1, ttl_s=1.0, started_at=now
    )
    announcer = Announcer(producer, SystemClock(), identity, lambda: versions, lambda: 0, 1.0, asyncio.Event())
    await announcer.announce()
    (heartbeat,) = producer.send.await_args.args
    received = Replica.from_json(heartbeat.to_json())
    assert [version.state for version in received.versions] == [
        *["ready"] * 8, *["draining"] * 10, *["loading"] * 10, *["failed"] * 36
    ]  # fmt: skip


async def test_a_tokenizer_that_disagrees_with_the_grammar_takes_the_ability_from_the_heartbeat(
    models: Models, tmp_path: Path
) -> None:
    """The heartbeat reports no answer forms until that version is unloaded; the version still serves unconstrained
    requests."""
    limits = FleetLimits(versions_max=4, drain_s=0.01, retry_s=0.01)
    rig = Rig(models, tmp_path / "cache")
    checked: list[int] = []

    def check(_tokenizer: object, vocabulary: int) -> str:
        checked.append(vocabulary)
        return "its tokens are not what they seem"

    rig.fleet = Fleet(rig.engine, VersionCache(models.blobs, tmp_path / "cache"), limits, rig.news.set, check)
    assert rig.fleet.supports_forms()
    rig.route(models.first.served)
    with structlog.testing.capture_logs() as logs:
        await rig.until(lambda: rig.states.get(models.first.version) == "ready")
    assert not rig.fleet.supports_forms()
    assert checked == [320]
    assert [entry["reason"] for entry in logs if entry["event"] == "forms_not_held"] == [check(None, 320)]
    rig.route()
    await rig.until(lambda: not rig.states)
    assert rig.fleet.supports_forms()
    await rig.fleet.close()


def chunks_of(response: httpx.Response) -> list[Json]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


async def test_answers_report_the_tokens_that_they_were_sampled_from(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer
) -> None:
    """The grammar is in the plain answer or in the first chunk, and stored token sets accompany their tokens."""
    ids: Json = {"return_token_ids": True, "max_tokens": 12}
    async with client(RealEngine(tokenizer, engine, models.first.version), tokenizer) as http:
        complete = (await ask_real(http, response_format=FORMAT, **ids)).json()
        grammar = TokenGrammar.model_validate(complete["headrace_grammar"])
        assert (grammar.library, grammar.vocabulary) == ("llguidance", 320)
        assert {*grammar.stop_ids} == tokenizer.stop_ids
        first, *later = chunks_of(await ask_real(http, response_format=FORMAT, stream=True, **ids))
        assert first["headrace_grammar"] == complete["headrace_grammar"]
        assert not any("headrace_grammar" in chunk for chunk in later)
        begun = {
            "choices": [{"index": 0, "token_ids": complete["choices"][0]["token_ids"][:3], "logprobs": [-1.0] * 3}]
        }
        (opening, *_) = chunks_of(
            await ask_real(http, response_format=FORMAT, stream=True, headrace_resume=begun, **ids)
        )
        assert opening["headrace_grammar"] == complete["headrace_grammar"]
        (truncated,) = (await ask_real(http, top_k=3, **ids)).json()["choices"]
        check_sets(truncated["headrace_stored_sets"], truncated["token_ids"])
        assert all(len(allowed) == 3 for allowed in iterate_sets(truncated["headrace_stored_sets"]))
        deltas = [chunk["choices"] for chunk in chunks_of(await ask_real(http, top_k=3, stream=True, **ids))]
        streamed = [n for choices in deltas for choice in choices for n in choice.get("headrace_stored_sets", ())]
        assert streamed == truncated["headrace_stored_sets"]
        assert "headrace" not in (await ask_real(http, **ids)).text
        assert "headrace" not in (await ask_real(http, response_format=FORMAT, top_k=3, max_tokens=12)).text
