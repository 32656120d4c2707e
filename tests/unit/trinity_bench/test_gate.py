"""Tests of the gate program with Trinity: its files, plays, scores and cleanup, with a stand-in for Trinity."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from headrace_schemas.programs import Play
from tests.docs.fences import fences
from tests.support.processes import naming, wait_until
from tests.unit.trinity_bench import stand_in
from trinity_bench.gate import BenchFailed, scores, write_files
from trinity_bench.settings import Job, Settings, Unusable, plays_timeout_s, read, rows

VERSION = "tiny@0123456789ab"
PLAYS = tuple(Play(version=VERSION, task=task, seed=5) for task in ("a", "b", "c"))
EXAMPLE = Path(__file__).parents[3] / "examples/trinity_bench"
README, WITHOUT_VLLM = EXAMPLE / "README.md", EXAMPLE / "inside/without_vllm"


def settings(**more: Any) -> Settings:
    base = {"python": "python", "workflow": "math_workflow", "gate_tasks": "g", "audit_tasks": "a"}
    return Settings.model_validate({**base, **more})


def test_the_settings_that_the_readme_shows_are_settings(tmp_path: Path) -> None:
    (settings_fence,) = (fence for fence in fences(README) if fence.file)
    (tmp_path / "bench.toml").write_text(settings_fence.text)
    assert read(tmp_path / "bench.toml").format == {"prompt_key": "question", "response_key": "answer"}


def job(folder: Path) -> Job:
    return Job(folder / "bench", VERSION, "127.0.0.1:6379", len(PLAYS))


def test_the_yaml_is_of_the_exact_version_and_nobody_else_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    bench_job, row = job(tmp_path), {"question": "1 + 1?", "when": "2026-01-01"}
    bench_settings = settings(
        format={"prompt_key": "question"}, workflow_args={"turns": 3}, reward="math_reward", runners=2
    )
    write_files(bench_settings, bench_job, dict.fromkeys(PLAYS, row))
    config = yaml.safe_load(bench_job.yaml.read_text())
    assert (config["mode"], config["model"]["model_path"]) == ("bench", VERSION)
    external = config["model"]["external_model"]
    assert external["model_name"] == VERSION
    assert external["api_key_env"] != "OPENAI_API_KEY", "Trinity hands its value on, on command lines of Ray's"
    [taskset] = config["buffer"]["explorer_input"]["eval_tasksets"]
    assert taskset["format"] == {"prompt_key": "question"}
    assert taskset["workflow_args"]["turns"] == 3
    assert taskset["workflow_args"]["headrace_bench"]["workflow"] == "math_workflow"
    assert taskset["default_reward_fn_type"] == "math_reward"
    assert (
        config["explorer"]["max_timeout"]
        > plays_timeout_s(bench_settings, bench_job)
        == 2 * bench_settings.play_timeout_s
    )
    lines = [json.loads(line) for line in (bench_job.tasks / "train.jsonl").read_text().splitlines()]
    assert [Play.model_validate_json(line["play"]) for line in lines] == list(PLAYS)
    assert all(json.loads(line["row"]) == row for line in lines)
    for path in (bench_job.folder, *bench_job.folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
        assert path.is_dir() or "sk-secret" not in path.read_text()


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    required = 'python = "p"\nworkflow = "w"\ngate_tasks = "g"\naudit_tasks = "a"\n'
    for more, message in (
        ("lowest = 1\nhighest = 1", "`lowest` must be less"),
        ("max_model_len = 8", "`max_response_tokens` must be less"),
        ("rollout = {n = 2}", "a play is one run"),
        ("runners = 0", "runners: Input should be greater"),
        ("runners", "bench.toml is not valid TOML: Expected"),
    ):
        path.write_text(required + more)
        with pytest.raises(Unusable, match=message):
            read(path)
    path.write_text(required)
    assert read(path, "other").python == "other"
    assert read(path).gate_tasks == tmp_path / "g"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a"}\n\n{"id": "a"}', "line 3: duplicates the task 'a'"),
        ('{"id": "a"}\n{"q": 1}', "line 2: has no 'id'"),
        ("[1]", "line 1: must be a JSON object"),
        ("{", "line 1: Expecting"),
    ],
)
def test_tasks_that_cannot_be_are_refused_by_their_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(Unusable, match=message):
        rows(tmp_path / "tasks.jsonl", "id", "gate")


def test_tasks_without_a_name_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"q": 1}\n{"q": 2}')
    assert rows(tmp_path / "tasks.jsonl", "", "gate") == {"gate-1": {"q": 1}, "gate-2": {"q": 2}}


def read_scores(folder: Path, *lines: tuple[Play, dict[str, object]], **more: Any) -> dict[Play, float]:
    text = "".join(json.dumps({"play": play.model_dump(), **outcome}) + "\n" for play, outcome in lines)
    (results := folder / "results.jsonl").write_text(text)
    return dict(scores(results, PLAYS, settings(**more), folder / "trinity.log"))


def test_each_play_has_the_score_of_its_own_line(tmp_path: Path) -> None:
    lines: list[tuple[Play, dict[str, object]]]
    lines = [(PLAYS[2], {"score": 5.0}), (PLAYS[0], {"score": -1.0}), (PLAYS[1], {"score": 2.0})]
    assert read_scores(tmp_path, *lines, lowest=-1, highest=5) == {PLAYS[0]: 0.0, PLAYS[1]: 0.5, PLAYS[2]: 1.0}


def test_half_a_bench_is_none(tmp_path: Path) -> None:
    good: list[tuple[Play, dict[str, object]]] = [(play, {"score": 0.5}) for play in PLAYS]
    for lines, message in (
        (good[:2], "1 of 3 plays have no result, the first one being c; Trinity's log: nothing"),
        ([*good[:2], (PLAYS[2], {"error": "KeyError: 'x'"})], "1 of 3 plays failed, the first one being c: KeyError"),
        ([*good, good[0]], "task a: was not requested, or has a second result"),
        ([*good[:2], (Play(version=VERSION, task="c", seed=6), {"score": 1.0})], "task c: was not requested"),
        ([*good[:2], (PLAYS[2], {"score": float("nan")})], "task c: reward = nan"),
        ([*good[:2], (PLAYS[2], {"score": 1.01})], r"task c: reward = 1\.01: must be in 0\.\.1"),
    ):
        with pytest.raises(BenchFailed, match=message):
            read_scores(tmp_path, *lines)


def test_names_stand_in_for_vllms_until_somebody_needs_one() -> None:
    program = (
        "import importlib.util\n"
        "from vllm.config import ModelConfig\n"
        "from vllm.entrypoints.chat_utils import parse_chat_messages\n"
        "assert importlib.util.find_spec('vllm.v1') is None\n"
        "ModelConfig()"
    )
    environ = {"PYTHONPATH": str(WITHOUT_VLLM)}
    process = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert "ModelConfig belongs to vLLM, which is not installed" in process.stderr.splitlines()[-1]


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
    """Play both gate tasks with both versions and equal seeds, and return the scores."""
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
