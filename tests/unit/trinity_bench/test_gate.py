"""The gate's program as the registry starts it, with a stand-in for Trinity: plays, scores and cleanup."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from headrace_schemas.programs.gate import Play
from tests.support.processes import naming, wait_until
from tests.unit.trinity_bench import stand_in

EXAMPLES = Path(__file__).parents[3] / "examples"
CANDIDATE, CHAMPION = "tiny@0123456789ab", "tiny@ba987654321f"
MakeGate = Callable[..., Gate]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeGate:
    """Return a function that creates a gate with its folders in `tmp_path / "t"`."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stand_in.__file__}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "t").mkdir()
    (tmp_path / "gate.jsonl").write_text('{"id": "a", "worth": 0.1}\n{"id": "b", "worth": 0.2}\n')
    (tmp_path / "audit.jsonl").write_text('{"id": "c", "worth": 0.3}\n')

    def make(how: str = "", **more: object) -> Gate:
        monkeypatch.setenv("STAND_IN", how)
        settings = {"python": str(python), "workflow": "w", "gate_tasks": "gate.jsonl", "audit_tasks": "audit.jsonl",
                    "name_key": "id", "folder": str(tmp_path / "t"), **more}  # fmt: skip
        lines = [f"{name} = {value!r}".replace("'", '"') for name, value in settings.items()]
        (tmp_path / "bench.toml").write_text("\n".join(lines))
        command = ("{python}", "-m", "trinity_bench.gate", "--settings", str(tmp_path / "bench.toml"))
        return Gate(
            GateSettings(
                command=(*command, "--base-url", "{base_url}"),
                base_url="http://gateway/v1",
                environment=("OPENAI_API_KEY", "STAND_IN"),
            )
        )

    return make


async def play_gate_tasks(gate: Gate) -> dict[Play, float]:
    """Return the scores of both versions for both gate tasks, which they play with the same seed."""
    async with gate.session() as session:
        plays = [Play(version=v, task=task, seed=3) for v in (CANDIDATE, CHAMPION) for task in session.tasks.gate]
        scores = await asyncio.gather(*(session.play(play.version, play.task, play.seed) for play in plays))
        return dict(zip(plays, scores, strict=True))


async def test_each_version_has_a_bench_of_the_same_tasks_and_seeds(gate: MakeGate, tmp_path: Path) -> None:
    scores = await play_gate_tasks(gate())
    expected = {(CANDIDATE, "a"): 0.13, (CANDIDATE, "b"): 0.23, (CHAMPION, "a"): 0.63, (CHAMPION, "b"): 0.73}
    assert {(play.version, play.task): score for play, score in scores.items()} == pytest.approx(expected)
    await asyncio.to_thread(wait_until, lambda: not list((tmp_path / "t").iterdir()), 20, "its folder is removed")
    await asyncio.to_thread(wait_until, lambda: not naming(str(tmp_path / "t")), 20, "its Ray has ended with it")


async def test_scores_are_between_lowest_and_highest(gate: MakeGate) -> None:
    scores = await play_gate_tasks(gate(lowest=-1, highest=1))
    assert min(scores.values()) == pytest.approx((0.13 + 1) / 2)
    with pytest.raises(GateFailed, match=r"task b: reward = 0\.7\d+: must be in 0\.\.0\.7; set `lowest` and"):
        await play_gate_tasks(gate(highest=0.7))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", rf"bench of {CANDIDATE}: 1 of 2 plays failed, the first one being b: APIConnectionError: nobody"),
        ("silent", r"2 of 2 plays have no result.* Trinity's log: ValueError: .* 'promt_key' not in 'FormatConfig'"),
        ("hangs", rf"bench of {CANDIDATE}: did not end within [\d.]+ s"),
        ("no ray", r"Ray ended with status 1: Exception: the port is taken"),
    ],
)
async def test_what_fails_is_an_error_and_no_score(gate: MakeGate, how: str, message: str) -> None:
    """Trinity's exit status is 0 in every case except the last."""
    began = time.monotonic()
    with pytest.raises(GateFailed, match=message):
        await play_gate_tasks(gate(how, **({"start_timeout_s": 1.0, "play_timeout_s": 0.1} if how == "hangs" else {})))
    assert time.monotonic() - began < 60


async def test_it_names_its_tasks_and_starts_nothing_for_nobody(gate: MakeGate, tmp_path: Path) -> None:
    async with gate("no ray").session() as session:
        assert session.tasks.gate == ("a", "b")
        assert session.tasks.audit == ("c",)
        assert not list((tmp_path / "t").iterdir())


async def test_an_unknown_setting_is_refused_by_name(gate: MakeGate) -> None:
    with pytest.raises(GateFailed, match=re.escape("bench.toml: workfow: Extra inputs are not permitted")):
        await play_gate_tasks(gate(workfow="w"))
