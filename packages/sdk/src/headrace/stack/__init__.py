"""A Headrace to work with from a program: one that runs, or a private one that ends with its `with`.

    with attach(base="models/base", settings={"trainer.algorithm": "grpo"}) as stack:
        ...

What is below (`headrace.practice`, `headrace.evaluation`, the adapters) takes a `Stack`, or uses the innermost one that
was entered (`current`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_schemas.lazy import lazily

if TYPE_CHECKING:
    from headrace.stack.attaching import attach, current, stack_for
    from headrace.stack.connection import Addresses, Stack
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "headrace.stack.attaching": ("attach", "current", "stack_for"),
            "headrace.stack.connection": ("Addresses", "Stack"),
        },
    )

__all__ = ["Addresses", "Stack", "attach", "current", "stack_for"]
