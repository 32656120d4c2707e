"""`ModelWrapper`, `Task` and `Experience` with the interface of a Trinity workflow. Tokens of calls are read from the
bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.blocking import blocking
from headrace.following import Follower
from headrace.topics import connected
from headrace_integrations.practice.runs import SOLO, Run
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values import ids


@dataclass(slots=True)
class EID:
    """Id of an experience: `task` and `run` are those of the run, `step` counts its calls, `suffix` is the response
    id."""

    batch: int | str = ""
    task: int | str = ""
    run: int | str = 0
    step: int = 0
    suffix: str = ""


@dataclass(slots=True)
class TrinityExperience:
    """One call of the model.

    Every call of a run has the same reward. Setting any other attribute is an error, because it would be ignored.

    Attributes:
        tokens: tokens of prompt and answer.
        prompt_length: number of prompt tokens.
        logprobs: logprobs of the answer tokens.
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
        """Mask of the sampled tokens: all tokens after the prompt."""
        return [True] * (len(self.tokens) - self.prompt_length)


@dataclass
class FormatArgs:
    """Names of the columns with the query and the truth."""

    prompt_key: str = "prompt"
    response_key: str = "response"


@dataclass
class TrinityTask:
    """A row of a data set with the options of a workflow."""

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
    """Model of one run. The calls of its clients belong to the run's session; `model_path` is the model name to use."""

    def __init__(self, run: Run, role: str = SOLO, *, model: str | None = None, enable_history: bool = True) -> None:
        self.model_path = self.model_name = model or run.model
        self.enable_history = enable_history
        self._run, self._role = run, role
        self._follow = Follower(Turn.topic)
        self._history = TurnHistory()
        self._began = False
        self._turns: list[Turn] = []

    def get_openai_client(self) -> Any:
        """Return an `openai.OpenAI`."""
        return self._with_model_path(self._run.openai(self._role, blocking=True))

    def get_openai_async_client(self) -> Any:
        """Return an `openai.AsyncOpenAI`."""
        return self._with_model_path(self._run.openai(self._role))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[TrinityExperience]:
        """Return an experience for each finished answer, in order.

        The gateway publishes a turn before the answer ends, so that every finished answer is included. Raises
        `ValueError` if `enable_history` is False.
        """
        if not self.enable_history:
            raise ValueError("enable_history = False: this model keeps no history; create it with enable_history=True")
        blocking(self._read())
        experiences = [
            experience for step, turn in enumerate(self._turns) for experience in self._experiences(turn, step)
        ]
        if clear_history:
            self._turns.clear()
        return experiences

    @property
    def model_version(self) -> str | None:
        """The version that the gateway serves under the model's name."""
        return self._run.stack.serving(self.model_path)

    def _with_model_path(self, client: Any) -> Any:
        client.model_path = self.model_path
        return client

    async def _read(self) -> None:
        stack, session = self._run.stack, self._run.session(self._role).session_id
        key = ids.session_key(stack.tenant, session)
        async with connected(stack.bus) as topics:
            async for turn in self._new_turns(topics, key):
                self._turns.append(self._history.whole_turn(turn))

    async def _new_turns(self, topics: Any, key: str) -> AsyncIterator[Turn]:
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
