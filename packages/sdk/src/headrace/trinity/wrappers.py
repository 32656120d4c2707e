"""`ModelWrapper`, `Task` and `Experience` as a Trinity workflow sees them. What a call cost in tokens comes from the
bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.practice.blocking import blocking
from headrace.practice.runs import SOLO, Run
from headrace.stack.following import Follower
from headrace.topics import connected
from headrace_schemas import Turn, ids


@dataclass(slots=True)
class EID:
    """Where an experience belongs: `task` and `run` are those of the run, `step` counts its calls, `suffix` is the
    response id."""

    batch: int | str = ""
    task: int | str = ""
    run: int | str = 0
    step: int = 0
    suffix: str = ""


@dataclass(slots=True)
class TrinityExperience:
    """One call of the model: `tokens` of prompt and answer, `prompt_length` of them the prompt's, `logprobs` of the
    answer's. The same reward is on every call of a run. Setting any other attribute is an error: nothing would read it.
    """

    eid: EID
    tokens: list[int]
    prompt_length: int
    logprobs: list[float]
    reward: float | None = None
    response_text: str = ""
    prompt_text: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def action_mask(self) -> list[bool]:
        """Every token after the prompt was sampled."""
        return [True] * (len(self.tokens) - self.prompt_length)


@dataclass
class FormatArgs:
    """Which columns of a row hold the query and the truth."""

    prompt_key: str = "prompt"
    response_key: str = "response"


@dataclass
class TrinityTask:
    """A row of a data set with what a workflow may ask of it."""

    raw_task: Mapping[str, Any]
    format_args: FormatArgs = field(default_factory=FormatArgs)
    workflow: Any = None
    repeat_times: int | None = None
    rollout_args: Mapping[str, Any] = field(default_factory=dict)
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    batch_id: int | str = ""
    task_id: int | str = ""

    @property
    def task_desc(self) -> Any:
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        return self.raw_task.get(self.format_args.response_key)


class ModelWrapper:
    """The model of one run. Its clients' calls are the run's session and carry `model_path`, the name to call."""

    def __init__(self, run: Run, role: str = SOLO, *, model: str | None = None, enable_history: bool = True) -> None:
        self.model_path = self.model_name = model or run.model
        self.enable_history = enable_history
        self._run, self._role = run, role
        self._follow = Follower(Turn.topic)
        self._began = False
        self._turns: list[Turn] = []

    def get_openai_client(self) -> Any:
        """An `openai.OpenAI`."""
        return self._led(self._run.openai(self._role, blocking=True))

    def get_openai_async_client(self) -> Any:
        """An `openai.AsyncOpenAI`."""
        return self._led(self._run.openai(self._role))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[TrinityExperience]:
        """An experience for each answer that ended, in order. A turn is durable before its answer ends, so it is there.

        Raises `ValueError` where history is off."""
        if not self.enable_history:
            raise ValueError("this model keeps no history: enable_history is false")
        blocking(self._read())
        found = [one for step, turn in enumerate(self._turns) for one in self._experiences(turn, step)]
        if clear_history:
            self._turns.clear()
        return found

    @property
    def model_version(self) -> str | None:
        """The version that the model's name means now."""
        return self._run.stack.serving(self.model_path)

    def _led(self, client: Any) -> Any:
        client.model_path = self.model_path
        return client

    async def _read(self) -> None:
        stack, session = self._run.stack, self._run.session(self._role).session_id
        key = ids.session_key(stack.tenant, session)
        async with connected(stack.bus) as topics:
            async for turn in self._new(topics, key):
                self._turns.append(turn)

    async def _new(self, topics: Any, key: str) -> AsyncIterator[Turn]:
        async for turn in self._follow.events(topics, Turn, keys=[key]):
            yield turn

    def _experiences(self, turn: Turn, step: int) -> list[TrinityExperience]:
        return [
            TrinityExperience(
                eid=EID(
                    batch=getattr(self._run.task, "batch_id", ""),
                    task=self._run.task_id,
                    run=self._run.run_id,
                    step=step,
                    suffix=turn.turn_id,
                ),
                tokens=[*turn.prompt_token_ids, *choice.token_ids],
                prompt_length=len(turn.prompt_token_ids),
                logprobs=list(choice.logprobs),
                response_text=choice.message.text,
                info={"model_version": turn.version},
            )
            for choice in turn.choices
        ]


Experience, Task = TrinityExperience, TrinityTask
