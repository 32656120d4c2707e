"""A stopped engine core of vLLM ends without a reported failure."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

from headrace_inference.vllm_engine.core import LLM, Core, StartedCore


class Listening:
    """Stand-in for `vllm.v1.engine.async_llm.AsyncLLM`, whose task reports when the core's process has ended."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.said: list[str] = []
        self.output_handler = asyncio.create_task(self._handle())

    async def _handle(self) -> None:
        await asyncio.to_thread(self.gone.wait)
        self.said.append("output_handler failed")

    def shutdown(self, timeout: float | None = None) -> None:
        self.gone.set()


async def test_a_core_that_is_told_to_end_does_not_report_a_failure() -> None:
    llm = Listening()
    await asyncio.sleep(0.01)
    await Core("tiny@1", StartedCore(cast(LLM, llm), 10, 10)).stop()
    await asyncio.wait([llm.output_handler])
    assert llm.gone.is_set()
    assert llm.said == []
