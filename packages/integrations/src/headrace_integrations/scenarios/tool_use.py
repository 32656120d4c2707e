"""`ToolUseTrainer` and `ToolUseEvaluator`: rewards for the right tool, the right arguments and a successful call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.collecting import run_and_collect, send_reward
from headrace_integrations.practice.runs import part_values
from headrace_integrations.rl.training import OnlineTrainer, TrinityRFT
from headrace_integrations.stack.attaching import train_rows
from headrace_operations.arguments import score

PARTS = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}


class ToolUseTrainer:
    """Trainer for tool calls.

    With the algorithm `dpo`, `train` compares runs of one prompt in pairs. With other algorithms the services train
    continuously, and `train` waits for them.

    Args:
        reward_function: reward for each part of a tool call by its name.
        expected: function that returns {"tool", "args"} for a record, or None. A record may also contain `expected`.
        tools: names of existing tools; None accepts every name.
    """

    def __init__(
        self,
        algorithm: str,
        model_config: Mapping[str, Any] | None = None,
        reward_function: Mapping[str, float] | None = None,
        expected: Any = None,
        tools: Sequence[str] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.worth = part_values(PARTS, reward_function)
        self.algorithm, self.tools, self._expected = algorithm, tools, expected
        live = {} if algorithm == "dpo" else {"trainer.algorithm": algorithm}
        self.framework = TrinityRFT(str(live.get("trainer.algorithm", "reinforce++")), model_config, None, settings)
        if algorithm == "dpo":
            self.framework.settings.pop("trainer.algorithm")
        self.records: list[dict[str, Any]] = []
        self._online: OnlineTrainer | None = None

    def connect(self, agent: Any) -> None:
        """Give the agent the method `run_and_collect`, bound to this trainer's stack."""
        if self.algorithm == "dpo":
            _ = self.framework.stack
            agent.run_and_collect = partial(run_and_collect, agent)
        else:
            self._online = OnlineTrainer(agent, self.framework)

    def parts(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return the parts of the reward of a record by name.

        Only the first tool call counts, because it shows whether the model knew the right tool. A record without a tool
        call has the reward 0.
        """
        expected_call = record.get("expected") or (self._expected(record) if self._expected else None)
        call = next(iter(record["tool_calls"]), None)
        if call is None:
            return dict.fromkeys(PARTS, 0.0)
        is_known = self.tools is None or call["tool"] in self.tools
        is_right = is_known and (expected_call is None or call["tool"] == expected_call["tool"])
        hits = {
            "correct_tool": is_right,
            "correct_args": is_right and expected_call is not None and call["args"] == expected_call.get("args"),
            "tool_success": is_known and call["result"] is not None and not is_error(call["result"]),
            "invalid_tool": not is_known,
        }
        return {name: self.worth[name] * hit for name, hit in hits.items()}

    def add_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Compute the reward of a record, send it as feedback about the record's session, and store the record for
        `train`.
        """
        parts = self.parts(trajectory)
        record = {**trajectory, "rewards": parts, "total_reward": sum(parts.values())}
        self.records.append(record)
        if self._online is not None:
            self._online.add_trajectory(record)
        else:
            send_reward(self.framework.stack, record)

    def train(self) -> str | None:
        """Train on the added records and return the version that serves afterwards.

        Raises:
            UsageError: with `dpo`, if no two runs of one prompt have different rewards.
        """
        stack = self.framework.stack
        if self._online is not None:
            self._online.train_step()
        else:
            train_rows(stack, "dpo", pairs(self.records), settings=self.framework.settings)
        self.records.clear()
        return stack.serving()


class ToolUseEvaluator:
    """Evaluator that returns the percentages of calls with the right tool and with the right arguments."""

    def evaluate(self, agent: Any, test_cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Run the agent on test cases {"input", "tool", "args"}. The runs are not trained."""
        if not test_cases:
            raise UsageError("test_cases: must not be empty")
        counts = {"tool_accuracy": 0, "arg_accuracy": 0}
        for case in test_cases:
            record = run_and_collect(agent, str(case["input"]), purpose="eval")
            call = next(iter(record["tool_calls"]), {"tool": None, "args": None})
            counts["tool_accuracy"] += call["tool"] == case["tool"]
            counts["arg_accuracy"] += call["tool"] == case["tool"] and call["args"] == case.get("args")
        return {name: 100.0 * count / len(test_cases) for name, count in counts.items()}


def pairs(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return preference pairs, for each prompt the best run with each worse run, as whole conversations."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        prompt = next(message["content"] for message in record["messages"] if message["role"] == "user")
        by_prompt[prompt].append(record)
    result = []
    for runs in by_prompt.values():
        best = max(runs, key=lambda run: score("total_reward", run["total_reward"]))
        worse_runs = [run for run in runs if run["total_reward"] < best["total_reward"]]
        result += [{"chosen": first_answer(best), "rejected": first_answer(run)} for run in worse_runs]
    if not result:
        raise UsageError(
            "records: no two runs of one prompt have different rewards, so there is no pair; add further runs"
        )
    return result


def first_answer(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation up to and including the model's first answer, which may be a tool call.

    Two runs of the same prompt differ in this answer.
    """
    index = next(index for index, message in enumerate(record["messages"]) if message["role"] == "assistant")
    messages = [dict(message) for message in record["messages"][: index + 1]]
    if record["tool_calls"] and not messages[-1]["content"]:
        call = record["tool_calls"][0]
        function = {"name": call["tool"], "arguments": call["args"]}
        messages[-1]["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
    return messages


def is_error(result: str) -> bool:
    """Return whether the result of a tool call is an error."""
    return result.strip().lower().startswith(("error", '{"error'))
