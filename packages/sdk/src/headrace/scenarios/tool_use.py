"""`ToolUseTrainer` and `ToolUseEvaluator`: is the right tool called, with the right arguments, and does the call
work?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import score
from headrace.practice.collecting import run_and_collect, say
from headrace.practice.runs import worth_of
from headrace.rl.training import OnlineTrainer, TrinityRFT
from headrace.stack.offline import train_rows

PARTS = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}


class ToolUseTrainer:
    """`reward_function`: what each part of a tool call is worth. `expected(record)` returns {"tool", "args"} for a
    record, or None; a record may have `expected` itself. `tools`: names that exist; None takes every name for one.

    With the algorithm `dpo`, `train` compares runs of one prompt in pairs. With others the services train by
    themselves, and `train` waits for it.
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
        self.worth = worth_of(PARTS, reward_function)
        self.algorithm, self.tools, self._expected = algorithm, tools, expected
        live = {} if algorithm == "dpo" else {"trainer.algorithm": algorithm}
        self.framework = TrinityRFT(str(live.get("trainer.algorithm", "reinforce++")), model_config, None, settings)
        if algorithm == "dpo":
            self.framework.settings.pop("trainer.algorithm")
        self.records: list[dict[str, Any]] = []
        self._online: OnlineTrainer | None = None

    def connect(self, agent: Any) -> None:
        """Give the agent `run_and_collect`, on this trainer's stack."""
        if self.algorithm == "dpo":
            _ = self.framework.stack
            agent.run_and_collect = partial(run_and_collect, agent)
        else:
            self._online = OnlineTrainer(agent, self.framework)

    def parts(self, record: Mapping[str, Any]) -> dict[str, float]:
        """The reward by part: of the first call, which shows whether the model knew what to do. No call earns
        nothing."""
        wanted = record.get("expected") or (self._expected(record) if self._expected else None)
        call = next(iter(record["tool_calls"]), None)
        if call is None:
            return dict.fromkeys(PARTS, 0.0)
        known = self.tools is None or call["tool"] in self.tools
        right = known and (wanted is None or call["tool"] == wanted["tool"])
        hits = {
            "correct_tool": right,
            "correct_args": right and wanted is not None and call["args"] == wanted.get("args"),
            "tool_success": known and call["result"] is not None and not failed(call["result"]),
            "invalid_tool": not known,
        }
        return {name: self.worth[name] * hit for name, hit in hits.items()}

    def add_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Reward the record, send the total as feedback about its session, and keep it for `train`."""
        parts = self.parts(trajectory)
        record = {**trajectory, "rewards": parts, "total_reward": sum(parts.values())}
        self.records.append(record)
        if self._online is not None:
            self._online.add_trajectory(record)
        else:
            say(self.framework.stack, record)

    def train(self) -> str | None:
        """Returns the version that serves then. With `dpo`, raises `UsageError` when no two runs of a prompt differ."""
        stack = self.framework.stack
        if self._online is not None:
            self._online.train_step()
        else:
            train_rows(stack, "dpo", pairs(self.records), settings=self.framework.settings)
        self.records.clear()
        return stack.serving()


class ToolUseEvaluator:
    """Shares of right tools and right argument sets, in percent."""

    def evaluate(self, agent: Any, test_cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Each case is {"input", "tool", "args"}. Nothing of it is trained."""
        if not test_cases:
            raise UsageError("there are no test cases")
        right = {"tool_accuracy": 0, "arg_accuracy": 0}
        for case in test_cases:
            record = run_and_collect(agent, str(case["input"]), purpose="eval")
            call = next(iter(record["tool_calls"]), {"tool": None, "args": None})
            right["tool_accuracy"] += call["tool"] == case["tool"]
            right["arg_accuracy"] += call["tool"] == case["tool"] and call["args"] == case.get("args")
        return {name: 100.0 * count / len(test_cases) for name, count in right.items()}


def pairs(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of the runs of each prompt the best against each that is worse, as whole conversations."""
    by_prompt: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        asked = next(one["content"] for one in record["messages"] if one["role"] == "user")
        by_prompt[asked].append(record)
    found = []
    for same in by_prompt.values():
        best = max(same, key=lambda one: score("total_reward", one["total_reward"]))
        worse = [one for one in same if one["total_reward"] < best["total_reward"]]
        found += [{"chosen": first_answer(best), "rejected": first_answer(one)} for one in worse]
    if not found:
        raise UsageError("no two runs of one prompt have different rewards, so there is no pair to learn from")
    return found


def first_answer(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation up to the model's first answer, its tool call included: what two runs of a prompt differ in."""
    at = next(place for place, one in enumerate(record["messages"]) if one["role"] == "assistant")
    messages = [dict(one) for one in record["messages"][: at + 1]]
    if record["tool_calls"] and not messages[-1]["content"]:
        call = record["tool_calls"][0]
        function = {"name": call["tool"], "arguments": call["args"]}
        messages[-1]["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
    return messages


def failed(result: str) -> bool:
    return result.strip().lower().startswith(("error", '{"error'))
