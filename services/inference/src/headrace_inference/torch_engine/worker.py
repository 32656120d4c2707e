"""The worker thread of the `torch` engine, in which all computation runs.

It owns all batches; other threads post work to it, and it delivers tokens to the event loop.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from headrace_inference import metrics
from headrace_inference.errors import EngineFailed
from headrace_inference.torch_engine.batch import DecodeBatch, Delivery
from headrace_inference.torch_engine.probe import compute_control
from headrace_inference.torch_engine.sequence import Sequence
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger

log = get_logger(__name__)
_FAILURES_MAX = 3
"""Consecutive failures of the model after which the engine stops and the process is restarted. A failed step counts
only if the model fails a control computation, too, so that requests alone cannot stop the engine."""

_SWITCH_S = 0.0005
"""Longest time that another thread may keep the interpreter while this one waits. A step needs the interpreter after
each tensor operation. With Python's default of 5 ms, loading a version would pause streams for about 0.1 s."""
T = TypeVar("T")


class Worker:
    """Thread that runs the steps of all batches. Start and stop it once.

    Args:
        deliver: called in the event loop with the deliveries of each round of steps.
        threads: CPU threads per operator.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[Delivery]], None], threads: int
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._threads = threads
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._batches: dict[str, DecodeBatch] = {}
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and shorten Python's thread switch interval so that the event loop stays responsive."""
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end. Unfinished sequences fail."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` in the thread between two steps."""
        self._inbox.put(work)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread between two steps, and return its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 (the caller gets it)
                future.set_exception(error)

        self._inbox.put(run)
        return await asyncio.wrap_future(future)

    def add_batch(self, batch: DecodeBatch) -> None:
        """Add the batch of a version. Call it in the worker's thread."""
        self._batches[batch.model.version] = batch

    def remove_batch(self, version: str) -> None:
        """Stop serving a version: remove its batch of running sequences, which fail with `EngineFailed`. Call it in the
        worker's thread.
        """
        batch = self._batches.pop(version, None)
        if batch is not None:
            self._send([(sequence, EngineFailed(f"{version} was unloaded")) for sequence in batch.close()])

    def submit(self, version: str, sequence: Sequence) -> None:
        """Add a sequence to the batch of its version. Call it in the worker's thread."""
        batch = self._batches.get(version)
        if batch is None:
            self._send([(sequence, EngineFailed(f"{version} was unloaded"))])
        else:
            batch.add(sequence)

    def abort(self, version: str, owner: object) -> None:
        """Remove every sequence of a generation. Call it in the worker's thread."""
        batch = self._batches.get(version)
        if batch is not None:
            batch.abort(owner)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._failures < _FAILURES_MAX and self._take_work():
                    deliveries: list[Delivery] = []
                    for batch in list(self._batches.values()):
                        if batch.is_busy:
                            deliveries += self._step(batch)
                    if deliveries:
                        self._send(deliveries)
        finally:
            log.info("engine_ends", failures=self._failures)
            for version in list(self._batches):
                self.remove_batch(version)

    def _take_work(self) -> bool:
        """Run posted work, and wait for it if there is nothing to compute. Return False if the thread must end."""
        while True:
            try:
                work = self._inbox.get(block=not any(batch.is_busy for batch in self._batches.values()))
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            liveness.progress()

    def _step(self, batch: DecodeBatch) -> list[Delivery]:
        try:
            deliveries = batch.step()
            liveness.progress()
        except Exception as error:  # noqa: BLE001 (`_recover` logs it)
            metrics.ENGINE_FAILURES.inc()
            return self._recover(batch, error)
        self._failures = 0
        return deliveries

    def _recover(self, batch: DecodeBatch, error: Exception) -> list[Delivery]:
        """Let the batch retry the sequences of a failed step, or fail all of them if the model itself cannot
        compute."""
        version = batch.model.version
        try:
            compute_control(batch.model)
        except Exception:
            self._failures += 1
            log.exception("engine_failed", version=version, failures=self._failures)
            failed = EngineFailed(f"{version}: {type(error).__name__} while computing")
            return [(sequence, failed) for sequence in batch.reset()]
        deliveries = batch.recover(error)
        log.error("step_failed", version=version, ended=len(deliveries), exc_info=error)
        return deliveries

    def _send(self, deliveries: list[Delivery]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, deliveries)
        except RuntimeError:  # the loop has closed, so no reader is left
            log.debug("nobody_listens", pieces=len(deliveries))
