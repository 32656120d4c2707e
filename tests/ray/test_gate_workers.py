"""A gate's program on two workers of a Ray cluster: its plays are shared, outlive a worker, and fail as on one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install headrace-registry[ray]")

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateRaySettings, GateSettings
from headrace_trainer.ray_learner import RaySettings
from headrace_trainer.ray_learner.cluster import Cluster
from tests.support.processes import alive, wait_until

pytestmark = pytest.mark.timeout(900)
VERSION = "m@0123456789ab"
PLANTED = {"PLANTED_TOKEN": "planted-1", "OPENAI_API_KEY": "planted-2", "HEADRACE_DATABASE__URL": "planted-3"}
PROGRAM = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"{os.getpid()}").write_text(str(os.getppid()))
(folder / f"environment-{os.getpid()}").write_text(json.dumps(dict(os.environ)))
print(json.dumps({"gate": ["a", "b"], "audit": ["c"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["task"] == "b" and (folder / "wrong").exists():
        sys.exit(3)
    time.sleep(0.2)
    print(json.dumps(asked | {"score": asked["seed"] / 100}), flush=True)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    os.environ.update(PLANTED)  # Ray's workers have the environment of the process that starts the cluster
    cluster = Cluster(RaySettings(start_timeout_s=280), 3)
    import ray

    try:
        yield str(ray.get_runtime_context().gcs_address)
    finally:
        cluster.leave()
        for name in PLANTED:
            del os.environ[name]


def gate(address: str, folder: Path) -> Gate:
    workers = GateRaySettings(workers=2, address=address)
    command = ("{python}", "-S", "-c", PROGRAM, str(folder))
    return Gate(GateSettings(command=command, silence_s=280.0, environment=("NAMED_VARIABLE",), ray=workers))


def programs(folder: Path) -> dict[int, int]:
    """Return the parent process of each copy."""
    return {int(path.name): int(path.read_text()) for path in folder.glob("[0-9]*")}


async def test_plays_outlive_a_worker_and_nothing_is_left(address: str, tmp_path: Path) -> None:
    async with gate(address, tmp_path).session() as session:
        leftovers = programs(tmp_path)
        assert len(leftovers) == len(set(leftovers.values())) == 2
        playing = [asyncio.create_task(session.play(VERSION, "a", seed)) for seed in range(30)]
        await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
        os.kill(next(iter(leftovers.values())), signal.SIGKILL)
        assert await asyncio.gather(*playing) == [seed / 100 for seed in range(30)]
    await asyncio.to_thread(wait_until, lambda: not any(map(alive, leftovers)), 30, "the programs have ended")


async def test_a_program_that_fails_fails_the_run(address: str, tmp_path: Path) -> None:
    (tmp_path / "wrong").touch()
    with pytest.raises(GateFailed, match="status 3"):
        async with gate(address, tmp_path).session() as session:
            await session.play(VERSION, "b", 1)


async def test_where_there_is_no_cluster_the_run_fails_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match=r"registry\.gate\.ray\.address"):
        async with gate("127.0.0.1:1", tmp_path).session():
            pass


async def test_copies_see_named_variables_of_the_registry_and_no_secret(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAMED_VARIABLE", "yes")
    async with gate(address, tmp_path).session():
        environments = _environments(tmp_path)
    assert len(environments) == 2
    for environment in environments:
        assert environment["NAMED_VARIABLE"] == "yes"
        assert not PLANTED.keys() & environment.keys()
        assert not [name for name, value in environment.items() if value.startswith("planted-")]


def _environments(folder: Path) -> list[dict[str, str]]:
    return [json.loads(path.read_text()) for path in folder.glob("environment-*")]
