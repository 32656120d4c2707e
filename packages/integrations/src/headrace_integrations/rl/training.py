"""`OnlineTrainer`, `TrinityRFT`, `RLRuntime` and `DataCollector` with the interfaces of the article.

The services train and update continuously, so calls that start a step or an update in the article wait here for the
services.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace_integrations.practice.collecting import Rate, collect_run, run_and_collect, send_reward
from headrace_integrations.practice.training import OutcomeWatch
from headrace_integrations.stack import Stack, stack_for
from headrace_operations.arguments import check_names, merge_settings, real_number, whole_number, yes_or_no

_RANK_SETTING, _LEARNING_RATE_SETTING, _BATCH_SETTING = (
    "trainer.lora.rank",
    "trainer.optimizer.learning_rate",
    "trainer.batch_experiences",
)
_KNOWN_MODEL = {"base_model", "lora_rank"}
_KNOWN_TRAINING = {"batch_size", "gradient_accumulation_steps", "epochs", "checkpoint_dir", "learning_rate"}
_REMEDY = "leave it out, or set what you mean by settings="
_INTERVALS = {
    _BATCH_SETTING: "trainer_config.train_interval",
    "trainer.batch_experiences_min": "trainer_config.train_interval",
    "trainer.steps_per_version": "trainer_config.update_interval",
}


class TrinityRFT:
    """Algorithm and settings of a trainer. A step trains on `batch_size` times `gradient_accumulation_steps` runs.

    Args:
        algorithm: any algorithm of the trainer; an unknown algorithm is refused by name.
        settings: settings of Headrace by dotted name. They must not contradict the other arguments.
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
            raise UsageError(
                "training_config.gradient_accumulation_steps: multiplies batch_size; set batch_size as well"
            )
        self.base = model.get("base_model")
        self.epochs = whole_number("training_config.epochs", training.get("epochs", 1))
        argument_settings: dict[str, object] = {"trainer.algorithm": algorithm}
        names = {"trainer.algorithm": "algorithm"}
        if "lora_rank" in model:
            argument_settings[_RANK_SETTING] = whole_number("model_config.lora_rank", model["lora_rank"], least=0)
            names[_RANK_SETTING] = "model_config.lora_rank"
        if "learning_rate" in training:
            argument_settings[_LEARNING_RATE_SETTING] = real_number(
                "training_config.learning_rate", training["learning_rate"]
            )
            names[_LEARNING_RATE_SETTING] = "training_config.learning_rate"
        if "batch_size" in training:
            accumulation_steps = whole_number(
                "training_config.gradient_accumulation_steps", training.get("gradient_accumulation_steps", 1)
            )
            argument_settings[_BATCH_SETTING] = (
                whole_number("training_config.batch_size", training["batch_size"]) * accumulation_steps
            )
            names[_BATCH_SETTING] = "training_config.batch_size"
        self.settings = merge_settings(argument_settings, settings or {}, names)
        self._data_dir = training.get("checkpoint_dir")
        self._exits = ExitStack()
        self._stack: Stack | None = None

    @property
    def stack(self) -> Stack:
        """The entered stack, whose settings must agree with these, or else a private stack that is attached until
        `close`.
        """
        if self._stack is None:
            self._stack = self._exits.enter_context(stack_for(self.base, self.settings, self._data_dir))
        return self._stack

    def close(self) -> None:
        self._exits.close()
        self._stack = None


class OnlineTrainer:
    """Trainer that sends the rewards of added records and waits for their training.

    It gives the agent the method `run_and_collect`.
    """

    def __init__(self, agent: Any, framework: TrinityRFT, reward_function: Rate | None = None) -> None:
        if framework.epochs != 1:
            raise UsageError(
                f"training_config.epochs = {framework.epochs}: an online trainer trains each run once; leave epochs out"
            )
        self.agent = agent
        self.framework = framework
        self.stack = framework.stack
        self.buffer: list[dict[str, Any]] = []
        self.config = SimpleNamespace(min_samples=int(self.stack.settings()["trainer.batch_experiences"]))
        """`min_samples` is the batch size of the trainer, which takes a step when it has that many runs."""
        self.version = self.stack.serving()
        """Version that the agent was last updated to."""
        self._watch = OutcomeWatch(self.stack)
        if not self.stack.is_private:  # a running stack may have long topics
            blocking(self._watch.begin())
        agent.run_and_collect = partial(run_and_collect, agent, reward_function=reward_function)

    def add_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Add a record to the buffer, and send its `total_reward` as feedback about its session.

        For a record without a reward nothing is sent: reward sources of the services must score it.
        """
        send_reward(self.stack, trajectory)
        self.buffer.append(dict(trajectory))

    def train_step(self, timeout_s: float = 600.0) -> dict[str, float]:
        """Wait until the trainer has reported the outcome of every record in the buffer and the registry has decided
        about the version.

        Then empty the buffer, and return the trainer's metrics with the numbers of trained and dropped experiences. The
        services train independently of this call.
        """
        return blocking(self._step(timeout_s))

    train = train_step

    def should_update(self) -> bool:
        """Return whether the serving version differs from the one that `update_agent_model` last returned."""
        return self.stack.serving() != self.version

    def update_agent_model(self) -> str | None:
        """Store the version that serves now as the agent's version, and return it.

        The agent's next session uses the serving version even without this call.
        """
        self.version = self.stack.serving()
        return self.version

    async def _step(self, timeout_s: float) -> dict[str, float]:
        sessions = [str(record["conversation_id"]) for record in self.buffer]
        if not sessions:
            raise UsageError("the buffer is empty; call add_trajectory first")
        outcomes = await self._watch.until_known(sessions, timeout_s)
        if unseen := [session for session, outcome in outcomes.items() if outcome.trajectory is None]:
            raise UsageError(
                f"session {unseen[0]} made no call that this trainer has seen; create the trainer before the session"
            )
        last = max(outcomes.values(), key=lambda outcome: outcome.account)
        if last.version is not None:
            await self.stack.until_decided(last.version, timeout_s)
        self.buffer.clear()
        self._watch.forget(sessions)
        if {reason for outcome in outcomes.values() for reason in outcome.dropped or ("",)} == {"foreign_version"}:
            raise UsageError(
                f"no record of the buffer was trained: the serving version {self.stack.serving()} does not belong to "
                "this trainer's lineage (a version of a job, or of another base); roll it back, or start a stack with "
                "its files as base (`headrace models export`)"
            )
        counts = {"trained": float(sum(outcome.trained for outcome in outcomes.values()))}
        counts["dropped"] = float(sum(len(outcome.dropped) for outcome in outcomes.values()))
        return {**self._watch.metrics, **counts}


class RLRuntime:
    """Trains a running agent continuously on its own calls.

    Args:
        trainer_config: `algorithm`; `train_interval`, runs of the agent between two steps; `update_interval`, steps
            between two versions; `checkpoint_dir`, data directory of a private stack; and `model_config`,
            `reward_function` and `settings` as for `TrinityRFT` and `OnlineTrainer`.
    """

    def __init__(self, agent: Any, trainer_config: Mapping[str, Any]) -> None:
        config = dict(trainer_config)
        if conflicting := next(
            (name for name in ("batch_size", "gradient_accumulation_steps") if name in config), None
        ):
            raise UsageError(
                f"trainer_config.{conflicting}: train_interval already sets the runs of a step; leave {conflicting} out"
            )
        self.agent, self._rate = agent, config.pop("reward_function", None)
        names = {setting: name for setting, name in _INTERVALS.items() if name.partition(".")[2] in config}
        runs = whole_number("trainer_config.train_interval", config.pop("train_interval", 10))
        steps = whole_number("trainer_config.update_interval", config.pop("update_interval", 100))
        intervals = {_BATCH_SETTING: runs, "trainer.batch_experiences_min": runs, "trainer.steps_per_version": steps}
        settings = merge_settings(intervals, config.pop("settings", {}), names)
        algorithm, model = str(config.pop("algorithm", "ppo")), config.pop("model_config", {})
        self.framework = TrinityRFT(algorithm, model, config, settings)
        self.trainer: OnlineTrainer | None = None

    def start(self) -> Self:
        """Replace `agent.run` until `stop`, so that each of its calls is captured and rewarded as a session and the
        trainer learns from it.
        """
        self.trainer = OnlineTrainer(self.agent, self.framework, self._rate)
        original_run = self.agent.run

        def run(text: Any) -> Any:
            self.agent.run = original_run
            try:
                return collect_run(self.agent, text, reward_function=self._rate)[1]
            finally:
                self.agent.run = replacement

        async def run_async(text: Any) -> Any:
            return await asyncio.to_thread(run, text)

        replacement = self.agent.run = run_async if asyncio.iscoroutinefunction(original_run) else run
        return self

    def stop(self) -> None:
        """Restore the agent's `run` and stop a private stack. The agent keeps `run_and_collect`."""
        self.agent.__dict__.pop("run", None)
        self.framework.close()


FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")


class DataCollector:
    """Collector of conversations. `collect_fields` selects the fields of the records."""

    def __init__(self, collect_fields: Mapping[str, bool] | None = None, reward_function: Rate | None = None) -> None:
        selected_fields = collect_fields or {}
        check_names("collect_fields", selected_fields, FIELDS)
        self.collect_fields = dict.fromkeys(FIELDS, True)
        self.collect_fields |= {
            name: yes_or_no(f"collect_fields.{name}", value) for name, value in selected_fields.items()
        }
        self._rate = reward_function

    def collect(self, agent: Any, user_input: str, user_feedback: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run one conversation and return its record.

        Args:
            user_feedback: {"rating": 1 to 5, "comment": ...}. The rating becomes the reward `user_satisfaction` =
                rating / 5. The sum of all rewards is sent as feedback about the session.
        """
        if user_feedback and not self.collect_fields["user_feedback"]:
            raise UsageError("user_feedback: collect_fields.user_feedback is False; leave one of them out")
        record = run_and_collect(agent, user_input, reward_function=self._rate, user_feedback=user_feedback)
        hidden = {name for name in FIELDS if not self.collect_fields[name]}
        return {name: value for name, value in record.items() if name not in hidden}
