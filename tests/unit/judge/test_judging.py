"""Tests of the judge from a trajectory to its reward with a real HTTP endpoint: outcomes, retries, cache and
restarts."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY

from headrace_judge import app, rubric
from headrace_judge.endpoint import OWN_SESSIONS
from headrace_judge.worker import is_sampled
from headrace_runtime.http import web
from headrace_schemas import DeadLetter
from headrace_schemas.http.registry_api import SourceList
from tests.support import fake_llm
from tests.support.fake_llm import FakeLLM
from tests.support.streams import judge, said, settings, trajectory


async def test_a_verdict_becomes_a_reward(llm: FakeLLM, data_dir: Path) -> None:
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert (reward.source, reward.outcome, reward.revision) == ("judge:helpfulness", "scored", 0)
    assert reward.criteria == {"outcome": 1.0, "grounding": 0.75, "conduct": 0.5, "clarity": 0.25}
    assert reward.value == pytest.approx((4 * 1 + 3 * 0.75 + 2 * 0.5 + 1 * 0.25) / 10)
    assert reward.reason == "because"
    assert reward.trajectory_id == "t1"
    assert reward.judged_by is not None
    assert reward.judged_by.startswith("judge-1#")
    assert llm.calls[0].body["model"] == "judge-1"
    assert "authorization" not in llm.calls[0].headers
    assert "x-headrace-purpose" not in llm.calls[0].headers


async def test_the_outcomes_that_are_no_value_are_all_different(llm: FakeLLM, data_dir: Path) -> None:
    """P6: abstention, failure, unreadable verdict and timeout give four different outcomes, none with the value 0.0."""
    behaviours = {
        "model abstains": fake_llm.abstain(),
        "endpoint refuses": fake_llm.status(400),
        "only prose": fake_llm.prose(),
        "never answers": fake_llm.hang(),
        "lowest scores": fake_llm.verdict(outcome=1, grounding=1, conduct=1, clarity=1),
    }
    llm.usual = lambda call: next(do for name, do in behaviours.items() if name in call.prompt)(call)
    quick = settings(llm, endpoint={"timeout_s": 0.3}, retry={"timeouts_max": 1})
    async with judge(quick, data_dir) as rig:
        await rig.bench.deliver(*(trajectory(name, answer=name) for name in behaviours))
        rewards = {reward.trajectory_id: reward for reward in await rig.judged(len(behaviours))}
    assert {name: (reward.outcome, reward.value) for name, reward in rewards.items()} == {
        "model abstains": ("abstained", None),
        "endpoint refuses": ("failed", None),
        "only prose": ("parse_error", None),
        "never answers": ("timed_out", None),
        "lowest scores": ("scored", 0.0),
    }


async def test_an_unreadable_verdict_is_asked_for_once_more_with_the_error(llm: FakeLLM, data_dir: Path) -> None:
    llm.then(fake_llm.verdict(outcome=6, grounding=1, conduct=1, clarity=1))
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert reward.outcome == "scored"
    assert len(llm.calls) == 2
    assert "criteria.outcome: Input should be less than or equal to 5" in llm.calls[1].last
    assert [message["role"] for message in llm.calls[1].body["messages"]] == ["system", "user", "assistant", "user"]


async def test_it_is_asked_again_only_once(llm: FakeLLM, data_dir: Path) -> None:
    llm.usual = fake_llm.prose()
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert reward.outcome == "parse_error"
    assert len(llm.calls) == 2


@pytest.mark.parametrize(
    "trouble",
    [
        fake_llm.status(500),
        fake_llm.status(429),
        fake_llm.status(503),
        fake_llm.status(401),
        fake_llm.drop(),
        fake_llm.raw(b"<html>gateway</html>"),
        fake_llm.raw(b'{"error": {"message": "overloaded"}}'),
    ],
    ids=["500", "429", "503", "401", "dropped", "html", "error in a 200"],
)
async def test_trouble_is_waited_out(llm: FakeLLM, data_dir: Path, trouble: fake_llm.Behaviour) -> None:
    llm.then(trouble)
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        await rig.until(lambda: len(llm.calls) == 1)
        await rig.idle()
        assert rig.rewards == []
        assert len(llm.calls) == 1, "asked again before the wait was over"
        rig.bench.clock.advance(1.0)
        (reward,) = await rig.judged()
    assert reward.outcome == "scored"


async def test_retry_after_is_honoured_and_holds_everything_back(llm: FakeLLM, data_dir: Path) -> None:
    llm.then(fake_llm.status(429, retry_after=120))
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        await rig.until(lambda: len(llm.calls) == 1)
        await rig.idle()
        await rig.bench.deliver(trajectory("t2", answer="Bob"))
        for seconds in (60.0, 59.0):
            rig.bench.clock.advance(seconds)
            await rig.idle()
            assert len(llm.calls) == 1
        rig.bench.clock.advance(1.1)
        rewards = await rig.judged(2)
    assert {reward.outcome for reward in rewards} == {"scored"}


async def test_an_endpoint_that_stays_away_ends_as_failed(data_dir: Path) -> None:
    with FakeLLM(fake_llm.prose()) as unreachable:
        address = unreachable.base_url
    limited = settings(address, retry={"attempts_max": 3})
    async with judge(limited, data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        while not rig.rewards:
            await rig.idle()
            rig.bench.clock.advance(1.0)
        (reward,) = rig.rewards
        assert rig.bench.clock.monotonic_s() >= 1 + 4
    assert reward.outcome == "failed"
    assert reward.reason is not None
    assert "given up after 3 tries" in reward.reason


async def test_an_hour_without_the_endpoint_is_caught_up(llm: FakeLLM, data_dir: Path) -> None:
    """P10, with default settings: all trajectories are judged after the endpoint has recovered."""
    llm.usual = fake_llm.status(503)
    names = [f"t{number}" for number in range(6)]
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(*(trajectory(name, answer=name) for name in names))
        while rig.bench.clock.monotonic_s() < 3600:
            rig.bench.clock.advance(150.0)
            await rig.idle()
        assert rig.rewards == []
        assert len(llm.calls) < 6 * 20
        llm.usual = fake_llm.verdict(outcome=5, grounding=4, conduct=3, clarity=2)
        while len(rig.rewards) < len(names):
            rig.bench.clock.advance(100.0)
            await rig.idle()
    assert {reward.outcome for reward in rig.rewards} == {"scored"}


async def test_a_time_out_is_tried_again_before_it_counts(llm: FakeLLM, data_dir: Path) -> None:
    llm.then(fake_llm.hang())
    async with judge(settings(llm, endpoint={"timeout_s": 0.3}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert reward.outcome == "scored"
    assert len(llm.calls) == 2


async def test_equal_runs_are_paid_for_once(llm: FakeLLM, data_dir: Path) -> None:
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(*(trajectory(f"same{number}") for number in range(8)))
        rewards = await rig.judged(8)
        assert len(llm.calls) == 1
        await rig.restart()
        await rig.bench.deliver(trajectory("same-later"), trajectory("other", answer="Bob"))
        rewards = await rig.judged(10)
        assert len(llm.calls) == 2
    assert len({(reward.value, reward.reason) for reward in rewards}) == 1
    assert len({reward.event_id for reward in rewards}) == 10


async def test_work_in_progress_is_done_again_after_a_crash(llm: FakeLLM, data_dir: Path) -> None:
    llm.usual = fake_llm.hang()
    async with judge(settings(llm, endpoint={"timeout_s": 30.0}), data_dir) as rig:
        await rig.bench.deliver(*(trajectory(f"t{n}", answer=str(n)) for n in range(3)))
        await rig.until(lambda: len(llm.calls) == 3)
        llm.usual = fake_llm.verdict(outcome=5, grounding=4, conduct=3, clarity=2)
        await rig.restart()
        await rig.idle()
        assert rig.rewards == [], "the leases of the dead worker still hold"
        rig.bench.clock.advance(30.1)
        rewards = await rig.judged(3)
        assert await rig.bench.count("jobs") == 0
    assert sorted(reward.trajectory_id for reward in rewards) == ["t0", "t1", "t2"]


async def test_a_task_that_keeps_killing_the_process_is_given_up(llm: FakeLLM, data_dir: Path) -> None:
    llm.usual = fake_llm.hang()
    async with judge(settings(llm, retry={"attempts_max": 2}, endpoint={"timeout_s": 30.0}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        for crash in (1, 2):
            await rig.until(lambda crash=crash: len(llm.calls) == crash)  # type: ignore[misc]
            await rig.restart()
            rig.bench.clock.advance(30.1)
        (reward,) = await rig.judged()
    assert reward.outcome == "failed"
    assert len(llm.calls) == 2


async def test_a_bug_with_one_run_stops_nobody_else(
    llm: FakeLLM, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_rubric: object, readings: object) -> None:
        raise ZeroDivisionError(f"in {readings}")

    async with judge(settings(llm, retry={"attempts_max": 1}), data_dir) as rig:
        with monkeypatch.context() as patch:
            patch.setattr("headrace_judge.scoring.judge_run", broken)
            await rig.bench.deliver(trajectory("bad"))
            (reward,) = await rig.judged()
        await rig.bench.deliver(trajectory("good"))
        assert (await rig.judged(2))[1].outcome == "scored"
    assert (reward.outcome, reward.reason) == ("failed", "internal error: ZeroDivisionError; given up after 1 tries")
    printed = "".join(capsys.readouterr())
    assert "judging_failed" in printed
    assert "because" not in printed, "the log quotes what the model said"


async def test_samples_count_by_their_median(llm: FakeLLM, data_dir: Path) -> None:
    llm.then(*(fake_llm.verdict(outcome=n, grounding=1, conduct=1, clarity=1) for n in (5, 1, 4)))
    async with judge(settings(llm, samples=3, endpoint={"temperature": 1.0}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (reward,) = await rig.judged()
    assert reward.criteria["outcome"] == 0.75
    assert len(llm.calls) == 3


async def test_poison_is_dead_lettered_and_nothing_else_is_lost(llm: FakeLLM, data_dir: Path) -> None:
    async with judge(settings(llm), data_dir) as rig:
        poison = [rig.bench.append("trajectories", value) for value in (b"{", b'{"trajectory_id": 1}', None)]
        await rig.bench.deliver(*poison, trajectory("t1"))
        assert (await rig.judged())[0].outcome == "scored"
        reasons = [letter.reason for letter in rig.bench.sent(DeadLetter)]
    assert reasons == ["invalid_json", "invalid_event", "empty_value"]


async def test_what_is_not_judged_says_so(llm: FakeLLM, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = trajectory("silent", messages=said(("user", "Hello?")))
    monkeypatch.setattr("headrace_judge.worker.QUEUE_MAX", 2)
    async with judge(settings(llm, sample_rate=0.5), data_dir) as rig:
        await rig.stop()
        selected = [name for name in (f"t{n}" for n in range(20)) if is_sampled(name, 0.5)][:3]
        skipped = next(name for name in (f"t{n}" for n in range(20)) if not is_sampled(name, 0.5))
        assert is_sampled("silent", 0.5)
        await rig.bench.deliver(silent, trajectory(skipped), *(trajectory(name, answer=name) for name in selected))
        reasons = {reward.trajectory_id: (reward.outcome, reward.reason) for reward in rig.rewards}
        rig.start()
        await rig.judged(5)
    assert {outcome for outcome, _ in reasons.values()} == {"abstained"}
    assert "no message or call of the model" in str(reasons["silent"])
    assert "judge.sample_rate = 0.5" in str(reasons[skipped])
    assert "the queue is full (2 jobs)" in str(reasons[selected[2]])
    assert set(reasons) == {"silent", skipped, selected[2]}


async def test_evaluation_is_judged_when_wanted_and_else_not_spoken_of(llm: FakeLLM, data_dir: Path) -> None:
    played = trajectory("eval", purpose="eval")
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(played)
        await rig.bench.deliver(trajectory("train", answer="Bob"))
        assert [reward.trajectory_id for reward in await rig.judged()] == ["train"]
    async with judge(settings(llm, judge_eval=True, sample_rate=0.0), data_dir) as rig:
        await rig.bench.deliver(played)
        assert (await rig.judged())[0].outcome == "scored"


async def test_a_shadow_is_judged_as_a_user_is_and_compared_with_nobody(llm: FakeLLM, data_dir: Path) -> None:
    """A shadow trajectory is judged regardless of the settings for evaluations and for sampling."""
    shadow = trajectory("shadow", purpose="eval", shadow_of="a" * 16, task_id="t")
    async with judge(settings(llm, sample_rate=0.0), data_dir) as rig:
        await rig.bench.deliver(shadow)
        assert [(reward.trajectory_id, reward.outcome) for reward in await rig.judged()] == [("shadow", "scored")]


async def test_a_gateway_is_told_not_to_train_on_the_judge(llm: FakeLLM, data_dir: Path) -> None:
    gateway = settings(llm, judge_eval=True, endpoint={"is_gateway": True, "api_key": "k"})
    async with judge(gateway, data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        await rig.judged()
        headers = llm.calls[0].headers
        judge_call = trajectory("own", session_id=headers["x-session-id"], purpose="eval")
        await rig.bench.deliver(judge_call)
        assert len(rig.rewards) == 1
        assert await rig.bench.count("jobs") == 0
    assert headers["x-headrace-purpose"] == "eval"
    assert headers["x-session-id"].startswith(OWN_SESSIONS)
    assert headers["authorization"] == "Bearer k"


async def test_an_endpoint_that_turns_out_to_be_a_gateway_fails_and_the_judge_continues(
    llm: FakeLLM, data_dir: Path
) -> None:
    response = fake_llm.completion("{}") | {"id": f"chatcmpl-{'a' * 16}-{'0' * 32}"}
    llm.then(lambda _call: fake_llm.Reply(response))
    async with judge(settings(llm, retry={"attempts_max": 1}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        (failed,) = await rig.judged()
        await rig.bench.deliver(trajectory("t2", tenant="other"))
        rewards = await rig.judged(2)
    assert failed.outcome == "failed"
    assert "judge.endpoint.is_gateway = false" in str(failed.reason)
    assert [reward.outcome for reward in rewards] == ["failed", "scored"]


async def test_work_for_a_rubric_that_is_gone_abstains(llm: FakeLLM, data_dir: Path) -> None:
    async with judge(settings(llm), data_dir) as rig:
        await rig.stop()
        await rig.bench.deliver(trajectory("t1"))
        other = rubric.load("helpfulness").model_copy(update={"mode": "pair"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rubric, "load", lambda _reference: other)
            rig.service = app.service(settings(llm))
        rig.start()
        (reward,) = await rig.judged()
    assert (reward.outcome, llm.calls) == ("abstained", [])


async def test_two_rubrics_are_two_sources(llm: FakeLLM, data_dir: Path, tmp_path: Path) -> None:
    rubric_file = tmp_path / "own.toml"
    rubric_file.write_text(
        'name = "brevity"\ninstructions = "Judge."\n[[criteria]]\nname = "short"\ndescription = "Short?"\n'
    )
    llm.usual = fake_llm.answer(
        lambda call: (
            '{"reason": "", "criteria": {"short": 4}}'
            if '"short"' in call.prompt
            else '{"reason": "", "criteria": {"outcome": 1, "grounding": 1, "conduct": 1, "clarity": 1}}'
        )
    )
    async with judge(settings(llm, rubrics=("helpfulness", str(rubric_file))), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        rewards = await rig.judged(2)
    assert {reward.source: reward.value for reward in rewards} == {"judge:helpfulness": 0.0, "judge:brevity": 0.75}
    assert len({reward.judged_by for reward in rewards}) == 2


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_{name}", labels) or 0.0


async def test_what_happens_is_counted(llm: FakeLLM, data_dir: Path) -> None:
    names: list[tuple[str, dict[str, str]]] = [
        ("judge_calls_total", {"result": "answered"}),
        ("judge_calls_total", {"result": "away"}),
        ("judge_call_seconds_count", {}),
        ("judge_tokens_total", {"kind": "prompt"}),
        ("judge_tokens_total", {"kind": "completion"}),
        ("judge_outcomes_total", {"source": "judge:helpfulness", "outcome": "scored"}),
        ("judge_cache_hits_total", {}),
        ("judge_retries_total", {}),
        ("judge_shortened_total", {"source": "judge:helpfulness"}),
    ]
    before = [sample(name, **labels) for name, labels in names]
    llm.then(fake_llm.status(503))
    async with judge(settings(llm, budget={"calls_per_day": 10}), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1", answer="x" * 5000))
        await rig.until(lambda: sample("judge_endpoint_up") == 0)
        await rig.idle()
        await rig.tick(1.0)
        assert sample("jobs", kind="verdict") == 1
        await rig.judged()
        await rig.bench.deliver(trajectory("t2", answer="x" * 5000))
        await rig.judged(2)
        await rig.tick()
    after = [sample(name, **labels) for name, labels in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 2, 100, 20, 2, 1, 1, 2]
    assert sample("judge_endpoint_up") == 1
    assert sample("judge_budget_left", setting="calls_per_day") == 8
    assert sample("jobs", kind="verdict") == 0


async def test_how_each_rubric_fares_is_told(llm: FakeLLM, data_dir: Path) -> None:
    llm.usual = fake_llm.status(400)
    async with judge(settings(llm), data_dir) as rig:
        await rig.bench.deliver(trajectory("t1"))
        await rig.judged()
        application = web.app({}, rig.service.routes(rig.bench.processor))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://judge") as http:
            (source,) = SourceList.model_validate_json((await http.get("/sources")).content).data
    assert (source.id, source.failing, source.outcomes) == ("judge:helpfulness", 1, {"failed": 1})
    assert "400" in (source.last_error or "")
