"""Trinity-RFT: workflows, with the part of AgentScope that they need, and its YAML files."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import yaml

from headrace.blocking import blocking
from headrace.practice import Step
from headrace.trinity import AgentScopeReActWorkflow, Experience, ModelWrapper, Task, Workflow, run_workflow
from headrace_integrations.trinity.workflows import FormatArgs
from headrace_operations.trinity_yaml import KEYS, convert, flatten_keys
from tests.docs.fences import check
from tests.parity.stage import CONVERTED, EXPLORER, TRAINER, Stage, program, raises

ROWS = [{"question": "How many?", "answer": "4"}, {"question": "How much?", "answer": "5"}]
KEPT: list[list[Experience]] = []


class Rewarded(AgentScopeReActWorkflow):
    """Workflow of the document with a reward of its own."""

    async def calculate_reward(self, response: Any) -> dict[str, float]:
        text = response.get_text_content()
        return {"right": float(self.task.raw_task["answer"] in text), "length": len(text) / 100}

    def construct_experiences(self, reward: float, metrics: Any = None) -> list[Experience]:
        experiences = super().construct_experiences(reward, metrics)
        KEPT.append(experiences)
        return experiences


class Blocking(Workflow):
    """One that does not await, with a partner."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_client()

    def run(self) -> list[Experience]:
        messages: Any = [{"role": "user", "content": self.task.task_desc}]
        for client in (self.client, *self.auxiliary_models):
            client.chat.completions.create(model=client.model_path, messages=messages, max_tokens=6)
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = 0.5
        return experiences


@program("workflow")
def workflow(stage: Stage) -> None:
    KEPT.clear()
    with installed():
        columns = FormatArgs(prompt_key="question", response_key="answer")
        steps = blocking(all_steps(stage, Rewarded, columns))
    assert steps[0].errors == ()
    assert steps[0].trained >= 4, "a call that does not continue the tokens before it is another experience"
    assert len(KEPT) == 4
    for run in KEPT:
        assert len(run) == 2, "both calls of the run were recorded"
        assert len({experience.reward for experience in run}) == 1, "one reward on every call"
        for number, experience in enumerate(run):
            assert experience.eid.step == number
            assert len(experience.logprobs) == len(experience.tokens) - experience.prompt_length > 0
            assert experience.eid.suffix.startswith("chatcmpl-")
    assert set(steps[0].run_metrics) == {"right", "length"}
    partner = [stage.stack.model]
    steps = blocking(all_steps(stage, Blocking, FormatArgs("question", "answer"), partner))
    assert steps[0].trained > 0
    assert steps[0].reward_mean == 0.5

    def off() -> None:
        wrapper = ModelWrapper(KEPT_RUN[0], enable_history=False)
        wrapper.extract_experience_from_history()

    raises(ValueError, "keeps no history", off)


KEPT_RUN: list[Any] = []


async def all_steps(stage: Stage, workflow_class: Any, columns: FormatArgs, partners: Any = ()) -> list[Step]:
    sizes: dict[str, Any] = {"repeat_times": 2, "batch_size": 2, "steps": 1}
    steps = run_workflow(stage.stack, workflow_class, ROWS, format_args=columns, auxiliary_models=partners, **sizes)
    played = [step async for step in steps]
    KEPT_RUN[:] = list(played[0].runs)
    return played


@program("convert", own_stack=True)
def converting(stage: Stage) -> None:
    conversion = convert(EXPLORER, TRAINER)
    assert conversion.refused == []
    assert conversion.settings == CONVERTED
    assert {key for key, _ in conversion.lines} == set(flatten_keys(EXPLORER)) | set(flatten_keys(TRAINER)), (
        "a line for each key"
    )
    with stage.working_folder("converted") as folder:
        (folder / "explorer.yaml").write_text(yaml.safe_dump(EXPLORER))
        (folder / "trainer.yaml").write_text(yaml.safe_dump(TRAINER))
        output = stage.headrace("trinity", "convert", "explorer.yaml", "trainer.yaml")
        assert "explorer.proxy_port" in output
        check((folder / "headrace.toml").read_text(), folder)
    nccl = {**TRAINER, "synchronizer": {"sync_method": "nccl", "sync_interval": 1}, "surprise": {"key": 1}}
    refused = convert(nccl).refused
    assert len(refused) == 2
    assert any("sync_method" in refusal for refusal in refused)
    assert any("surprise.key" in refusal for refusal in refused)
    assert any("must be equal" in refusal for refusal in convert(EXPLORER, {**TRAINER, "project": "other"}).refused)


@program("keys", own_stack=True)
def keys(stage: Stage) -> None:
    rollout = {"enable_openai_client": True, "enable_history": True, "enable_auto_tool_choice": True,
               "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1", "enable_thinking": True}  # fmt: skip
    config = {
        "algorithm": {"algorithm_type": "multi_step_grpo", "repeat_times": 8},
        "explorer": {"rollout_model": rollout},
        "synchronizer": {"sync_style": "dynamic_by_explorer", "sync_interval": 2},
        "buffer": {"batch_size": 4, "explorer_input": {"taskset": {"path": "openai/gsm8k", "split": "train"}}},
    }
    conversion = convert(config)
    assert conversion.refused == []
    assert conversion.settings == {
        "trainer.algorithm": "multi_step_grpo", "trainer.group_size": 8, "trainer.batch_experiences": 32,
        "inference.tool_parser": "hermes", "inference.reasoning_parser": "think", "trainer.steps_per_version": 2,
    }  # fmt: skip
    data = {"data.tasks_per_step": 4, "data.path": "openai/gsm8k", "data.split": "train", "data.enable_thinking": True}
    assert conversion.data == data
    assert {"explorer.rollout_model.enable_openai_api", "explorer.rollout_model.enable_openai_client"} <= set(KEYS)


class Msg:
    """A message."""

    def __init__(self, name: str, content: Any, role: str, metadata: Any = None) -> None:
        self.name, self.content, self.role, self.metadata = name, content, role, metadata

    def get_text_content(self) -> str:
        return str(self.content)


class OpenAIChatModel:
    """A model whose `client` is replaced."""

    def __init__(self, model_name: str, api_key: str, generate_kwargs: Any = None, stream: bool = True) -> None:
        self.model_name, self.stream, self.options = model_name, stream, dict(generate_kwargs or {})
        self.client: Any = None

    async def __call__(self, messages: list[dict[str, Any]]) -> str:
        options = {"max_tokens": 6, **{name: value for name, value in self.options.items() if name != "max_tokens"}}
        completion = await self.client.chat.completions.create(model=self.model_name, messages=messages, **options)
        return completion.choices[0].message.content or ""


class ReActAgent:
    """Calls its model twice: a thought, and an answer."""

    def __init__(self, name: str, sys_prompt: str, model: OpenAIChatModel, formatter: Any, max_iters: int) -> None:
        self.name, self.model, self._prompt = name, model, sys_prompt

    async def reply(self, message: Msg) -> Msg:
        messages = [{"role": "system", "content": self._prompt}, {"role": "user", "content": str(message.content)}]
        thought = await self.model(messages)
        messages += [{"role": "assistant", "content": thought}, {"role": "user", "content": "And the answer?"}]
        return Msg(self.name, await self.model(messages), "assistant")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """`import agentscope` finds these for the body."""
    names: dict[str, dict[str, Any]] = {
        "agentscope": {}, "agentscope.agent": {"ReActAgent": ReActAgent}, "agentscope.message": {"Msg": Msg},
        "agentscope.model": {"OpenAIChatModel": OpenAIChatModel},
        "agentscope.formatter": {"OpenAIChatFormatter": object},
    }  # fmt: skip
    before = {name: sys.modules.get(name) for name in names}
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, earlier in before.items():
            sys.modules.pop(name)
            if earlier is not None:
                sys.modules[name] = earlier
