"""The whole circle on both buses and both databases: `headrace up`, an agent, and the visible side of the promises.

The tests of one combination share one run and end it in their order: work, look, stop, start again.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

from email_agent.mailbox import DEFINITIONS, SYSTEM, Mailtools, generate
from headrace_operations.from_topics import read_turn_account
from headrace_operations.turn_account import TurnAccount
from headrace_schemas import Checkpoint, DeadLetter, Experience, ModelEvent, Reward, TrainingMetrics, Trajectory, Turn
from headrace_schemas.http.stack_access import login_for
from tests.e2e import circle
from tests.e2e.circle import MODEL, Observed, Work
from tests.support import presence
from tests.support.fake_llm import FakeLLM
from tests.support.processes import is_open, naming
from tests.support.service_process import HeadraceUp, run_of

if TYPE_CHECKING:
    from torch import Tensor

    from tests.e2e.retraining import Retraining

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

WITNESSES = 12
SWAPS = 2
"""Number of versions that have to take over from the base while the agent works."""


@pytest.fixture(scope="module")
def folder(backends: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("circle") / "data"


@pytest.fixture(scope="module")
def chosen(backends: dict[str, object], base_model: Path, judge_llm: FakeLLM) -> dict[str, object]:
    return circle.settings(base_model, judge_llm) | backends


@pytest.fixture(scope="module")
def up(chosen: dict[str, object], folder: Path) -> Iterator[HeadraceUp]:
    running = circle.up(folder, chosen)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def finished_work(up: HeadraceUp, folder: Path) -> Work:
    """The clients' side of the run, once everything that they did has been trained or dropped."""

    async def run() -> Work:
        work = await circle.work(up, lambda: circle.promotions(up) > SWAPS, WITNESSES, folder.with_name("agent.json"))
        await circle.settled(up)
        return work

    return asyncio.run(run())


@pytest.fixture(scope="module")
def observed(up: HeadraceUp, finished_work: Work) -> Observed:
    return asyncio.run(circle.observe(up.state.bus))


@pytest.fixture(scope="module")
def lineage(chosen: dict[str, object], folder: Path, observed: Observed) -> Retraining:
    from tests.e2e.retraining import Retraining  # torch takes seconds, and not every test here needs it

    return Retraining.of(circle.trainer_settings(chosen), folder, observed)


def test_every_service_is_a_process_of_its_own(up: HeadraceUp, backends: dict[str, object]) -> None:
    expected = {"gateway", "inference", "collector", "scorer", "judge", "trainer", "registry", "console"}
    expected |= set() if backends else {"broker"}
    assert set(up.state.services) == expected
    assert len({service.pid for service in up.state.services.values()}) == len(expected)


def test_versions_took_over_while_the_agent_worked(observed: Observed, finished_work: Work) -> None:
    assert finished_work.agent["failed_requests"] == 0
    assert finished_work.agent["feedback_taken"]
    versions = {checkpoint.version: checkpoint for checkpoint in observed.all(Checkpoint)}
    assert sorted(checkpoint.step for checkpoint in versions.values()) == list(range(len(versions)))
    promoted = [checkpoint.version for checkpoint in observed.all(ModelEvent) if checkpoint.decision == "promoted"]
    assert len(dict.fromkeys(promoted)) > SWAPS
    scored = {checkpoint.version for checkpoint in observed.all(ModelEvent) if "score" in checkpoint.statistics}
    assert scored >= set(promoted[-2:]), "the champion and the one before it were evaluated on held-out tasks"
    assert scored <= set(promoted)
    assert {turn.version for turn in observed.all(Turn) if turn.purpose == "train"} >= set(promoted[:2])
    rewards = {(checkpoint.source, checkpoint.outcome) for checkpoint in observed.all(Reward)}
    assert rewards >= {("function:answer", "scored"), ("function:tool_use", "scored"), ("judge:helpfulness", "scored")}
    assert observed.all(DeadLetter) == []


def test_three_ledgers_agree(up: HeadraceUp, observed: Observed, finished_work: Work) -> None:
    """Compare the clients' answers, the topics and the account."""
    turns = {turn.turn_id: turn for turn in observed.all(Turn)}
    mine = {item.response_id for item in finished_work.received}
    assert mine <= turns.keys()
    trainable = [turn for turn in turns.values() if turn.purpose == "train"]
    assert len(trainable) == finished_work.agent["calls"] + len(mine)
    status: dict[str, Any] = up.status()
    account = status["account"]
    assert account["captured"] == len(turns)
    assert account["captured"] == account["trained"] + sum(account["waiting"].values()) + sum(
        account["dropped"].values()
    )
    verdicts = {v.experience_id: v for item in observed.all(TrainingMetrics) for v in item.verdicts if not v.dropped}
    assert account["trained"] == len({turn_id for verdict in verdicts.values() for turn_id in verdict.turn_ids})
    assert account["trained"] >= 0.9 * len(trainable), account


def test_tokens_are_those_that_the_client_saw(observed: Observed, finished_work: Work) -> None:
    """From the engine's answer over the turn to the experience, bit for bit (P2), and the version with them (P3)."""
    turns = {turn.turn_id: turn for turn in observed.all(Turn)}
    spans = {
        span.turn_id: (branch.token_ids[: span.start], branch.token_ids[span.start : span.stop], span)
        for experience in observed.all(Experience)
        if (branch := experience.branch) is not None
        for span in branch.spans
    }
    assert len(finished_work.received) == 2 * WITNESSES
    for received in finished_work.received:
        turn = turns[received.response_id]
        prompt, sampled, span = spans[received.response_id]
        assert list(turn.prompt_token_ids) == received.prompt_token_ids == list(prompt)
        assert list(turn.choices[0].token_ids) == received.token_ids == list(sampled)
        logprobs = np.array(received.logprobs, np.float32)
        assert np.array(turn.choices[0].logprobs, np.float32).tobytes() == logprobs.tobytes()
        assert np.array(span.logprobs, np.float32).tobytes() == logprobs.tobytes()
        assert turn.version == received.version == span.version
        assert turn.sampling.temperature == span.temperature


def test_trained_batches_are_the_captured_turns_bit_for_bit(lineage: Retraining) -> None:
    """Tokens, masks, logprobs, temperatures: the trainer's digest of each batch is that of one made of turns (P2)."""
    assert set(lineage.digests) >= set(range(1, SWAPS + 1))
    assert {step: lineage.batch(step).digest() for step in lineage.digests} == lineage.digests
    assert lineage.batch(1, tampered=True).digest() != lineage.digests[1]


def test_published_weights_follow_bit_for_bit_from_the_captured_turns(lineage: Retraining) -> None:
    """P9: trained again on the turns, the base becomes each version in turn, which no digest could fake."""
    from headrace_trainer.torch_learner.optimizer import Optimizer

    policy, reader = lineage.policy(), lineage.policy()
    optimizer = Optimizer(policy.parameters, lineage.settings.optimizer, policy.hidden)
    base, *published = lineage.saved.versions
    parent = base.version
    assert len(published) >= SWAPS
    for version in published[: SWAPS + 1]:
        assert version.parent == parent
        for step in range(version.first_step, version.last_step + 1):
            lineage.train(policy, optimizer, lineage.batch(step))
        assert equal(policy.tensors(), lineage.load(version, reader)), f"step {version.last_step}"
        parent = version.version
    lineage.load(base, policy)
    tampered = lineage.batch(1, tampered=True)
    lineage.train(policy, Optimizer(policy.parameters, lineage.settings.optimizer, policy.hidden), tampered)
    assert not equal(policy.tensors(), lineage.load(published[0], reader)), "one other token, other weights"


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


def test_engine_and_trainer_agree_on_the_version_that_sampled(lineage: Retraining, observed: Observed) -> None:
    """Recomputed for every trained token on the weights of the version that its turn names, after temperature."""
    drifts = {}
    policy = lineage.policy()
    for version in lineage.saved.versions:
        lineage.load(version, policy)
        drifts[version.version] = lineage.drift(policy, version.version)
    drift_N = np.concatenate(list(drifts.values()))
    mean, p99 = drift_N.mean(), np.quantile(drift_N, 0.99)
    print(
        f"{len(drift_N)} tokens of {sum(len(drift) > 0 for drift in drifts.values())} versions: "
        f"{mean:.2e}, p99 {p99:.2e}"
    )
    assert sum(len(drift) > 0 for drift in drifts.values()) >= SWAPS
    assert mean < 1e-4
    elsewhere_N = lineage.drift(policy, lineage.saved.versions[0].version)
    assert elsewhere_N.mean() > 1e-3, "on other weights than those that sampled it, it would show"
    reported = [
        drift.metrics["mismatch_mean"] for drift in observed.all(TrainingMetrics) if "mismatch_mean" in drift.metrics
    ]
    assert reported, "the trainer measures it too"
    assert max(reported) < 1e-4


def test_kcat_reads_the_topics(up: HeadraceUp, observed: Observed, tmp_path: Path) -> None:
    presence.need("kcat")
    login = tmp_path / "kcat.conf"  # a file, as `ps` shows arguments to everybody
    access = login_for(up.state.bus)
    login.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        f"sasl.username={access.username}\nsasl.password={access.password}\n"
        if access
        else "",
        encoding="utf-8",
    )
    for kind in (Turn, Trajectory, Experience, TrainingMetrics):
        options = ["-C", "-t", kind.topic, "-o", "beginning", "-e", "-q", "-f", "%k %h\n%s\n"]
        command = ["kcat", "-F", str(login), "-b", up.state.bus, *options]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
        heads, values = lines[::2], [json.loads(line) for line in lines[1::2]]
        assert len(values) >= len(observed.all(kind))
        assert {kind.from_json(json.dumps(value).encode()).event_id for value in values} >= {
            event.event_id for event in observed.all(kind)
        }
        assert all(f"ce_type={kind.type}" in head for head in heads)


def ask(question: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


QUESTIONS = [f"What is the extension of {contact.name}?" for contact in generate(0).contacts[:12]]


def test_openai_sync_with_tools(up: HeadraceUp) -> None:
    """Play a tool call, its result and the final answer. The model is sampled: it may take several questions."""
    tools = Mailtools(generate(0).open())
    client = openai.OpenAI(base_url=up.base_url, api_key="none")
    assert MODEL in [listed.id for listed in client.models.list()]
    for question in QUESTIONS:
        messages = ask(question)
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=DEFINITIONS, max_tokens=64)
        if first.choices[0].finish_reason == "tool_calls":
            break
    else:
        pytest.fail(f"none of {len(QUESTIONS)} questions made the model call a tool")
    calls = first.choices[0].message.tool_calls
    assert calls
    messages.append(first.choices[0].message.to_dict())
    for call in calls:
        assert call.type == "function"
        assert isinstance(json.loads(call.function.arguments), dict)
        result = tools.call(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=DEFINITIONS, max_tokens=64)
    assert second.model.startswith(f"{MODEL}@")
    assert second.usage is not None
    assert second.usage.prompt_tokens > (first.usage.prompt_tokens if first.usage else 0)


def test_openai_stream_with_tools(up: HeadraceUp) -> None:
    client = openai.OpenAI(base_url=up.base_url, api_key="none")
    kinds: set[str] = set()
    for question in QUESTIONS:
        with client.chat.completions.stream(
            model=MODEL, messages=ask(question), tools=DEFINITIONS, max_tokens=64
        ) as stream:
            kinds |= {event.type for event in stream}
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason in ("tool_calls", "stop", "length")
        if "tool_calls.function.arguments.done" in kinds:
            return
    pytest.fail(f"none of {len(QUESTIONS)} streamed answers had a tool call; there were {kinds}")


async def test_openai_async_plain_and_streamed_at_once(up: HeadraceUp) -> None:
    async with openai.AsyncOpenAI(base_url=up.base_url, api_key="none") as client:

        async def plain(question: str) -> str:
            answer = await client.chat.completions.create(model=MODEL, messages=ask(question), n=2, max_tokens=16)
            assert [choice.index for choice in answer.choices] == [0, 1]
            return answer.id

        async def streamed(question: str) -> str:
            options: Any = {"include_usage": True}
            stream = await client.chat.completions.create(
                model=MODEL, messages=ask(question), stream=True, stream_options=options, max_tokens=16
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens <= 16
            return chunks[0].id

        ids = await asyncio.gather(*(call(question) for question in QUESTIONS for call in (plain, streamed)))
    assert len(set(ids)) == 2 * len(QUESTIONS)
    turns = {turn.turn_id for turn in (await circle.observe(up.state.bus)).all(Turn)}
    assert set(ids) <= turns, "whoever has the end of an answer has a captured turn (P1)"


def test_nothing_is_left_after_ctrl_c(up: HeadraceUp, folder: Path, finished_work: Work) -> None:
    services = up.state.services.values()
    assert {service.pid for service in services} <= naming(str(folder)).keys()
    assert up.stop() == 0, up.log[-3000:]
    assert naming(str(folder)) == {}
    assert [service.port for service in services if is_open(service.port)] == []
    assert run_of(folder) is None


def test_the_next_start_goes_on_where_this_one_ended(up: HeadraceUp, folder: Path, observed: Observed) -> None:
    if up.running():
        up.stop()
    up.start()
    before = {event.version: event for event in observed.all(Checkpoint)}
    last = max(before.values(), key=lambda event: event.step)
    promoted = [event.version for event in observed.all(ModelEvent) if event.decision == "promoted"]
    version_count = len(circle.versions(up))
    client = openai.OpenAI(base_url=up.base_url, api_key="none")
    answer = client.chat.completions.create(model=MODEL, messages=ask(QUESTIONS[0]), max_tokens=8)

    async def more() -> tuple[Observed, TurnAccount]:
        await circle.work(up, lambda: len(circle.versions(up)) > version_count, 0, folder.with_name("agent.json"))
        return await circle.observe(up.state.bus), await read_turn_account(up.state.bus)

    after, account = asyncio.run(more())
    champions = [event.version for event in after.all(ModelEvent) if event.decision == "promoted"]
    assert champions[: len(promoted)] == promoted
    assert answer.model in champions[len(promoted) - 1 :], "the last champion, or a candidate that was waiting then"
    versions = {event.version: event for event in after.all(Checkpoint)}
    assert before.keys() < versions.keys()
    new = sorted((event for event in versions.values() if event.version not in before), key=lambda event: event.step)
    assert [event.step for event in new] == list(range(last.step + 1, len(versions)))
    assert new[0].parent == last.version
    assert account.consistent, account.problems
    assert account.captured >= len({turn.turn_id for turn in after.all(Turn)})
    assert up.stop() == 0
