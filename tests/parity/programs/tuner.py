"""AgentScope's tuner, and Trinity-RFT: workflows, with the part of AgentScope that they need, and its YAML files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.practice import Step
from headrace.trinity import AgentScopeReActWorkflow, Experience, ModelWrapper, Task, Workflow, run_workflow
from headrace.tuner import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    PromptTuneConfig,
    TinkerConfig,
    TunerModelConfig,
    WorkflowOutput,
    avg_token_consumption_judge,
    check_judge_function,
    check_workflow_function,
    select_model,
    tune,
    tune_prompt,
)
from headrace_integrations.trinity.workflows import FormatArgs
from headrace_integrations.tuner.configs import run_and_judge
from headrace_operations.trinity_yaml import KEYS, convert, flatten_keys
from tests.docs.fences import check
from tests.parity.stage import CONVERTED, EXPLORER, TRAINER, Stage, program, raises


class Scripted:
    """A chat model that always gives the same answer, at a price."""

    def __init__(self, text: str, tokens: int) -> None:
        self.model_name, self._text, self._tokens = text, text, tokens

    async def __call__(self, messages: Any, **_: Any) -> Any:
        usage = SimpleNamespace(input_tokens=self._tokens, output_tokens=1)
        return SimpleNamespace(
            content=[{"type": "text", "text": self._text}], usage=usage, get_text_content=lambda: self._text
        )


async def tuner_workflow(
    task: dict[str, Any], model: Any, auxiliary_models: Mapping[str, Any] | None = None
) -> WorkflowOutput:
    messages = [{"role": "user", "content": task["question"]}]
    response = await model(messages)
    for partner in (auxiliary_models or {}).values():
        await partner(messages, max_tokens=4)
    return WorkflowOutput(response=response, metrics={"length": float(len(response.get_text_content()))})


async def judge(task: dict[str, Any], response: Any, logger: Any = None) -> JudgeOutput:
    if logger is not None:
        logger.debug("judging %s", task["question"])
    return JudgeOutput(reward=1.0 if task["answer"] in response.get_text_content() else 0.0)


def written(folder: Path) -> Path:
    """A data set as in the document."""
    rows = [{"question": "123 + 456", "answer": "579"}, {"question": "1 + 1", "answer": "2"}]
    for split in ("train", "test"):
        (folder / "my_dataset").mkdir(exist_ok=True)
        (folder / "my_dataset" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "my_dataset"


@program("objects", own_stack=True)
def objects(stage: Stage) -> None:
    with stage.working_folder("objects") as folder:
        data = written(folder)
        assert DatasetConfig(path=str(data)).preview(n=1) == [{"question": "123 + 456", "answer": "579"}]
        task = {"question": "123 + 456", "answer": "579"}
        output = blocking(tuner_workflow(task, Scripted("it is 579", 3)))
        assert blocking(judge(task, output.response)).reward == 1.0
        check_workflow_function(tuner_workflow)
        check_judge_function(judge)
        raises(UsageError, "has a parameter 'more'", lambda: check_workflow_function(takes_more))
        raises(UsageError, "must be async", lambda: check_judge_function(lambda task, response: None))
        reward, metrics = blocking(run_and_judge(tuner_workflow, with_metrics, None, task, Scripted("579", 3)))
        assert (reward, metrics) == (0.75, {"length": 3.0, "short": 0.5})
        raises(
            UsageError,
            "reward = None",
            lambda: blocking(run_and_judge(tuner_workflow, None, None, task, Scripted("1", 1))),
        )
        base = "models/base"
        train = DatasetConfig(path=str(data))
        tinker = TunerModelConfig(model_path=base, tinker_config=TinkerConfig())
        raises(
            UsageError, "tinker_config", lambda: tune(workflow_func=tuner_workflow, train_dataset=train, model=tinker)
        )
        engines = TunerModelConfig(model_path=base, inference_engine_num=2)
        raises(
            UsageError,
            "inference_engine_num = 2",
            lambda: tune(workflow_func=tuner_workflow, train_dataset=train, model=engines),
        )
        nccl = {"model": {"model_path": base}, "synchronizer": {"sync_method": "nccl"}}
        (folder / "trinity.yaml").write_text(yaml.safe_dump(nccl))
        raises(
            UsageError,
            "sync_method",
            lambda: tune(workflow_func=tuner_workflow, config_path=str(folder / "trinity.yaml")),
        )


@program("tune", own_stack=True)
def tuning(stage: Stage) -> None:
    with stage.working_folder("tune") as folder:
        data = written(folder)
        tune(
            workflow_func=tuner_workflow,
            judge_func=judge,
            train_dataset=DatasetConfig(path=str(data), split="train"),
            eval_dataset=DatasetConfig(path=str(data), split="test"),
            model=TunerModelConfig(model_path=str(stage.base), max_model_len=1024, max_tokens=6),
            auxiliary_models={"partner": "tiny", "scripted": Scripted("hm", 1)},
            algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=2, batch_size=2, learning_rate=1e-3),
        )
        (experiment,) = (folder / "checkpoints" / "AgentScope").iterdir()
        assert experiment.name.startswith("Experiment-2")
        assert list((experiment / "monitor" / "tensorboard").rglob("*tfevents*"))
        last_metrics = json.loads((experiment / "monitor" / "metrics.jsonl").read_text().splitlines()[-1])
        assert last_metrics["step"] == 1
        assert {"rollout/reward", "rollout/length", "eval/reward"} <= set(last_metrics)
        assert (experiment / "global_step_1" / "actor" / "huggingface" / "config.json").is_file()


@program("choosing", own_stack=True)
def choosing(stage: Stage) -> None:
    with stage.working_folder("choosing") as folder:
        data = DatasetConfig(path=str(written(folder)))
        dear, cheap = Scripted("579 or 2", 100), Scripted("579, 2", 3)
        best, means = blocking(
            select_model(
                workflow_func=tuner_workflow,
                judge_func=avg_token_consumption_judge,
                train_dataset=data,
                candidate_models=[dear, cheap],
            )
        )
        assert best is cheap
        assert means["best_reward"] == -4.0
        raises(UsageError, "at least 2", lambda: blocking(
            select_model(workflow_func=tuner_workflow, judge_func=judge, train_dataset=data, candidate_models=[dear])
        ))  # fmt: skip
        options = PromptTuneConfig(optimization_level="brute")
        raises(UsageError, "one of light", lambda: tune_prompt(
            workflow=prompted, init_system_prompt="Solve.", judge_func=judge, train_dataset=data, config=options
        ))  # fmt: skip


async def prompted(task: dict[str, Any], system_prompt: str) -> WorkflowOutput:
    return WorkflowOutput(response=f"{system_prompt} {task['question']}")


async def takes_more(task: Any, model: Any, more: Any) -> None: ...


async def with_metrics(task: dict[str, Any], response: Any) -> JudgeOutput:
    """A judge of two metrics: objects that are awaited, as AgentScope's are."""

    class Metric:
        """One that answers with a result."""

        def __init__(self, name: str, value: float) -> None:
            self.name, self._value = name, value

        async def __call__(self, _response: Any) -> Any:
            return SimpleNamespace(name=self.name, result=self._value)

    results = [await metric(response) for metric in (Metric("right", 1.0), Metric("short", 0.5))]
    return JudgeOutput(
        reward=sum(result.result for result in results) / 2, metrics={results[1].name: results[1].result}
    )


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
