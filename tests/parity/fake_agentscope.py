"""The part of AgentScope that its ReAct agent needs: the classes that a workflow uses, with a replaceable client."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


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
