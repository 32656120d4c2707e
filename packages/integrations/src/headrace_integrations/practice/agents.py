"""Call agents of any framework, with their own OpenAI client redirected to Headrace.

No framework is imported. An agent has an OpenAI client as `client`, `model.client` or `llm.client`, or a method
`connect(base_url, headers, model)`. It has a method `run(text)` or `reply(text)`, or is a function.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from headrace.errors import UsageError

T = TypeVar("T")
_METHODS = ("run", "reply", "__call__")


@contextmanager
def plugged(agent: Any, base_url: str, headers: Mapping[str, str], model: str, api_key: str | None) -> Iterator[None]:
    """Redirect the agent's calls to `base_url`, with these headers and this model name, while the body runs.

    Only one body may be active for each agent. Raises `UsageError` for an agent without a client.
    """
    connect = getattr(agent, "connect", None)
    if callable(connect):
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connect(base_url=base_url, headers={**headers, **authorization}, model=model)
        yield
        return
    holder = _client_holder(agent)
    before = {name: getattr(holder, name) for name in ("client", "model_name") if hasattr(holder, name)}
    if holder is agent and isinstance(getattr(agent, "model", None), str):
        before["model"] = agent.model
    holder.client = holder.client.with_options(base_url=base_url, api_key=api_key or "-", default_headers=dict(headers))
    for name in before.keys() - {"client"}:
        setattr(holder, name, model)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


async def call_agent(agent: Any, text: Any) -> Any:
    """Call the agent with a text and return its answer. An agent that is not async is called in a thread."""
    method = next((name for name in _METHODS if callable(getattr(agent, name, None))), None)
    if method is None:
        raise UsageError(f"{type(agent).__name__} must have a method run(text) or reply(text), or be callable")
    call: Callable[[Any], Any] = agent if method == "__call__" else getattr(agent, method)
    awaits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    answer = call(text) if awaits else await asyncio.to_thread(call, text)
    return await answer if inspect.isawaitable(answer) else answer


asked = call_agent
"""Earlier name of `call_agent`."""


def text_of(answer: Any) -> str:
    """Return the text of an answer, which is a string or a message with `get_text_content()` or `content`."""
    reader = getattr(answer, "get_text_content", None)
    text = reader() if callable(reader) else getattr(answer, "content", answer)
    return text if isinstance(text, str) else "" if text is None else str(text)


def run_in_thread(work: Callable[[], T | Awaitable[T]]) -> Awaitable[T]:
    """Call a function in a thread and return its result. An awaitable result is awaited on the event loop."""

    async def call() -> T:
        returned: Any = await asyncio.to_thread(work)
        result: T = await returned if inspect.isawaitable(returned) else returned
        return result

    return call()


def _client_holder(agent: Any) -> Any:
    for name in ("", "model", "llm"):
        holder = getattr(agent, name, None) if name else agent
        if holder is not None and hasattr(getattr(holder, "client", None), "with_options"):
            return holder
    raise UsageError(
        f"{type(agent).__name__} has no OpenAI client as client, model.client or llm.client, and no method connect(); "
        "give it one of them"
    )
