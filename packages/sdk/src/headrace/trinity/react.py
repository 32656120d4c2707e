"""A ReAct agent of AgentScope as a Trinity workflow. The user's AgentScope is imported when an agent is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from headrace.practice.arguments import score
from headrace.trinity.workflows import Workflow
from headrace.trinity.wrappers import ModelWrapper, TrinityTask


class AgentScopeReActAgent:
    """ReAct agent whose model calls go through `openai_client`.

    `reply` returns the agent's message, or the fields of its structured answer if `response_structure` is set.
    """

    def __init__(
        self,
        openai_client: Any,
        model_name: str | None = None,
        system_prompt: str = "You are a helpful assistant.",
        generate_kwargs: Mapping[str, Any] | None = None,
        response_structure: Any = None,
        max_iters: int = 10,
        toolkit: Any = None,
    ) -> None:
        agents, models = import_module("agentscope.agent"), import_module("agentscope.model")
        formatter = import_module("agentscope.formatter").OpenAIChatFormatter()
        name = model_name or openai_client.model_path
        model = models.OpenAIChatModel(
            api_key="EMPTY", model_name=name, generate_kwargs=dict(generate_kwargs or {}), stream=False
        )
        model.client = openai_client
        more = {"toolkit": toolkit} if toolkit is not None else {}
        self.agent = agents.ReActAgent(
            name="react_agent", sys_prompt=system_prompt, model=model, formatter=formatter, max_iters=max_iters, **more
        )
        self._structure = response_structure

    async def reply(self, query: str) -> Any:
        message = import_module("agentscope.message").Msg("user", query, role="user")
        if self._structure is None:
            return await self.agent.reply(message)
        return (await self.agent.reply(message, structured_model=self._structure)).metadata or {}


class AgentScopeReActWorkflow(Workflow):
    """Workflow with a ReAct agent. Override `calculate_reward`, and optionally `make_agent`."""

    is_async = True

    def __init__(
        self, *, task: TrinityTask, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.agent = self.make_agent(model.get_openai_async_client())

    def make_agent(self, client: Any) -> Any:
        return AgentScopeReActAgent(openai_client=client)

    async def calculate_reward(self, response: Any) -> float | Mapping[str, float]:
        """Return the reward of a response: a number, or parts whose sum is the reward."""
        raise NotImplementedError

    async def run_async(self) -> list[Any]:
        query = self.task.raw_task[self.task.format_args.prompt_key]
        response = await self.agent.reply(query)
        reward = await self.calculate_reward(response)
        if not isinstance(reward, Mapping):
            return self.construct_experiences(score("calculate_reward", reward))
        parts = {name: score(f"calculate_reward.{name}", part) for name, part in reward.items()}
        return self.construct_experiences(sum(parts.values()), parts)

    def construct_experiences(self, reward: float, metrics: Mapping[str, float] | None = None) -> list[Any]:
        """Return an experience for each call of the model, all with the reward of the run."""
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics |= dict(metrics or {})
        return experiences
