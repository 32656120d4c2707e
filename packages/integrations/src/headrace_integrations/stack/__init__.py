"""Attach a program to a Headrace stack: a running stack, or a private stack that ends with its `with` statement.

    with attach(base="models/base", settings={"trainer.algorithm": "grpo"}) as stack:
        ...

`headrace.practice`, `headrace.evaluation` and the adapters take a `Stack`, or use the innermost entered stack
(`current`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazy_exports

if TYPE_CHECKING:
    from headrace_integrations.stack.attaching import attach, current, stack_for
    from headrace_integrations.stack.connection import Addresses, Stack
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "headrace_integrations.stack.attaching": ("attach", "current", "stack_for"),
            "headrace_integrations.stack.connection": ("Addresses", "Stack"),
        },
    )

__all__ = ["Addresses", "Stack", "attach", "current", "stack_for"]
