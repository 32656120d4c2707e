"""`LoopThread`: an event loop in a background thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_END_S = 30.0


class LoopThread:
    """Event loop in a thread of its own, which runs until `close` or the end of the program.

    Args:
        workers: number of threads for blocking functions; by default asyncio's own number.
    """

    def __init__(self, name: str, workers: int | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        if workers is not None:
            self.loop.set_default_executor(ThreadPoolExecutor(workers, thread_name_prefix=name))
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result. Must not be called on the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def close(self) -> None:
        """Stop the loop. Coroutines that are not awaited are abandoned, and blocked threads end with their
        functions."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_END_S)
        if not self.loop.is_running():
            self.loop.close()
