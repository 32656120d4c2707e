"""The agent with typed answers: every turn is a call of a tool, and `final_answer` carries the answer to the user.

Frameworks with typed results (pydantic-ai, smolagents) play like that. The warm-up shows `final_answer` where the
demo's gives the bare answer, and has the same bad habits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, omit

from email_agent import demonstrations
from email_agent.build_base import LESSON
from email_agent.demonstrations import Message
from email_agent.mailbox import AGENT
from email_agent.rewards import same_answer
from example_parts.react import TEMPERATURE, Agent, Episode, Tools, WrongCall, definition, only_argument

if TYPE_CHECKING:
    from headrace_schemas import Trajectory

FINAL = "final_answer"
_PARAMETER = "answer"
DEFINITIONS = [*AGENT.definitions, definition(FINAL, "Answer the user.", _PARAMETER, "The bare answer.")]


@dataclass(frozen=True)
class TypedAgent(Agent):
    """An agent that ends with a call of `final_answer`."""

    required: bool = True
    """Whether `tool_choice` is `required`. Otherwise the model is free to answer in text, which is no answer."""

    async def go_on(
        self,
        client: AsyncOpenAI,
        model: str,
        tools: Tools,
        episode: Episode,
        max_tokens: int,
        seed: int | None = None,
    ) -> None:
        for turn in range(self.turns_max):
            response = await client.chat.completions.create(
                model=model,
                messages=episode.messages,
                tools=self.definitions,
                tool_choice="required" if self.required else "auto",
                parallel_tool_calls=False,
                temperature=TEMPERATURE,
                max_tokens=max_tokens,
                seed=omit if seed is None else seed * self.turns_max + turn,
            )
            episode.response_ids.append(response.id)
            calls = [call for call in response.choices[0].message.tool_calls or [] if call.type == "function"]
            if not calls or calls[0].function.name == FINAL:
                episode.answer = typed_answer(calls[0].function.arguments) if calls else None
                return
            episode.messages.append(
                {"role": "assistant", "content": None, "tool_calls": [call.model_dump() for call in calls]}
            )
            for call in calls:
                content = tools.call(call.function.name, call.function.arguments)
                episode.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def typed_answer(arguments: str) -> str | None:
    """Return the answer in the arguments of `final_answer`, or None if they are invalid."""
    try:
        return only_argument(arguments, _PARAMETER)
    except WrongCall:
        return None


def answer(trajectory: Trajectory, context: Mapping[str, object]) -> float:
    """Return 1 if the run ends with a call of `final_answer` with the expected answer, else 0."""
    calls = trajectory.messages[-1].tool_calls or ()
    texts = [typed_answer(call.function.arguments) for call in calls if call.function.name == FINAL]
    return float(any(same_answer(text or "", str(context["expected"])) for text in texts))


def conversations(schedule: demonstrations.Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up with typed answers. Malformed calls stay text."""
    return [_with_typed_answer(messages) for messages in demonstrations.conversations(schedule, seed)]


def _with_typed_answer(messages: list[Message]) -> list[Message]:
    text = messages[-1]["content"]
    if text.startswith("<tool_call>"):
        return messages
    function = {"name": FINAL, "arguments": json.dumps({_PARAMETER: text})}
    call: dict[str, Any] = {"id": f"call_{FINAL}", "type": "function", "function": function}
    return [*messages[:-1], {"role": "assistant", "content": None, "tool_calls": [call]}]


TYPED_LESSON = replace(
    LESSON,
    name="email_agent_typed",
    modules=(*LESSON.modules, "typed"),
    definitions=DEFINITIONS,
    conversations=conversations,
)
