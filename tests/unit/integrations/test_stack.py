"""Tests of stacks: settings compared with a running Headrace, state, and the article's interface without services."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.rl import (
    DataCollector,
    HotUpdater,
    ModelManager,
    OnlineTrainer,
    RLRuntime,
    TrinityRFT,
    run_and_collect,
)
from headrace.stack import Addresses, Stack, attach, current, stack_for
from headrace_integrations.practice import collecting
from headrace_integrations.practice.training import SessionOutcome
from headrace_integrations.rl import training
from headrace_integrations.rl.serving import share_of
from headrace_integrations.scenarios.tool_use import first_answer
from headrace_integrations.stack.attaching import train_rows
from headrace_integrations.stack.connection import flatten_settings, support
from headrace_operations.arguments import model_name
from tests.parity.stage import the_record
from tests.unit.integrations.conftest import VERSION, RecordingGatewayStack

TRAINER_SETTINGS = {
    "trainer.base": "/models/Qwen3-0.6B",
    "trainer.model": "Qwen3-0.6B",
    "trainer.group_size": 8,
    "trainer.lora.rank": 0,
    "trainer.lora.targets": ["q_proj"],
}


def stack() -> RecordingGatewayStack:
    return RecordingGatewayStack(settings=TRAINER_SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.group_size": 4}, r"trainer.group_size = 4: the running trainer has 8"),
        ({"trainer.groups": 4}, r"trainer.groups = 4: no such setting"),
        ({"gateway.port": 1}, r"only settings of the trainer can be compared"),
    ],
)
def test_a_setting_that_differs_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stack().check(None, None, settings)


def test_check_accepts_the_settings_of_the_trainer() -> None:
    stack().check("/models/Qwen3-0.6B", "Qwen3-0.6B", {"trainer.group_size": 8, "trainer.lora.targets": ("q_proj",)})
    stack().check("Qwen/Qwen3-0.6B", None, {})  # named as the model is
    for base, model in (("/models/other", None), (None, "other")):
        with pytest.raises(UsageError, match=r"trainer\.(base|model)"):
            stack().check(base, model, {})


def test_the_entered_stack_is_used_and_checked() -> None:
    with pytest.raises(UsageError, match=r"no Headrace is attached"):
        current()
    with stack() as entered:
        assert current() is entered
        with stack_for(None, {"trainer.group_size": 8}) as used:
            assert used is entered
        with pytest.raises(UsageError, match=r"trainer\.group_size"), stack_for(None, {"trainer.group_size": 2}):
            pass
        with stack() as inner:
            assert current() is inner
        assert current() is entered
    with pytest.raises(UsageError):
        current()


def test_private_stack_needs_a_model_folder(tmp_path: Path) -> None:
    for base in (None, "Qwen/Qwen3-0.6B", tmp_path):
        with pytest.raises(UsageError, match=r"must be a model folder"):
            attach(base=base)
    with pytest.raises(UsageError, match="leave data_dir or url out"):
        attach("http://127.0.0.1:1", data_dir=tmp_path)


def test_names_of_models_have_no_slash() -> None:
    assert model_name("Qwen/Qwen3-0.6B") == model_name("/models/Qwen3-0.6B/") == "Qwen3-0.6B"
    assert model_name("a b") == "a-b"
    assert model_name("...") == "model"


def test_tables_are_flat_by_dotted_names() -> None:
    assert flatten_settings({"a": 1, "b": {"c": 2}}, "t.") == {"t.a": 1, "t.b": {"c": 2}, "t.b.c": 2}


def test_missing_package_is_named() -> None:
    with pytest.raises(UsageError, match="pip install headrace-nothing"):
        support("nothing_at_all", "headrace-nothing")


def test_a_decision_counts_when_clients_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        """Registry with fixed versions."""

        champion: str | None = "m@1"
        state, paused, pinned = "promoted", False, None

        def model(self, _name: str) -> Any:
            return self

        def versions(self, _name: str, limit: int) -> list[Any]:
            self.id = "m@2"
            return [self]

    used = Stack(Addresses("http://gateway"), "m")
    registry = Registry()
    used.__dict__["registry"] = registry
    serving = ["m@1"]
    monkeypatch.setattr(Stack, "serving", lambda _self, _name=None: serving[0])
    assert used.decision("m@unknown") is None
    registry.champion = "m@2"
    assert used.decision("m@2") is None, "promoted, and the gateway does not know it yet"
    serving[0] = "m@2"
    assert used.decision("m@2") == "promoted"
    registry.state = "rejected"
    assert used.decision("m@2") == "rejected"
    registry.state = "registered"
    assert used.decision("m@2") is None
    registry.paused = True
    assert used.decision("m@2") == "waits"


@pytest.fixture
def rl_stack(monkeypatch: pytest.MonkeyPatch) -> Any:
    async def record_run(*_: Any) -> tuple[dict[str, Any], str]:
        return the_record(), "Ada sent it."

    monkeypatch.setattr(collecting, "_record_run", record_run)
    with RecordingGatewayStack() as entered:
        yield entered


def test_the_total_is_a_plain_sum_and_is_sent_once(rl_stack: RecordingGatewayStack) -> None:
    rewards = {"task_completion": 0.8, "efficiency": 0.6}
    record = DataCollector(reward_function=lambda _: rewards).collect(
        object(), "Who?", {"rating": 4, "comment": "good"}
    )
    assert record["total_reward"] == pytest.approx(2.2)
    collecting.send_reward(rl_stack, record)
    (_, first), (_, second) = rl_stack.gateway.posted
    assert first["feedback_id"] == second["feedback_id"], "the same total counts once"
    assert (first["value"], first["comment"]) == (pytest.approx(2.2), "good")
    assert first["context"] == {"parts": {**rewards, "user_satisfaction": 0.8}}


def test_without_a_reward_nothing_is_sent(rl_stack: RecordingGatewayStack) -> None:
    record = run_and_collect(object(), "Who?")
    assert record["total_reward"] is None
    run_and_collect(object(), "Who?", reward_function=lambda _: None)
    run_and_collect(object(), "Who?", reward_function=lambda _: 1.0, purpose="eval")
    assert rl_stack.gateway.posted == []


def test_a_reward_that_fails_is_raised_and_nothing_is_sent(rl_stack: RecordingGatewayStack) -> None:
    def fails(_record: Any) -> float:
        raise RuntimeError("the judge was not reached")

    with pytest.raises(RuntimeError, match="not reached"):
        run_and_collect(object(), "Who?", reward_function=fails)
    for rating in (0, 6):
        with pytest.raises(ValueError, match="must be from 1 to 5"):
            run_and_collect(object(), "Who?", user_feedback={"rating": rating})
    assert rl_stack.gateway.values == []


def test_settings_of_a_framework_are_the_trainers() -> None:
    config = {"base_model": "models/base", "lora_rank": 8}
    training = {"learning_rate": 1e-5, "batch_size": 16, "gradient_accumulation_steps": 4}
    assert TrinityRFT("ppo", config, training).settings == {
        "trainer.algorithm": "ppo",
        "trainer.lora.rank": 8,
        "trainer.optimizer.learning_rate": 1e-5,
        "trainer.batch_experiences": 64,
    }


def test_a_running_trainer_that_is_set_otherwise_is_refused(rl_stack: RecordingGatewayStack) -> None:
    with pytest.raises(UsageError, match=r"trainer\.algorithm = 'ppo': no such setting"):
        OnlineTrainer(SimpleNamespace(), TrinityRFT("ppo"))


class AsyncAgent:
    """Agent that returns its input."""

    async def run(self, text: str) -> str:
        return text


async def test_an_agent_that_awaits_still_does_after_its_first_run(
    rl_stack: RecordingGatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "collect_run", lambda _agent, text, **_: (the_record(), f"collected: {text}"))
    monkeypatch.setattr(rl_stack, "is_private", True)
    agent = AsyncAgent()
    config = {"train_interval": 4, "settings": {"trainer.compute.device": "cpu"}}
    rl_stack.settings_table |= {
        "trainer.algorithm": "ppo",
        "trainer.batch_experiences_min": 4,
        "trainer.steps_per_version": 100,
    }
    runtime = RLRuntime(agent, config).start()
    for text in ("one", "two"):
        assert await agent.run(text) == f"collected: {text}"
    runtime.stop()
    assert await agent.run("three") == "three"


def test_runs_of_another_lineage_are_named_with_a_remedy(
    rl_stack: RecordingGatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rl_stack, "is_private", True)
    rl_stack.settings_table["trainer.algorithm"] = "ppo"
    trainer = OnlineTrainer(AsyncAgent(), TrinityRFT("ppo"))
    trainer.buffer.append({"conversation_id": "s"})
    fates = ["foreign_version"]

    async def until_known(*_: object) -> dict[str, SessionOutcome]:
        return {"s": SessionOutcome(dropped=tuple(fates), trajectory=SimpleNamespace())}  # type: ignore[arg-type]

    monkeypatch.setattr(trainer._watch, "until_known", until_known)
    with pytest.raises(UsageError, match=rf"{VERSION} does not belong to this trainer's lineage .* roll it back"):
        trainer.train_step()
    assert trainer.buffer == []
    trainer.buffer.append({"conversation_id": "s"})
    fates.append("stale")
    assert trainer.train_step()["dropped"] == 2.0, "some of it may be trained another time"


@pytest.mark.parametrize(("ratio", "share"), [(0.1, "1/10"), (0.3, "3/10"), ("1/20", "1/20"), (0.5, "1/2")])
def test_shares_are_exact(ratio: object, share: str) -> None:
    assert share_of(ratio) == share


@pytest.mark.parametrize("ratio", [0, 0.7, 1.0, -0.1])
def test_a_share_is_at_most_a_half(ratio: float) -> None:
    with pytest.raises(UsageError, match="at most 1/2"):
        share_of(ratio)


class Registry:
    """Registry that records requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*words: Any, **_: Any) -> Any:
            self.requests.append(" ".join([name, *map(str, words)]))
            return SimpleNamespace(champion=VERSION)

        return ask


def test_a_candidate_that_failed_is_withdrawn_and_a_champion_gives_way(rl_stack: RecordingGatewayStack) -> None:
    registry = Registry()
    rl_stack.__dict__["registry"] = registry
    updater = HotUpdater(object(), {"strategy": "canary", "canary_ratio": 0.1, "check_after_updates": 5})
    assert registry.requests == ["pause tiny"]
    assert updater._updater.canary_ratio == "1/10"
    assert updater._updater.check_after_updates == 5
    updater.tested = "tiny@ffffffffffffffff"
    updater.rollback()
    assert registry.requests[-1] == "withdraw tiny tiny@ffffffffffffffff"
    updater.tested = VERSION
    updater.rollback()
    assert registry.requests[-1] == "roll_back tiny"
    updater.close()
    assert registry.requests[-1] == "resume tiny"
    with pytest.raises(UsageError, match=r"update_config\.surprise: has no effect here"):
        HotUpdater(object(), {"surprise": 1})


def test_checkpoint_dir_of_another_folder_is_refused(
    rl_stack: RecordingGatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_stack.__dict__["registry"] = Registry()
    with pytest.raises(UsageError, match="this stack keeps its versions in"):
        ModelManager("./checkpoints")
    monkeypatch.setattr(rl_stack, "data_dir", Path("checkpoints").absolute())
    ModelManager("./checkpoints")


def test_offline_job_needs_the_data_directory(rl_stack: RecordingGatewayStack) -> None:
    with pytest.raises(UsageError, match="data_dir: an offline job needs it"):
        train_rows(rl_stack, "dpo", [])


def test_a_pair_ends_with_the_first_answer() -> None:
    record = the_record()
    assert [message["role"] for message in first_answer(record)] == ["user", "assistant"]
    record["messages"][1]["content"] = ""
    (call,) = first_answer(record)[-1]["tool_calls"]
    assert call["function"] == {"name": "search", "arguments": {"query": "invoice"}}
