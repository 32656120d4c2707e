"""Agents of other people: asked in whatever way they are asked, with their own OpenAI client led to Headrace.

Nothing of theirs is imported. An agent has an OpenAI client as `client`, `model.client` or `llm.client`, or a method
`connect(base_url, headers, model)`; it answers `run(text)` or `reply(text)`, or is called itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from headrace.errors import UsageError

T = TypeVar("T")
_WAYS = ("run", "reply", "__call__")


@contextmanager
def plugged(agent: Any, base_url: str, headers: Mapping[str, str], model: str, api_key: str | None) -> Iterator[None]:
    """While the body runs, the agent's calls go to `base_url` with these headers and name `model`. One body at a time
    for each agent. Raises `UsageError` for an agent that has no client."""
    connect = getattr(agent, "connect", None)
    if callable(connect):
        own = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connect(base_url=base_url, headers={**headers, **own}, model=model)
        yield
        return
    holder = _holder(agent)
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


async def asked(agent: Any, text: Any) -> Any:
    """The agent's answer. One that does not await is asked in a thread."""
    way = next((name for name in _WAYS if callable(getattr(agent, name, None))), None)
    if way is None:
        raise UsageError(f"{type(agent).__name__} has no run(text) or reply(text), and is no function")
    call: Callable[[Any], Any] = agent if way == "__call__" else getattr(agent, way)
    awaits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    found = call(text) if awaits else await asyncio.to_thread(call, text)
    return await found if inspect.isawaitable(found) else found


def text_of(answer: Any) -> str:
    """The text of an answer: of a string, or of a message with `get_text_content()` or `content`."""
    reader = getattr(answer, "get_text_content", None)
    found = reader() if callable(reader) else getattr(answer, "content", answer)
    return found if isinstance(found, str) else "" if found is None else str(found)


def in_thread(work: Callable[[], T | Awaitable[T]]) -> Awaitable[T]:
    """A function's result, off the event loop; one that turns out to be awaitable is awaited here."""

    async def done() -> T:
        found: Any = await asyncio.to_thread(work)
        result: T = await found if inspect.isawaitable(found) else found
        return result

    return done()


def _holder(agent: Any) -> Any:
    for name in ("", "model", "llm"):
        one = getattr(agent, name, None) if name else agent
        if one is not None and hasattr(getattr(one, "client", None), "with_options"):
            return one
    raise UsageError(
        f"{type(agent).__name__} has no OpenAI client as client, model.client or llm.client, and no method connect(); "
        "give it one of them"
    )
