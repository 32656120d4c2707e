"""Tests of vLLM: replicas as processes behind a gateway (P3, P8), and restricted answers that are trained.

Replicas are swapped under load, refused, and killed. Their tests depend on each other in this order, because an engine
core takes a minute to start. Answers restricted by a grammar or truncation are trained with the token sets that vLLM
sampled from; its masks come from `HeadraceBackend`, and the tolerances are those of float32 on a CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import openai
import psutil
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.vllm_engine.engine import VllmEngine
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import LoadedVersion, Replica, Routing, ServedVersion, TokenGrammar, Turn
from headrace_schemas.values.base import utcnow
from tests.contract.engine.ground import Stored, recomputed
from tests.support import presence, restricted, tiny_model
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, ReplicaProcess, bus_view, wait_healthy

DIFFERENCE_MAX = 1e-4
ENGINE = VllmSettings(dtype="float32", sequences_max=restricted.PARALLEL, context_tokens_max=512, batch_tokens_max=256)
WAYS: tuple[restricted.Json, ...] = (
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
    backend = HeadraceBackend(config, tokenizer=tokenizer.transformers_tokenizer, vocab_size=restricted.VOCABULARY)
    grammar = backend.compile_grammar(StructuredOutputOptions.GRAMMAR, record.text, {*record.stop_ids})
    masks = []
    for token in token_ids:
        bitmask = backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(bitmask, 0)
        masks.append(bitmask[0].numpy().copy())
        assert grammar.accept_tokens("r", [token])
    return masks


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[restricted.Replica]:
    presence.need("vllm")
    from headrace_inference.vllm_engine.library import VllmLibrary

    base = tiny_model.build(tmp_path / "base", layers=1)
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, base).manifest)
    engine = VllmEngine(ENGINE, VllmLibrary(ENGINE))
    await engine.load(base, manifest)
    tokenizer = ChatTokenizer(base, manifest)
    replica = restricted.Replica(engine, tokenizer, manifest, base, masks_of=partial(masks_of, tokenizer))
    yield replica
    replica.grammars.close()
    await engine.stop()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_restricted_answers_of_vllm_are_trained(
    replica: restricted.Replica, record_property: Callable[[str, object], None]
) -> None:
    differences = {
        "schemas": await restricted.play_json_answers(replica, 200),
        "forced_calls": await restricted.play_forced_calls(replica, 500),
        "truncated": await restricted.play_truncated_answers(replica, 500, WAYS),
    }
    for name, difference in differences.items():
        record_property(name, difference)
    assert max(differences.values()) < DIFFERENCE_MAX


pytestmark = pytest.mark.timeout(3600)
START_S, STEP_S = 1500, 600
"""Limit for an engine core and a step of a test on a machine that others use; a quiet machine needs far less."""
CLIENTS, SWAPS, LENGTH, GREEDY_LENGTH = 16, 5, 12, 800
RANK_MAX, ADAPTERS_MAX = 8, 4
VLLM = {
    "INFERENCE__ENGINE": "vllm",
    "INFERENCE__TTL_S": 60,
    "INFERENCE__VLLM__DTYPE": "float32",
    "INFERENCE__VLLM__CONTEXT_TOKENS_MAX": 1024,
    "INFERENCE__VLLM__SEQUENCES_MAX": 32,
    "INFERENCE__VLLM__ADAPTERS_MAX": ADAPTERS_MAX,
    "INFERENCE__VLLM__ADAPTER_RANK_MAX": RANK_MAX,
    "INFERENCE__VLLM__START_TIMEOUT_S": START_S,
}
PATIENT = {"GATEWAY__UPSTREAM__ROUTING_WAIT_S": STEP_S, "GATEWAY__UPSTREAM__HOLD_S": STEP_S}
"""Replicas are killed here, which closes their connections at once: no test waits for one that hangs."""


@dataclass
class VllmRig:
    """Two replicas, a gateway, and adapters of one base, each trained from the previous one."""

    bus: str
    data: Path
    gateway: GatewayProcess
    replicas: tuple[ReplicaProcess, ReplicaProcess]
    base: ServedVersion
    adapters: Sequence[ServedVersion]
    folders: dict[str, Stored]
    broken: dict[str, ServedVersion]
    revision: list[int] = field(default_factory=lambda: [0])

    @property
    def base_url(self) -> str:
        return f"{self.gateway.url}/v1"

    async def route(self, *serve: ServedVersion, champion: ServedVersion) -> None:
        self.revision[0] += 1
        routing = {"model": "tiny", "revision": self.revision[0], "aliases": {"champion": champion.version}}
        async with bus_view(self.bus, self.data) as view:
            await view.producer.send(Routing.model_validate({"time": utcnow(), **routing, "serve": serve}))

    async def until(self, condition: Callable[[Replica], bool], timeout_s: float = STEP_S) -> list[Replica]:
        """Wait until `condition` holds for both replicas, and return the newest heartbeat of each."""
        began = time.time()
        async with bus_view(self.bus, self.data) as view, asyncio.timeout(timeout_s):
            while True:
                newest = {beat.replica_id: beat for beat in await view.read(Replica)}
                beats = [beat for beat in newest.values() if beat.time.timestamp() >= began - 1]
                if len(beats) == 2 and all(map(condition, beats)):
                    return beats
                await asyncio.sleep(0.3)

    async def turns(self) -> list[Turn]:
        async with bus_view(self.bus, self.data) as view:
            return await view.read(Turn)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=STEP_S)

    def processes_of(self, replica: ReplicaProcess) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(replica.pid).children(recursive=True)
        return children


def ready(*versions: ServedVersion) -> Callable[[Replica], bool]:
    return lambda beat: all(beat.ready(version.version) for version in versions)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmRig]:
    presence.need("vllm")
    root = tmp_path_factory.mktemp("vllm")
    data = root / "data"
    broker = BrokerProcess(root / "broker")
    broker.start()
    blobs = BlobStore(f"file://{data}/blobs")
    where = {"BLOBS__URL": f"file://{data}/blobs"}
    first, second = (ReplicaProcess(root / name, broker.address, **VLLM, **where) for name in ("one", "two"))
    gateway = GatewayProcess(data, broker.address, **PATIENT)
    try:
        with ThreadPoolExecutor(3) as pool:
            starting = [pool.submit(starting_process.start, START_S) for starting_process in (first, second, gateway)]
            running = _rig(root, broker.address, blobs, gateway, (first, second))
            for started in starting:
                started.result()
        yield running
    finally:
        for process in (gateway, first, second):
            process.stop()
        broker.stop()


def _rig(
    root: Path, bus: str, blobs: BlobStore, gateway: GatewayProcess, replicas: tuple[ReplicaProcess, ReplicaProcess]
) -> VllmRig:
    folder = _talkative(tiny_model.build(root / "base"))
    base = tiny_model.publish(blobs, folder)
    below = (base.version, folder)
    adapters: list[ServedVersion] = []
    folders: dict[str, Stored] = {}
    for step in range(1, SWAPS + 2):
        lora = tiny_model.adapter(folder, root / f"adapter{step}", seed=step)
        parent = adapters[-1].version if adapters else base.version
        adapters.append(tiny_model.publish(blobs, lora, step=step, parent=parent, base=below))
        folders[adapters[-1].version] = Stored(None, lora, folder)  # type: ignore[arg-type]
    wide = tiny_model.adapter(folder, root / "wide", seed=50, rank=2 * RANK_MAX)
    other = tiny_model.adapter(folder, root / "other", seed=51)
    damaged = tiny_model.adapter(folder, root / "damaged", seed=52)
    broken = {
        "inference.vllm.adapter_rank_max": tiny_model.publish(blobs, wide, step=50, base=below),
        "from its fingerprint": tiny_model.publish(blobs, other, step=51, base=below, fingerprint_of=root / "adapter1"),
        "do not hash to": tiny_model.publish(blobs, damaged, step=52, base=below),
    }
    weights = blobs.ref((damaged / "adapter_model.safetensors").read_bytes())
    Path(weights.uri.removeprefix("file://")).write_bytes(b"not what it was")
    return VllmRig(bus, root / "data", gateway, replicas, base, adapters, folders, broken)


def _talkative(folder: Path) -> Path:
    """Set the logit of the end of turn to 0, so that each greedy answer reaches its token limit, and return the folder.

    The gateway refuses `ignore_eos`, so a test cannot request long answers.
    """
    weights = load_file(folder / "model.safetensors")
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    weights["model.embed_tokens.weight"][end] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_01_both_replicas_serve_an_adapter_of_a_base(rig: VllmRig) -> None:
    await rig.route(rig.base, rig.adapters[0], champion=rig.adapters[0])
    beats = await rig.until(ready(rig.base, rig.adapters[0]), START_S)
    for beat in beats:
        assert (beat.engine, beat.resumes, beat.capacity) == ("vllm", True, 32)
        probes = [version.probe for version in beat.versions]
        assert all(probe is not None and probe.passed and probe.max_abs_delta < 1e-4 for probe in probes)
    await asyncio.to_thread(wait_healthy, rig.gateway.url, STEP_S)


async def test_02_weights_are_swapped_and_rolled_back_under_streams(
    rig: VllmRig, record_property: Callable[[str, object], None]
) -> None:
    """No request fails, and each turn has the logprobs of the version that it names."""
    stop, streams = asyncio.Event(), [0]

    async def work(client: openai.AsyncOpenAI, number: int) -> None:
        while not stop.is_set():
            chunks = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"question {number} {streams[0]}"}],
                max_tokens=LENGTH,
                stream=True,
                extra_headers={"X-Session-Id": f"swap-{number}-{streams[0]}"},
            )
            ends = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
            assert ends[-1] in ("length", "stop")
            streams[0] += 1

    order = [*rig.adapters[1 : SWAPS + 1], rig.adapters[SWAPS - 1]]
    async with rig.client() as client, asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(work(client, number))
        current = rig.adapters[0]
        for following in order:
            await rig.route(rig.base, current, following, champion=current)
            await rig.until(ready(current, following))
            await rig.route(rig.base, current, following, champion=following)
            target = streams[0] + 2 * CLIENTS
            async with asyncio.timeout(STEP_S):
                while streams[0] < target:  # noqa: ASYNC110 (clients of another process)
                    await asyncio.sleep(0.05)
            current = following
        stop.set()
    turns = [turn for turn in await rig.turns() if turn.session_id.startswith("swap-")]
    assert len(turns) == streams[0]
    by_version: dict[str, int] = defaultdict(int)
    largest = 0.0
    for turn in turns:
        by_version[turn.version or ""] += 1
        (choice,) = turn.choices
        assert len(choice.token_ids) == LENGTH or choice.finish_reason == "stop"
        expected = recomputed(rig.folders[turn.version or ""], turn.prompt_token_ids, choice.token_ids, 1.0)
        largest = max(largest, float(abs(expected - expected.new_tensor(choice.logprobs)).max()))
    assert largest < 1e-4
    assert set(by_version) == {adapter.version for adapter in rig.adapters[: SWAPS + 1]}
    record_property("streams", streams[0])
    record_property("largest_difference", largest)


async def test_03_what_cannot_be_served_fails_by_name_and_disturbs_nobody(rig: VllmRig) -> None:
    champion, more = rig.adapters[0], rig.adapters[1 : ADAPTERS_MAX + 1]
    await rig.route(rig.base, champion, *rig.broken.values(), champion=champion)
    for reason, version in rig.broken.items():
        beats = await rig.until(partial(_failed, version))
        assert all(reason in (state(beat, version).error or "") for beat in beats), reason
        assert all(beat.ready(champion.version) for beat in beats)
    await rig.route(rig.base, champion, *more, champion=champion)
    beats = await rig.until(lambda beat: {state(beat, extra).state for extra in more} <= {"ready", "failed"})
    for beat in beats:
        failed = [state(beat, extra) for extra in more if state(beat, extra).state == "failed"]
        assert ["inference.vllm.adapters_max allows 4" in (extra.error or "") for extra in failed] == [True]
    await rig.route(rig.base, champion, more[-1], champion=champion)
    await rig.until(ready(rig.base, champion, more[-1]))


def _failed(version: ServedVersion, beat: Replica) -> bool:
    return state(beat, version).state == "failed"


def state(beat: Replica, version: ServedVersion) -> LoadedVersion:
    loaded = next((candidate for candidate in beat.versions if candidate.version == version.version), None)
    return loaded or LoadedVersion(version=version.version, state="loading")


async def _greedy(client: openai.AsyncOpenAI, number: int, begun: asyncio.Barrier | None = None) -> list[int]:
    """Return the token ids of a greedy stream. Its text cannot identify the tokens if their bytes are not valid
    UTF-8."""
    token_ids: list[int] = []
    chunks = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"question {number}"}],
        temperature=0,
        max_tokens=GREEDY_LENGTH,
        stream=True,
        extra_body={"return_token_ids": True},
        extra_headers={"X-Session-Id": f"greedy-{number}-{time.monotonic_ns()}"},
    )
    async for chunk in chunks:
        for choice in chunk.choices:
            first = not token_ids
            token_ids += getattr(choice, "token_ids", None) or []
            if first and token_ids and begun is not None:
                await begun.wait()
    return token_ids


async def _through(rig: VllmRig, strike: Callable[[], None]) -> float:
    """Start eight greedy streams, call `strike` when all have begun, and return the number of resumed streams."""
    begun = asyncio.Barrier(9)
    before = await asyncio.to_thread(_resumes, rig)
    async with rig.client() as client:
        async with asyncio.timeout(STEP_S), asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(_greedy(client, number, begun)) for number in range(8)]
            await begun.wait()
            await asyncio.to_thread(strike)
        unbroken = await asyncio.gather(*(_greedy(client, number) for number in range(8)))
    assert [stream.result() for stream in streams] == unbroken, "each stream is whole, no token lost or given twice"
    assert {len(tokens) for tokens in unbroken} == {GREEDY_LENGTH}
    return await asyncio.to_thread(_resumes, rig) - before


def _resumes(rig: VllmRig) -> float:
    lines = httpx2.get(f"{rig.gateway.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("headrace_gateway_resumes_total"))


async def test_04_a_killed_engine_core_ends_its_replica_and_no_client_notices(
    rig: VllmRig, record_property: Callable[[str, object], None]
) -> None:
    replica = rig.replicas[0]
    (core,) = [
        process
        for process in rig.processes_of(replica)
        if "EngineCore" in " ".join([process.name(), *process.cmdline()])
    ]
    resumed = await _through(rig, core.kill)
    assert resumed >= 1
    assert await asyncio.to_thread(replica.wait, STEP_S) != 0, "whoever started it starts it again"
    record_property("resumed", resumed)


async def test_05_a_killed_replica_leaves_nothing_behind_and_no_client_notices(
    rig: VllmRig, record_property: Callable[[str, object], None]
) -> None:
    first, second = rig.replicas
    await asyncio.to_thread(first.start, START_S)
    await rig.until(ready(rig.base, rig.adapters[0]), START_S)
    family = rig.processes_of(second)
    assert family
    resumed = await _through(rig, lambda: os.kill(second.pid, signal.SIGKILL))
    assert resumed >= 1
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 120)
    assert alive == [], "engine cores end with whoever started them"
    record_property("resumed", resumed)


def test_06_a_parser_of_vllm_is_checked_at_the_start(rig: VllmRig, tmp_path: Path) -> None:
    wrong = ReplicaProcess(tmp_path, rig.bus, **VLLM, INFERENCE__TOOL_PARSER="vllm:no_such_parser")
    with contextlib.suppress(TimeoutError):
        wrong.start(timeout_s=1)
    assert wrong.wait(START_S) != 0
    assert "vLLM has no tool parser 'no_such_parser'" in wrong.log
    assert "hermes" in wrong.log
