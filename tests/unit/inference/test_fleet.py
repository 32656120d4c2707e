"""Tests that a replica loads and unloads versions, and that the failure of one version does not affect others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from headrace_inference.engine import NOBODY, Generation, Sampling, Share, Start
from headrace_inference.errors import NoRoom, UnknownVersion, VersionUnusable
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Probe, Routing, ServedVersion
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import Manifest
from tests.support import tiny_model
from tests.unit.inference.conftest import Models

WAIT_S = 5.0


class Holder:
    """Engine that only holds versions."""

    name = "holder"
    resumes = False
    grammars = False
    reports_sets = False
    capacity = 4
    alive = True

    def __init__(self) -> None:
        self.held: list[str] = []
        self.log: list[str] = []
        self.probes: dict[str, Probe] = {}
        self.busy: dict[str, asyncio.Event] = {}
        self.gate: asyncio.Event | None = None
        self.adapters_max = 64
        self.refusals = 0

    async def load(self, folder: Path, manifest: Manifest) -> None:
        assert (folder / "model.safetensors").exists() or manifest.kind == "lora"
        if self.gate is not None:
            await self.gate.wait()
        if manifest.base is not None and manifest.base not in self.held:
            raise VersionUnusable("base")
        if manifest.base is not None and sum("lora" in line for line in self.log) >= self.adapters_max:
            self.refusals += 1
            raise NoRoom("adapters_max")
        self.held.append(manifest.version)
        self.log.append(f"load {manifest.version}")

    async def unload(self, version: str) -> None:
        if version in self.held:
            self.held.remove(version)
            self.log.append(f"unload {version}")

    async def probe(self, version: str) -> Probe:
        return self.probes.get(version, Probe(max_abs_delta=0.0, passed=True))

    async def drained(self, version: str | None = None) -> None:
        if version in self.busy:
            await self.busy[version].wait()

    def in_flight(self, version: str | None = None) -> int:
        return 0

    def context_tokens(self, version: str) -> int:
        return 512

    def vocabulary(self, version: str) -> int:
        return 320

    async def stop(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        pass

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        version: str,
        starts: Sequence[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> Generation:
        raise NotImplementedError


class Rig:
    """A fleet with its engine, and helpers that wait for states."""

    def __init__(self, models: Models, cache: Path, versions_max: int = 4) -> None:
        self.models = models
        self.cache = cache
        self.engine = Holder()
        self.news = asyncio.Event()
        limits = FleetLimits(versions_max=versions_max, drain_s=0.01, retry_s=0.01)
        self.fleet = Fleet(self.engine, VersionCache(models.blobs, cache), limits, self.news.set)
        self.revision = 0

    def route(self, *serve: ServedVersion, champion: ServedVersion | None = None, model: str = "tiny") -> None:
        self.revision += 1
        aliases = {"champion": champion.version} if champion else {}
        routing = {"time": utcnow(), "model": model, "revision": self.revision, "aliases": aliases, "serve": serve}
        self.fleet.follow([Routing.model_validate(routing)])

    @property
    def states(self) -> dict[str, str]:
        return {version.version: version.state for version in self.fleet.versions()}

    def error(self, version: ServedVersion) -> str:
        return next(item.error or "" for item in self.fleet.versions() if item.version == version.version)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self.news.clear()
                await asyncio.wait([asyncio.create_task(self.news.wait())], timeout=0.02)

    async def settled(self, **states: str) -> None:
        """Wait for exactly these states. `states` maps the attribute of a model in `Models` to its load state."""
        expected = {getattr(self.models, name).version: state for name, state in states.items()}
        await self.until(lambda: self.states == expected)


@pytest.fixture
def rig(models: Models, tmp_path: Path) -> Rig:
    return Rig(models, tmp_path / "cache")


async def test_what_routing_names_is_loaded_probed_and_found(rig: Rig, models: Models) -> None:
    rig.route(models.first.served, models.second.served)
    assert rig.states == {models.first.version: "loading", models.second.version: "loading"}
    with pytest.raises(UnknownVersion):
        rig.fleet.find_version(models.first.version)
    await rig.settled(first="ready", second="ready")
    assert rig.fleet.find_version(models.second.version).parent == models.first.version
    assert [served.version for served in rig.fleet.serving_versions()] == [models.first.version, models.second.version]
    assert all(version.probe is not None and version.probe.passed for version in rig.fleet.versions())


async def test_the_champion_is_loaded_first(rig: Rig, models: Models) -> None:
    rig.route(models.first.served, models.second.served, champion=models.second.served)
    await rig.settled(first="ready", second="ready")
    assert rig.engine.log == [f"load {models.second.version}", f"load {models.first.version}"]


async def test_a_bare_name_is_found_when_it_can_only_mean_one_version(rig: Rig, models: Models) -> None:
    rig.route(models.first.served)
    await rig.settled(first="ready")
    assert rig.fleet.find_version("tiny").version == models.first.version
    rig.route(models.first.served, models.second.served)
    await rig.settled(first="ready", second="ready")
    with pytest.raises(UnknownVersion, match="as 2: name one of them"):
        rig.fleet.find_version("tiny")
    with pytest.raises(UnknownVersion):
        rig.fleet.find_version("small")


async def test_a_dropped_version_answers_until_it_is_drained(rig: Rig, models: Models) -> None:
    """P8: no request fails because routing changes."""
    rig.route(models.first.served, models.second.served)
    await rig.settled(first="ready", second="ready")
    busy = rig.engine.busy[models.first.version] = asyncio.Event()
    rig.route(models.second.served)
    assert rig.states[models.first.version] == "draining"
    assert rig.fleet.find_version(models.first.version).version == models.first.version
    assert rig.fleet.find_version("tiny").version == models.second.version, "a bare name means a version that stays"
    busy.set()
    await rig.until(lambda: rig.engine.held == [models.second.version])
    assert rig.states == {models.second.version: "ready"}
    await rig.until(lambda: [path.name for path in rig.cache.glob("*@*")] == [models.second.version])


async def test_a_version_that_is_wanted_again_stays(rig: Rig, models: Models) -> None:
    rig.route(models.first.served)
    await rig.settled(first="ready")
    busy = rig.engine.busy[models.first.version] = asyncio.Event()
    rig.route()
    assert rig.states == {models.first.version: "draining"}
    rig.route(models.first.served)
    assert rig.states == {models.first.version: "ready"}
    busy.set()
    del rig.engine.busy[models.first.version]
    rig.route(models.first.served, models.second.served)
    await rig.settled(first="ready", second="ready")
    assert rig.engine.held == [models.first.version, models.second.version]
    rig.route(models.second.served)
    await rig.until(lambda: rig.engine.held == [models.second.version])


async def test_a_version_that_comes_back_before_it_is_unloaded_is_there_once(rig: Rig, models: Models) -> None:
    """An unload waits for the load of another version. An engine cannot unload one of two versions with equal names."""
    rig.route(models.first.served)
    await rig.settled(first="ready")
    rig.engine.gate = asyncio.Event()
    rig.route(models.second.served)
    await rig.until(lambda: models.first.version not in rig.states)
    rig.route(models.first.served, models.second.served)
    rig.engine.gate.set()
    await rig.settled(first="ready", second="ready")
    assert sorted(rig.engine.held) == sorted([models.first.version, models.second.version])


async def test_a_version_that_is_dropped_while_it_loads_never_answers(rig: Rig, models: Models) -> None:
    rig.engine.gate = asyncio.Event()
    rig.route(models.first.served)
    await asyncio.sleep(0.05)
    rig.route()
    assert rig.states == {}
    rig.engine.gate.set()
    await rig.until(lambda: rig.engine.log == [f"load {models.first.version}", f"unload {models.first.version}"])
    assert rig.fleet.serving_versions() == []
    rig.route(models.first.served)
    await rig.settled(first="ready")


async def test_a_failed_probe_is_a_state_with_a_reason_and_stops_nothing_else(rig: Rig, models: Models) -> None:
    """Pitfalls 15, 18 and 19: a version that fails its probe never becomes ready."""
    rig.engine.probes[models.first.version] = Probe(max_abs_delta=0.25, passed=False)
    rig.route(models.first.served, models.second.served, champion=models.first.served)
    await rig.settled(first="failed", second="ready")
    assert "0.25 from its fingerprint" in rig.error(models.first.served)
    assert rig.engine.held == [models.second.version], "and it takes no memory"
    with pytest.raises(UnknownVersion):
        rig.fleet.find_version(models.first.version)


async def test_weights_that_never_changed_are_named_as_such(rig: Rig, models: Models) -> None:
    probe = Probe(max_abs_delta=0.0, parent_max_abs_delta=0.0, passed=False)
    rig.engine.probes[models.second.version] = probe
    rig.route(models.second.served)
    await rig.settled(second="failed")
    assert "its logprobs equal those of its parent" in rig.error(models.second.served)
    assert rig.fleet.versions()[0].probe == probe


async def test_a_corrupt_file_fails_its_version_alone(models: Models, tmp_path: Path) -> None:
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    good = tiny_model.publish(blobs, models.first.folder)
    bad = tiny_model.publish(blobs, models.second.folder, step=1)
    rig = Rig(models, tmp_path / "cache")
    rig.fleet = Fleet(rig.engine, VersionCache(blobs, tmp_path / "cache"), FleetLimits(4, 0.01, 0.01), rig.news.set)
    weights = next(file for file in models.second.manifest.files if file.path == "model.safetensors").blob
    path = tmp_path / "blobs" / "sha256" / weights.sha256[:2] / weights.sha256
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    rig.route(bad, good)
    await rig.until(lambda: rig.states == {bad.version: "failed", good.version: "ready"})
    assert weights.sha256 in rig.error(bad)


async def test_a_blob_store_that_is_away_is_waited_for(rig: Rig, models: Models, tmp_path: Path) -> None:
    blobs = BlobStore((tmp_path / "empty").as_uri())
    rig.fleet = Fleet(rig.engine, VersionCache(blobs, tmp_path / "cache"), FleetLimits(4, 0.01, 0.01), rig.news.set)
    rig.route(models.first.served)
    await asyncio.sleep(0.05)
    assert rig.states == {models.first.version: "loading"}
    for file in models.first.manifest.files:
        await blobs.aput(models.blobs.get(file.blob))
    await blobs.aput(models.first.manifest.canonical_json())
    await rig.settled(first="ready")


async def test_a_manifest_of_another_version_is_refused(rig: Rig, models: Models) -> None:
    swapped = ServedVersion(version=models.second.version, manifest=models.first.served.manifest)
    rig.route(swapped)
    await rig.settled(second="failed")
    assert f"its manifest is that of {models.first.version}" in rig.error(swapped)


async def test_another_template_than_the_models_is_refused(rig: Rig, models: Models, tmp_path: Path) -> None:
    """P7: one model name always renders the same messages to the same tokens."""
    folder = tiny_model.perturbed(models.first.folder, tmp_path / "other", seed=9)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    other = tiny_model.publish(models.blobs, folder, step=7)
    renamed = tiny_model.publish(models.blobs, folder, step=7, name="small")
    rig.route(models.first.served, other, renamed)
    await rig.until(lambda: "loading" not in rig.states.values())
    assert rig.states == {models.first.version: "ready", other.version: "failed", renamed.version: "ready"}
    assert "template_sha256 differs" in rig.error(other)


async def test_other_tokens_in_another_file_are_refused_too(rig: Rig, models: Models, tmp_path: Path) -> None:
    """`tokenizer.json` and the chat template are equal, but another token ends an answer."""
    folder = tiny_model.perturbed(models.first.folder, tmp_path / "other", seed=9)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    other = tiny_model.publish(models.blobs, folder, step=7)
    rig.route(models.first.served, other)
    await rig.until(lambda: "loading" not in rig.states.values())
    assert rig.states == {models.first.version: "ready", other.version: "failed"}
    assert f"tokenizer_config.json differs from that of {models.first.version}" in rig.error(other)


async def test_an_adapter_waits_for_its_base(rig: Rig, models: Models) -> None:
    rig.route(models.adapter.served, models.first.served, champion=models.adapter.served)
    await rig.settled(adapter="ready", first="ready")
    assert rig.engine.log == [f"load {models.first.version}", f"load {models.adapter.version}"]
    adapter, base = (rig.fleet.find_version(of.version) for of in (models.adapter, models.first))
    assert adapter.tokenizer is base.tokenizer


async def test_an_adapter_whose_base_cannot_be_had_fails_by_name(rig: Rig, models: Models) -> None:
    rig.route(models.adapter.served)
    await rig.settled(adapter="failed")
    assert f"its base {models.first.version} is not in routing" in rig.error(models.adapter.served)
    rig.engine.probes[models.first.version] = Probe(max_abs_delta=1.0, passed=False)
    rig.route()
    rig.route(models.adapter.served, models.first.served)
    await rig.settled(adapter="failed", first="failed")
    assert "failed: " in rig.error(models.adapter.served)


async def test_more_versions_than_fit_wait_for_room(models: Models, tmp_path: Path) -> None:
    rig = Rig(models, tmp_path / "cache", versions_max=1)
    rig.route(models.first.served, models.second.served, champion=models.first.served)
    await rig.settled(first="ready", second="failed")
    assert "versions_max" in rig.error(models.second.served)
    rig.route(models.second.served)
    await rig.settled(second="ready")


async def test_a_version_waits_for_the_room_of_one_that_drains(models: Models, tmp_path: Path) -> None:
    """Versions follow each other quickly, and the registry would reject a version permanently if it failed to load."""
    rig = Rig(models, tmp_path / "cache", versions_max=1)
    rig.route(models.first.served)
    await rig.settled(first="ready")
    busy = rig.engine.busy[models.first.version] = asyncio.Event()
    for _ in range(2):
        rig.route(models.second.served)
        await rig.settled(first="draining", second="loading")
    busy.set()
    await rig.settled(second="ready")
    assert rig.engine.held == [models.second.version]


async def test_a_version_fails_when_the_one_that_drained_is_wanted_again(models: Models, tmp_path: Path) -> None:
    rig = Rig(models, tmp_path / "cache", versions_max=1)
    rig.route(models.first.served)
    await rig.settled(first="ready")
    rig.engine.busy[models.first.version] = asyncio.Event()
    rig.route(models.second.served)
    await rig.settled(first="draining", second="loading")
    rig.route(models.first.served, models.second.served)
    await rig.settled(first="ready", second="failed")
    assert "versions_max" in rig.error(models.second.served)
    await rig.fleet.close()


async def test_closing_ends_what_is_under_way(rig: Rig, models: Models) -> None:
    rig.engine.gate = asyncio.Event()
    rig.route(models.first.served)
    await asyncio.sleep(0.05)
    await asyncio.wait_for(rig.fleet.close(), WAIT_S)


async def test_what_an_engine_has_no_room_for_is_tried_again(rig: Rig, models: Models) -> None:
    """An engine can have its own limits, for example `adapters_max` of vLLM."""
    rig.engine.adapters_max = 0
    rig.route(models.first.served, models.adapter.served)
    await rig.settled(first="ready", adapter="failed")
    assert rig.error(models.adapter.served) == "adapters_max"
    rig.engine.adapters_max = 1
    rig.route(models.first.served, models.adapter.served)
    await rig.settled(first="ready", adapter="ready")


async def test_what_an_engine_has_no_room_for_waits_for_one_that_drains(rig: Rig, models: Models) -> None:
    rig.engine.adapters_max = 0
    rig.route(models.first.served, models.second.served)
    await rig.settled(first="ready", second="ready")
    busy = rig.engine.busy[models.second.version] = asyncio.Event()
    rig.route(models.first.served, models.adapter.served)
    await rig.until(lambda: rig.engine.refusals > 0)
    await rig.settled(first="ready", second="draining", adapter="loading")
    rig.engine.adapters_max = 1
    busy.set()
    await rig.settled(first="ready", adapter="ready")


@pytest.mark.parametrize("error", [RuntimeError("bad \ud83d \0 file"), OSError(2, "\udce9.bin"), NoRoom("\0" * 5000)])
async def test_an_engine_error_with_any_text_fails_one_version(rig: Rig, models: Models, error: Exception) -> None:
    async def load(folder: Path, manifest: Manifest) -> None:
        if manifest.version == models.first.version:
            raise error
        await Holder.load(rig.engine, folder, manifest)

    rig.engine.load = load  # type: ignore[method-assign]
    rig.route(models.first.served, models.second.served)
    await rig.settled(first="failed", second="ready")
    assert all(version.model_dump_json() for version in rig.fleet.versions())
