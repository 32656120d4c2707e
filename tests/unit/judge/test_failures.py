"""Tests that a run which cannot be judged fails alone with a reason, and that invalid settings prevent the start
(P11)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import update

from headrace_judge import app, tables
from headrace_judge.call_budget import BudgetLimit, CallBudget, Reservation, TenantCircuitBreakers
from headrace_judge.model_judge import ModelJudge
from headrace_judge.pairwise import PairwiseComparisons
from headrace_judge.rubric import load, load_all
from headrace_judge.settings import BudgetSettings, JudgeSettings
from headrace_judge.tables import STREAM, Subject
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import load as load_settings
from headrace_schemas import DeadLetter
from headrace_schemas.values.ids import session_key
from tests.support import fake_llm
from tests.support.fake_llm import Call, FakeLLM, Reply
from tests.support.streams import ManualClock, Rig, judge, settings, trajectory
from tests.support.turns import START

ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError("poison with \x00 and \ud83d"),
    "UnicodeEncodeError": lambda: UnicodeEncodeError("utf-8", "bad \ud83d end", 4, 5, "surrogates not allowed"),
    "OverflowError": lambda: OverflowError("math range error"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
}
SCORES = {"outcome": 5, "grounding": 4, "conduct": 3, "clarity": 2}
NAMES = [f"t{number}" for number in range(5)]


async def judge_all(rig: Rig, count: int = 5) -> dict[str, str]:
    """Wait until `count` runs are judged or dead-lettered, and return the outcome of each judged run.

    The clock advances over each wait between attempts.
    """

    def settled() -> bool:
        if not REGISTRY.get_sample_value("headrace_judge_in_progress"):
            rig.bench.clock.advance(5)
        return len(rig.rewards) + len(rig.bench.sent(DeadLetter)) >= count

    await rig.until(settled, "all runs")
    return {reward.trajectory_id: reward.outcome for reward in rig.rewards}


@pytest.mark.parametrize(
    "reason", ["bad \ud83d end", "NUL \x00", "x" * 50_000, "\x1b[31m", "\u202e"], ids=lambda text: ascii(text)[:20]
)
async def test_whatever_text_an_endpoint_answers(llm: FakeLLM, data_dir: Path, database_url: str, reason: str) -> None:
    """The judge's answer for one run contains difficult text as JSON escapes."""
    text = json.dumps({"reason": reason, "criteria": SCORES})

    def reply(call: Call) -> Reply:
        if "poison" in call.prompt:
            return Reply(fake_llm.completion(text))
        return Reply(fake_llm.completion(json.dumps({"reason": "because", "criteria": SCORES})))

    llm.usual = reply
    async with judge(settings(llm), data_dir, database_url) as rig:
        await rig.bench.deliver(*[trajectory(name, answer="poison" if name == "t2" else name) for name in NAMES])
        assert await judge_all(rig) == dict.fromkeys(NAMES, "scored")
        await rig.restart()
        assert await rig.bench.count("jobs") == 0


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("stage", ["single", "store", "reward"])
async def test_a_poisoned_run_fails_alone(
    llm: FakeLLM, data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    if stage == "single":
        judge_run = ModelJudge.judge_run

        async def judged(self: ModelJudge, rubric: Any, run: Any, tenant: str) -> Any:
            if "poison" in repr(run):
                raise ERRORS[kind]()
            return await judge_run(self, rubric, run, tenant)

        monkeypatch.setattr(ModelJudge, "judge_run", judged)
    elif stage == "store":
        keep = tables.store_verdict

        async def failing_store(tx: Any, now: Any, question: str, verdict: Any) -> None:
            if verdict.reason == "poison":
                raise ERRORS[kind]()
            await keep(tx, now, question, verdict)

        monkeypatch.setattr(tables, "store_verdict", failing_store)
    else:
        reward = Subject.reward

        def failing_reward(self: Subject, judgement: Any, *rest: Any) -> Any:
            if self.trajectory_id == "t2" and judgement.outcome == "scored":
                raise ERRORS[kind]()
            return reward(self, judgement, *rest)

        monkeypatch.setattr(Subject, "reward", failing_reward)

    def reply(call: Call) -> Reply:
        reason = "poison" if "poison" in call.prompt else "because"
        return Reply(fake_llm.completion(json.dumps({"reason": reason, "criteria": SCORES})))

    llm.usual = reply
    async with judge(settings(llm, retry={"attempts_max": 3}), data_dir, database_url) as rig:
        await rig.bench.deliver(*[trajectory(name, answer="poison" if name == "t2" else name) for name in NAMES])
        outcomes = await judge_all(rig)
        assert outcomes == {**dict.fromkeys(NAMES, "scored"), "t2": "failed"}
        assert await rig.bench.count("jobs") == 0, "nothing comes back after a restart"


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 50_000, b"{}"], ids=range(5))
async def test_a_job_with_a_damaged_payload_is_dead_lettered(llm: FakeLLM, data_dir: Path, payload: bytes) -> None:
    async with judge(settings(llm), data_dir) as rig:
        await rig.stop()
        await rig.bench.deliver(*map(trajectory, NAMES))
        async with rig.bench.processor.database.transaction() as tx:
            names = (await tx.execute(STREAM.jobs.select())).mappings().all()
            victim = next(row["job_id"] for row in names if b'"t2"' in row["payload"])
            await tx.execute(update(STREAM.jobs).where(STREAM.jobs.c.job_id == victim).values(payload=payload))
        await rig.restart()
        outcomes = await judge_all(rig)
        assert outcomes == {name: "scored" for name in NAMES if name != "t2"}
        assert [letter.reason for letter in rig.bench.sent(DeadLetter)] == ["judging_failed"]
        assert await rig.bench.count("jobs") == 0


@pytest.mark.parametrize("kind", ERRORS)
async def test_a_poisoned_deadline_ends_alone(
    llm: FakeLLM, data_dir: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    deadline = PairwiseComparisons.handle_deadline

    async def ended(self: PairwiseComparisons, tx: Any, now: Any, job: Any, judged_by: Any) -> Any:
        if Subject.model_validate_json(job.payload).trajectory_id == "t2":
            raise ERRORS[kind]()
        return await deadline(self, tx, now, job, judged_by)

    monkeypatch.setattr(PairwiseComparisons, "handle_deadline", ended)
    folder = data_dir / "rubrics"
    folder.mkdir(parents=True)
    (folder / "better.toml").write_text(_PAIR)
    async with judge(settings(llm, rubrics=[str(folder / "better.toml")]), data_dir, database_url) as rig:
        await rig.bench.deliver(*[trajectory(name, task_id=f"task-{name}") for name in NAMES])
        await rig.tick(100_000)
        assert {reward.trajectory_id for reward in rig.rewards} == {name for name in NAMES if name != "t2"}
        assert [letter.reason for letter in rig.bench.sent(DeadLetter)] == ["judging_failed"]


_PAIR = """
name = "better"
mode = "pair"
instructions = "Which run is better?"

[[criteria]]
name = "outcome"
description = "Whether the task was done."
weight = 1
"""


def _of(tenant: str, name: str, answer: str) -> Any:
    return trajectory(name, answer=answer, tenant=tenant, session_key=session_key(tenant, name))


async def test_runs_of_one_tenant_that_the_endpoint_fails_on_do_not_stop_another(llm: FakeLLM, data_dir: Path) -> None:
    """The clock is fixed, so a job that waits for an open circuit breaker waits for ever."""

    def reply(call: Call) -> Reply:
        if "poison" in call.prompt:
            return Reply(status=500)
        return Reply(fake_llm.completion(json.dumps({"reason": "because", "criteria": SCORES})))

    llm.usual = reply
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(*[_of("flooder", f"bad{n}", f"poison {n}") for n in range(20)])
        await rig.bench.deliver(*[_of("other", f"good{n}", f"answer {n}") for n in range(5)])
        await rig.judged(5)
    assert {reward.trajectory_id for reward in rig.rewards} == {f"good{n}" for n in range(5)}


def test_each_tenant_has_its_breaker() -> None:
    breakers = TenantCircuitBreakers(ManualClock(), 1.0)
    breakers.of("a").record_failure(None)
    assert (breakers.of("a").free_slots(0, 8), breakers.of("b").free_slots(0, 8)) == (0, 8)


async def test_tenants_of_the_last_period_share_the_budget(llm: FakeLLM, data_dir: Path) -> None:
    async with judge(settings(llm), data_dir) as rig:
        budget = CallBudget(BudgetSettings(calls_per_hour=10))

        async def reserve(tenant: str) -> Reservation | BudgetLimit:
            async with rig.bench.processor.database.transaction() as tx:
                return await budget.reserve(tx, START, 1, tenant)

        assert isinstance(await reserve("quiet"), Reservation)
        spent = [await reserve("flooder") for _ in range(20)]
        assert sum(isinstance(result, Reservation) for result in spent) == 5
        assert "this is the part of one of 2 tenants" in str(spent[-1])
        assert [type(await reserve("quiet")) for _ in range(5)] == [Reservation] * 4 + [BudgetLimit]


CONFIGURED = {"HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://h/v1", "HEADRACE_JUDGE__ENDPOINT__MODEL": "m"}
CRITERION = '[[criteria]]\nname = "a"\ndescription = "A?"\n'


def loaded(**environ: str) -> JudgeSettings:
    return load_settings("judge", JudgeSettings, None, CONFIGURED | environ)[1]


def test_without_an_endpoint_the_judge_does_not_start() -> None:
    """The judge runs as a process as under a supervisor: the exit status is 2, also with `--check-config`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-m", "headrace_judge", "--check-config"]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30, check=False)
    assert result.returncode == 2
    assert (
        "setting judge.endpoint.base_url = '': the judge has no endpoint; set judge.endpoint.base_url" in result.stderr
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"HEADRACE_JUDGE__ENDPOINT__MODEL": ""}, r"judge\.endpoint\.model = '': the judge has no model"),
        ({"HEADRACE_JUDGE__ENDPOINT__BASE_URL": "localhost:8000"}, r"endpoint\.base_url = 'localhost:8000': must be"),
        ({"HEADRACE_JUDGE__SAMPLES": "3"}, r"judge\.samples = 3: .*raise the temperature"),
        ({"HEADRACE_JUDGE__ENDPOINT__CONCURENCY": "3"}, r"unknown; did you mean 'concurrency'"),
        ({"HEADRACE_JUDGE__ENDPOINT__EXTRA": "{n = 2, stream = true}"}, r"n, stream cannot be set here"),
        ({"HEADRACE_JUDGE__PAIRS__WINDOW_S": "1.0"}, r"judge\.pairs\.window_s = 1.0: is no setting any more"),
        ({"HEADRACE_JUDGE__ENDPOINT__JSON_MODE": "true"}, r"value is fixed \(False\); set judge.endpoint.extra"),
        (
            {"HEADRACE_JUDGE__ENDPOINT__API_KEY": "k", "HEADRACE_JUDGE__ENDPOINT__API_KEY_ENV": "K"},
            r"judge\.endpoint\.api_key_env = 'K': api_key is set as well",
        ),
    ],
)
def test_contradictions_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        loaded(**environ)


def test_a_configured_judge_is_accepted() -> None:
    assert loaded(HEADRACE_JUDGE__ENDPOINT__BASE_URL="http://h/v1/").endpoint.base_url == "http://h/v1"
    assert loaded().port == 8033
    own_temperature = {"HEADRACE_JUDGE__ENDPOINT__OMIT": '["temperature"]', "HEADRACE_JUDGE__SAMPLES": "3"}
    assert loaded(**own_temperature).samples == 3


def test_the_key_comes_from_the_named_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    named = settings("http://h/v1", endpoint={"api_key_env": "THE_JUDGES_KEY"}).endpoint
    monkeypatch.setenv("THE_JUDGES_KEY", "secret")
    assert app.api_key(named) == "secret"
    monkeypatch.delenv("THE_JUDGES_KEY")
    with pytest.raises(SettingError, match=r"api_key_env = 'THE_JUDGES_KEY': this environment variable is not set"):
        app.api_key(named)


def test_the_shipped_rubric_is_good() -> None:
    rubric = load("helpfulness")
    assert (rubric.name, rubric.mode, rubric.source) == ("helpfulness", "single", "judge:helpfulness")
    assert {"question", "tool_calls", "tool_results", "answer"} <= set(rubric.show)
    assert len(rubric.digest) == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not valid TOML"),
        ('name = "r"\ninstructions = "J"\n', "criteria: Field required"),
        (f'name = "R r"\ninstructions = "J"\n{CRITERION}', "name: String should match"),
        (f'name = "r"\ninstructions = "J"\nmood = "x"\n{CRITERION}', "mood: Extra inputs"),
        (f'name = "r"\ninstructions = "J"\n{CRITERION}{CRITERION}', "two criteria have one name"),
        (f'name = "r"\ninstructions = "J"\n{CRITERION}weight = 0\n', "criteria.0.weight"),
        (f'name = "r"\ninstructions = "J"\nshow = ["question"]\n{CRITERION}', "no output of the model"),
        (f'name = "r"\ninstructions = "J"\nshow = ["answers"]\n{CRITERION}', "show.0"),
        (f'name = "r"\ninstructions = "J"\nrun_chars_max = 5000\n{CRITERION}', "a quarter of run_chars_max"),
        (f'name = "r"\nmode = "both"\ninstructions = "J"\n{CRITERION}', "mode"),
    ],
)
def test_a_bad_rubric_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message) as refusal:
        load(str(path))
    assert "judge.rubrics" in str(refusal.value)


def test_a_missing_rubric_lists_the_shipped_ones_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(SettingError, match="one of: helpfulness"):
        load("helpfullness")
    with pytest.raises(SettingError, match="another rubric is named 'helpfulness'"):
        load_all(["helpfulness", "helpfulness"])


def test_every_setting_says_what_it_is() -> None:
    assert [doc.name for doc in describe(JudgeSettings) if not doc.description] == []
