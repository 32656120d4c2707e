"""Count of the operations of a piece of work, which does not depend on the speed of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(work: Callable[[], object]) -> int:
    """Run `work`, and return the number of bytecode instructions that it executes in this thread.

    Work inside of one instruction, such as a copy of a set, counts as one.
    """
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
