"""Headrace makes an agent get better from its own traffic.

from headrace import Client
from openai import OpenAI

client = Client("http://127.0.0.1:8000")
with client.session(task_id="invoices") as session:
    llm = OpenAI(base_url=session.base_url, api_key="-", default_headers=session.headers)
    ...  # the agent, unchanged
    session.feedback(1.0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.async_client import AsyncClient, AsyncSession
    from headrace.client import Client, Session
    from headrace.errors import ApiError, HeadraceError, Unreachable
    from headrace.manager import ModelManager

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncSession",
    "Client",
    "HeadraceError",
    "ModelManager",
    "Session",
    "Unreachable",
]

_HOMES = {
    "ApiError": "headrace.errors",
    "AsyncClient": "headrace.async_client",
    "AsyncSession": "headrace.async_client",
    "Client": "headrace.client",
    "HeadraceError": "headrace.errors",
    "ModelManager": "headrace.manager",
    "Session": "headrace.client",
    "Unreachable": "headrace.errors",
}


def __getattr__(name: str) -> object:
    """The public names, imported when they are asked for: `headrace --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
