"""Tests of fixed models, of demos and of base models from a hub, with real services.

A folder is registered, served, called, named, exported and imported. A demo continues after a failure of the bus. A
base model from a hub is downloaded once, served, restarted without the hub, pushed, and downloaded again. Traces
of versions and of sessions over a bus agree with a generated history.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace.producing import Outgoing, producing
from headrace.topics import Entry, Range, connected
from headrace_cli.demo.console_reporter import Watch
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import trace_version
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.topics import ensure
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.base_files import ORIGIN_FILE
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, ModelEvent, Turn
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.packages import FakeHub
from tests.support.presence import draw_seed
from tests.support.processes import free_port, wait_until
from tests.support.servers import BrokerProcess
from tests.support.service_process import HEADRACE, HeadraceUp, run_of
from tests.support.training_history import TOPICS, assert_traces_agree, made_up, recorded

SERVICES = ("broker", "gateway", "registry", "inference")
WAIT_S = 120.0


@dataclass
class Stack:
    """Running services, and the folders of a model, another version of it, and an adapter on it."""

    folder: Path
    first: Path
    second: Path
    adapter: Path

    def models(self, *arguments: str) -> str:
        command = [HEADRACE, "models", *arguments, "--data-dir", str(self.folder)]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert process.returncode == 0, f"{arguments}: {process.stdout}{process.stderr}"
        return process.stdout

    def refused(self, *arguments: str) -> str:
        command = [HEADRACE, "models", *arguments, "--data-dir", str(self.folder)]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        assert process.returncode != 0, process.stdout
        return process.stderr

    def versions(self, model: str) -> list[dict[str, Any]]:
        versions: list[dict[str, Any]] = json.loads(self.models("show", model, "--json"))
        return versions

    def chat(self, model: str) -> httpx2.Response:
        state = run_of(self.folder)
        assert state is not None
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        return httpx2.post(f"{state.base_url}/chat/completions", json=body, timeout=WAIT_S)

    def answers(self, model: str) -> str:
        """Wait until the model answers, and return the version that answered."""
        wait_until(lambda: self.chat(model).status_code == 200, WAIT_S, f"{model} answers")
        version: str = self.chat(model).json()["model"]
        return version

    def turns(self) -> list[Turn]:
        state = run_of(self.folder)
        assert state is not None
        bus = state.bus

        async def read() -> list[Turn]:
            async with connected(bus) as topics:
                return [entry.event async for entry in topics.read(Range(Turn.topic)) if isinstance(entry.event, Turn)]

        return asyncio.run(read())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("models")
    first = tiny_model.build(root / "first")
    second = tiny_model.perturbed(first, root / "second", seed=1)
    adapter = tiny_model.adapter(first, root / "adapter", seed=2)
    config = root / "headrace.toml"
    config.write_text("[registry]\npoll_s = 0.2\nretired_for_s = 0.0\n")
    folder = root / "data"
    up = HeadraceUp(folder, config, {}, {})
    up._command += [word for name in SERVICES for word in ("--only", name)]
    with up._log.open("ab") as log:
        up._process = subprocess.Popen(up._command, stdout=log, stderr=log)
    try:
        wait_until(lambda: (state := run_of(folder)) is not None and state.up, WAIT_S, "it is up")
        yield Stack(folder, first, second, adapter)
    finally:
        up.stop()


@pytest.mark.long
def test_a_folder_is_registered_served_and_called_by_its_name(stack: Stack) -> None:
    output = stack.models("register", str(stack.first), "--name", "opponent", "--version-label", "v1.0", "--serve")
    (version,) = [entry["id"] for entry in stack.versions("opponent")]
    assert version in output
    assert stack.answers("opponent") == version
    assert stack.answers("opponent:v1.0") == version
    turn = stack.turns()[-1]
    assert (turn.model, turn.version, turn.untrained) == ("opponent", version, "registered")


@pytest.mark.long
def test_another_version_beside_it_and_a_pin(stack: Stack) -> None:
    stack.models("register", str(stack.second), "--name", "opponent", "--version-label", "v1.1", "--serve")
    second, first = (entry["id"] for entry in stack.versions("opponent"))
    assert (stack.answers("opponent:v1.1"), stack.answers("opponent")) == (second, first)
    stack.models("alias", "opponent", "stable", "v1.0", "--why", "known")
    assert stack.answers("opponent:stable") == first
    stack.models("pin", "opponent", "v1.1")
    wait_until(lambda: stack.chat("opponent").json().get("model") == second, WAIT_S, "the pinned version answers")
    diff = stack.models("diff", "opponent:v1.0", "opponent:v1.1")
    assert "model.safetensors" in diff
    assert "trained elsewhere" in diff


@pytest.mark.long
def test_an_adapter_of_it_is_a_model_of_its_own_and_merged_it_is_another(stack: Stack, tmp_path: Path) -> None:
    stack.models("register", str(stack.adapter), "--name", "formal", "--base", "opponent:v1.0", "--serve")
    (adapter,) = [entry["id"] for entry in stack.versions("formal")]
    assert stack.answers("formal") == adapter
    stack.models("export", adapter, str(tmp_path / "merged"), "--merge")
    stack.models("register", str(tmp_path / "merged"), "--name", "merged")
    assert len(stack.versions("merged")) == 1
    second = stack.versions("opponent")[0]["id"]
    text = stack.refused("register", str(tmp_path / "adapter-of-another"), "--name", "formal", "--base", second)
    assert "adapter-of-another" in text


@pytest.mark.long
def test_an_exported_version_is_imported_as_the_very_same(stack: Stack, tmp_path: Path) -> None:
    version = stack.versions("opponent")[0]["id"]
    stack.models("export", version, str(tmp_path / "exported"))
    assert version in stack.models("import", str(tmp_path / "exported"))
    path = tmp_path / "exported" / "config.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    assert "config.json is not the file that was exported" in stack.refused("import", str(tmp_path / "exported"))


@pytest.mark.long
def test_retired_and_collected(stack: Stack) -> None:
    (version,) = [entry["id"] for entry in stack.versions("merged")]
    assert "alias stable names it" in stack.refused("retire", "opponent", "v1.0")
    stack.models("retire", "merged", version, "--why", "a test")
    assert version in stack.models("collect")
    assert "were removed" in stack.models("collect", "--really", "--why", "a test")
    assert stack.versions("merged")[0]["collected"] is True
    assert stack.answers("formal").startswith("formal@"), "what shares files with it goes on"
    log = json.loads(stack.models("audit", "merged", "--json"))["data"]
    assert [entry["action"] for entry in log] == ["collect", "retire", "register"]
    assert log[0]["who"]


TIME = utcnow()


def decided(decision: str, digest: str, model: str = "m", *, at_s: float = 0.0) -> ModelEvent:
    fields = {
        "time": TIME + timedelta(seconds=at_s),
        "model": model,
        "version": f"{model}@{digest * 16}",
        "decision": decision,
        "statistics": {"score": 0.5},
    }
    return ModelEvent.model_validate({"decision_id": f"{decision} {digest}", **fields})


promoted = partial(decided, "promoted")


async def test_it_outlives_the_bus_and_passes_over_other_models(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path)
    await asyncio.to_thread(broker.start)
    settings = BusSettings(address=broker.address)
    await catalogue.ensure(settings)
    watch = Watch(broker.address, "m")
    watching = asyncio.create_task(watch.run())

    async def tell(*events: ModelEvent) -> None:
        producer = EventProducer(settings, "test", BlobStore(tmp_path.as_uri()))
        await producer.start()
        for event in events:
            await producer.send(event)
        await producer.stop()

    async def seen(count: int) -> None:
        async with asyncio.timeout(60):
            while len(watch.champions) < count:
                assert not watching.done(), watching.exception()
                watch.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(watch.changed.wait(), 1.0)

    try:
        await tell(promoted("c", "opponent"), promoted("a"))
        await seen(1)
        await asyncio.to_thread(broker.kill)
        await asyncio.sleep(2.0)  # it looks at the bus that is not there, more than once
        await asyncio.to_thread(broker.start)
        await tell(decided("registered", "b", at_s=1.5), promoted("b", at_s=9.0))
        await seen(2)
        assert watch.takeover_s == {f"m@{'b' * 16}": 7.5}
        assert watch.champions == [f"m@{digest * 16}" for digest in "ab"]
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await asyncio.to_thread(broker.stop)


MODEL = "my-agent"


def run(arguments: list[str], environ: Mapping[str, str]) -> str:
    process = subprocess.run(
        [HEADRACE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, **environ},
    )
    assert process.returncode == 0, f"{arguments}: {process.stdout}{process.stderr}"
    return process.stdout


def answering_version(up: HeadraceUp) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    version: str = httpx2.post(f"{up.base_url}/chat/completions", json=body, timeout=WAIT_S).json()["model"]
    return version


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_named_base_is_served_and_survives_the_hub(tmp_path: Path) -> None:
    base, config, data = tiny_model.build(tmp_path / "base"), tmp_path / "headrace.toml", tmp_path / "data"
    config.write_text("[registry]\npoll_s = 0.2\n")
    settings = {"trainer.base": "acme/tiny", "trainer.model": MODEL}
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_any"}
    with FakeHub().running() as hub:
        commit = hub.add("acme/tiny", base)
        environ = {**home, "HF_ENDPOINT": hub.address}
        up = HeadraceUp(data, config, settings, environ)
        try:
            up.start()
            version = answering_version(up)
            run(["models", "export", version, str(tmp_path / "exported"), "--data-dir", str(data)], environ)
            pushed = run(["models", "push", version, "acme/back", "--data-dir", str(data)], environ)
        finally:
            up.stop()
        exported = files_of(tmp_path / "exported")
        assert json.loads(exported[ORIGIN_FILE]) == {"repository": "acme/tiny", "commit": commit}
        pushed_commit = hub.repositories["acme/back"].branches["main"]
        assert pushed_commit in pushed
        run(["models", "pull", "acme/back", "--data-dir", str(tmp_path / "other")], environ)
        assert files_of(tmp_path / "other/models/acme--back" / pushed_commit) == exported
    up = HeadraceUp(data, config, settings, {**home, "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"})
    try:
        up.start()
        assert answering_version(up) == version
    finally:
        up.stop()


SESSIONS = 1000


async def test_why_and_where_agree_with_the_history(empty_bus: str) -> None:
    await ensure(BusSettings(address=empty_bus))
    history = made_up(draw_seed(), SESSIONS, 60)
    async with producing(empty_bus, "test") as producer:
        await producer.send([Outgoing.of(event, "test") for event in history.events])
    entries: dict[str, list[Entry]] = {}
    async with connected(empty_bus) as topics:
        for topic in TOPICS:
            entries[topic] = [entry async for entry in topics.read(Range(topic))]
        read_once = recorded(entries)
        await assert_traces_agree(read_once, history)
        for session in history.chance.sample(sorted(history.sessions), 5):
            trace = await trace_session(topics, session, tenant="default", after=0, limit=1000)
            assert trace == await trace_session(read_once, session, tenant="default", after=0, limit=1000)
        version = history.chance.choice(sorted(history.contents))
        asked_why = await trace_version(topics, version, everything=True, after=0, limit=1000)
        for change in asked_why.entries:
            assert change.partition is not None
            history_entry = next(
                e for e in entries[Experience.topic] if (e.partition, e.offset) == (change.partition, change.offset)
            )
            assert isinstance(history_entry.event, Experience)
            assert (history_entry.event.experience_id, history_entry.event.revision) == (
                change.experience_id,
                change.revision,
            )
