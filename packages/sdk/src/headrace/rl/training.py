"""`OnlineTrainer`, `TrinityRFT` and `RLRuntime`: the article's loop. The services train and update by themselves, so
its manual calls wait until that has happened."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from headrace.errors import UsageError
from headrace.practice.arguments import check_names, merge_settings, real_number, whole_number
from headrace.practice.blocking import blocking
from headrace.practice.collecting import Rate, collected, run_and_collect, say
from headrace.practice.outcomes import OutcomeWatch
from headrace.stack import Stack, stack_for

_RANK, _RATE, _BATCH = "trainer.lora.rank", "trainer.optimizer.learning_rate", "trainer.batch_experiences"
_KNOWN_MODEL = {"base_model", "lora_rank"}
_KNOWN_TRAINING = {"batch_size", "gradient_accumulation_steps", "epochs", "checkpoint_dir", "learning_rate"}
_REMEDY = "leave it out, or set what you mean by settings="
_INTERVALS = {
    _BATCH: "trainer_config.train_interval",
    "trainer.batch_experiences_min": "trainer_config.train_interval",
    "trainer.steps_per_version": "trainer_config.update_interval",
}


class TrinityRFT:
    """What trains: settings of a trainer. A step is on `batch_size` times `gradient_accumulation_steps` runs.

    `algorithm` is any that the trainer has; one that it has not is refused by name. `settings` are ours; they may not
    contradict the other arguments.
    """

    def __init__(
        self,
        algorithm: str,
        model_config: Mapping[str, Any] | None = None,
        training_config: Mapping[str, Any] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        model, training = model_config or {}, training_config or {}
        check_names("model_config", model, _KNOWN_MODEL, _REMEDY)
        check_names("training_config", training, _KNOWN_TRAINING, _REMEDY)
        if "gradient_accumulation_steps" in training and "batch_size" not in training:
            raise UsageError("training_config.gradient_accumulation_steps: multiplies batch_size; name that as well")
        self.base = model.get("base_model")
        self.epochs = whole_number("training_config.epochs", training.get("epochs", 1))
        own: dict[str, object] = {"trainer.algorithm": algorithm}
        names = {"trainer.algorithm": "algorithm"}
        if "lora_rank" in model:
            own[_RANK] = whole_number("model_config.lora_rank", model["lora_rank"], least=0)
            names[_RANK] = "model_config.lora_rank"
        if "learning_rate" in training:
            own[_RATE] = real_number("training_config.learning_rate", training["learning_rate"])
            names[_RATE] = "training_config.learning_rate"
        if "batch_size" in training:
            times = whole_number(
                "training_config.gradient_accumulation_steps", training.get("gradient_accumulation_steps", 1)
            )
            own[_BATCH] = whole_number("training_config.batch_size", training["batch_size"]) * times
            names[_BATCH] = "training_config.batch_size"
        self.settings = merge_settings(own, settings or {}, names)
        self._data_dir = training.get("checkpoint_dir")
        self._exits = ExitStack()
        self._stack: Stack | None = None

    @property
    def stack(self) -> Stack:
        """The stack that was entered, which has to be set to this; else a private one, entered until `close`."""
        if self._stack is None:
            self._stack = self._exits.enter_context(stack_for(self.base, self.settings, self._data_dir))
        return self._stack

    def close(self) -> None:
        self._exits.close()
        self._stack = None


class OnlineTrainer:
    """Gives the agent `run_and_collect`; sends what is added, and waits for what the trainer makes of it."""

    def __init__(self, agent: Any, framework: TrinityRFT, reward_function: Rate | None = None) -> None:
        if framework.epochs != 1:
            raise UsageError(
                f"training_config.epochs = {framework.epochs}: an online trainer trains on each run once; leave it out"
            )
        self.agent = agent
        self.framework = framework
        self.stack = framework.stack
        self.buffer: list[dict[str, Any]] = []
        self.config = SimpleNamespace(min_samples=int(self.stack.settings()["trainer.batch_experiences"]))
        """`min_samples` is the trainer's own batch: with so many there is a step."""
        self.version = self.stack.serving()
        """The one that the agent was last updated to."""
        self._watch = OutcomeWatch(self.stack)
        if not self.stack.is_private:  # there is too much before
            blocking(self._watch.begin())
        agent.run_and_collect = partial(run_and_collect, agent, reward_function=reward_function)

    def add_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Its `total_reward` is the feedback about its session. One without a reward waits for the services' own."""
        say(self.stack, trajectory)
        self.buffer.append(dict(trajectory))

    def train_step(self, timeout_s: float = 600.0) -> dict[str, float]:
        """Returns when the trainer has said what became of everything in the buffer, which is empty then, and the
        registry has decided about the version. Training itself does not wait for this call."""
        return blocking(self._step(timeout_s))

    train = train_step

    def should_update(self) -> bool:
        """Whether another version answers than the agent was last updated to."""
        return self.stack.serving() != self.version

    def update_agent_model(self) -> str | None:
        """Note the version that answers now. The agent's next session gets it without this call."""
        self.version = self.stack.serving()
        return self.version

    async def _step(self, timeout_s: float) -> dict[str, float]:
        sessions = [str(one["conversation_id"]) for one in self.buffer]
        if not sessions:
            raise UsageError("the buffer is empty; add_trajectory comes first")
        found = await self._watch.until_known(sessions, timeout_s)
        if unseen := [session for session, one in found.items() if one.trajectory is None]:
            raise UsageError(f"session {unseen[0]} made no call that this trainer has seen; make the trainer before it")
        last = max(found.values(), key=lambda one: one.account)
        if last.version is not None:
            await self.stack.until_decided(last.version, timeout_s)
        self.buffer.clear()
        self._watch.forget(sessions)
        if {reason for one in found.values() for reason in one.dropped or ("",)} == {"foreign_version"}:
            raise UsageError(
                f"nothing of the buffer was trained: {self.stack.serving()}, which answered, is not of this trainer's "
                "lineage (a job's version, or one of another base). Roll it back, or begin a stack with its files as "
                "base: `headrace models export`"
            )
        counts = {"trained": float(sum(one.trained for one in found.values()))}
        counts["dropped"] = float(sum(len(one.dropped) for one in found.values()))
        return {**self._watch.metrics, **counts}


class RLRuntime:
    """Training inside of the runtime. `trainer_config`: `algorithm`; `train_interval`, runs of the agent between two
    steps; `update_interval`, steps between two versions; `checkpoint_dir`, where a private stack keeps its data; and
    `model_config`, `reward_function`, `settings` as `TrinityRFT` and `OnlineTrainer` take them."""

    def __init__(self, agent: Any, trainer_config: Mapping[str, Any]) -> None:
        given = dict(trainer_config)
        if wrong := next((name for name in ("batch_size", "gradient_accumulation_steps") if name in given), None):
            raise UsageError(f"trainer_config.{wrong}: train_interval sets the runs of a step; leave {wrong} out")
        self.agent, self._rate = agent, given.pop("reward_function", None)
        names = {setting: name for setting, name in _INTERVALS.items() if name.partition(".")[2] in given}
        runs = whole_number("trainer_config.train_interval", given.pop("train_interval", 10))
        steps = whole_number("trainer_config.update_interval", given.pop("update_interval", 100))
        intervals = {_BATCH: runs, "trainer.batch_experiences_min": runs, "trainer.steps_per_version": steps}
        settings = merge_settings(intervals, given.pop("settings", {}), names)
        algorithm, model = str(given.pop("algorithm", "ppo")), given.pop("model_config", {})
        self.framework = TrinityRFT(algorithm, model, given, settings)
        self.trainer: OnlineTrainer | None = None

    def start(self) -> Self:
        """From now on each `agent.run(text)` is a session that is captured, rewarded and trained."""
        self.trainer = OnlineTrainer(self.agent, self.framework, self._rate)
        answer = self.agent.run

        def run(text: Any) -> Any:
            self.agent.run = answer
            try:
                return collected(self.agent, text, reward_function=self._rate)[1]
            finally:
                self.agent.run = replaced

        async def run_async(text: Any) -> Any:
            return await asyncio.to_thread(run, text)

        replaced = self.agent.run = run_async if asyncio.iscoroutinefunction(answer) else run
        return self

    def stop(self) -> None:
        """The agent is as it was, but for `run_and_collect`; a private stack stops."""
        self.agent.__dict__.pop("run", None)
        self.framework.close()
