"""`LoopThread`: an event loop beside the program's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 30.0


class LoopThread:
    """A loop that a thread of its own runs until `close`, or until the program ends. What blocks is done by at most
    `workers` further threads; without a number, by as many as asyncio has it."""

    def __init__(self, name: str, workers: int | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        if workers is not None:
            self.loop.set_default_executor(ThreadPoolExecutor(workers, thread_name_prefix=name))
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for it. Never to be called on the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Nothing that was not awaited goes on. Threads that block end when they do."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_S)
        if not self.loop.is_running():
            self.loop.close()
