"""Client library of Headrace, which trains an agent's model on the agent's own traffic.

from headrace import Client
from openai import OpenAI

client = Client("http://127.0.0.1:8000")
with client.session(task_id="invoices") as session:
    llm = OpenAI(base_url=session.base_url, api_key="-", default_headers=session.headers)
    ...  # the agent, unchanged
    session.feedback(1.0)
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

__version__ = "0.2.0"
__path__ = extend_path(__path__, __name__)
"""Folders of the package: in a checkout, the modules of headrace-integrations are in a folder of their own."""

if TYPE_CHECKING:
    from headrace.async_client import AsyncClient, AsyncSession
    from headrace.client import Client, Session
    from headrace.errors import ApiError, HeadraceError, Unreachable
    from headrace.rollouts import ModelManager
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace.async_client": ("AsyncClient", "AsyncSession"),
            "headrace.client": ("Client", "Session"),
            "headrace.errors": ("ApiError", "HeadraceError", "Unreachable"),
            "headrace.rollouts": ("ModelManager",),
        },
    )

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
