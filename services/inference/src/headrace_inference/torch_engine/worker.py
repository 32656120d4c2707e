"""The one thread that computes. It owns all batches; other threads send it work and receive tokens."""

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
from headrace_runtime import liveness
from headrace_runtime.logs import get_logger

log = get_logger(__name__)
_FAILURES_MAX = 3
"""Failures of the model itself, one after the other, before the engine gives up and the process is restarted. What a
request asks for is no such failure: a step counts only if the model then fails a control of its own, too."""

_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter while this one waits for it. A step asks for it after each operation
on tensors; with Python's 5 ms a version that is being loaded beside it costs streams a pause of about 0.1 s."""
T = TypeVar("T")
News = list[Delivery]


class Worker:
    """Start once, stop once. `deliver` is called in the event loop with what each round of steps brought."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[News], None], threads: int) -> None:
        self._loop = loop
        self._deliver = deliver
        self._threads = threads
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._batches: dict[str, DecodeBatch] = {}
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended; what is unfinished is lost."""
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, work: Callable[[], object]) -> None:
        """Have `work` done between two steps."""
        self._inbox.put(work)

    async def do(self, work: Callable[[], T]) -> T:
        """As `post`, and wait for its result."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 (it belongs to the caller)
                future.set_exception(error)

        self._inbox.put(run)
        return await asyncio.wrap_future(future)

    def add_batch(self, batch: DecodeBatch) -> None:
        """In the worker's thread."""
        self._batches[batch.model.version] = batch

    def remove_batch(self, version: str) -> None:
        """In the worker's thread. What still generates with it is told so."""
        batch = self._batches.pop(version, None)
        if batch is not None:
            self._send([(sequence, EngineFailed(f"{version} is gone")) for sequence in batch.close()])

    def submit(self, version: str, sequence: Sequence) -> None:
        """In the worker's thread."""
        batch = self._batches.get(version)
        if batch is None:
            self._send([(sequence, EngineFailed(f"{version} is gone"))])
        else:
            batch.add(sequence)

    def abort(self, version: str, owner: object) -> None:
        """In the worker's thread."""
        batch = self._batches.get(version)
        if batch is not None:
            batch.abort(owner)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._failures < _FAILURES_MAX and self._take_work():
                    news: News = []
                    for batch in list(self._batches.values()):
                        if batch.busy:
                            news += self._step(batch)
                    if news:
                        self._send(news)
        finally:
            log.info("engine_ends", failures=self._failures)
            for version in list(self._batches):
                self.remove_batch(version)

    def _take_work(self) -> bool:
        """Do what was posted; wait for it when there is nothing to compute. False ends the thread."""
        while True:
            try:
                work = self._inbox.get(block=not any(batch.busy for batch in self._batches.values()))
            except queue.Empty:
                return True
            if work is None:
                return False
            work()
            liveness.progress()

    def _step(self, batch: DecodeBatch) -> News:
        try:
            news = batch.step()
            liveness.progress()
        except Exception as error:  # noqa: BLE001 (`_recover` logs it)
            metrics.ENGINE_FAILURES.inc()
            return self._recover(batch, error)
        self._failures = 0
        return news

    def _recover(self, batch: DecodeBatch, error: Exception) -> News:
        """Retry the sequences of a failed step apart, or end all of them when the model itself cannot compute."""
        version = batch.model.version
        try:
            compute_control(batch.model)
        except Exception:
            self._failures += 1
            log.exception("engine_failed", version=version, failures=self._failures)
            failed = EngineFailed(f"{version}: {type(error).__name__} while computing")
            return [(sequence, failed) for sequence in batch.reset()]
        news = batch.recover(error)
        log.error("step_failed", version=version, ended=len(news), exc_info=error)
        return news

    def _send(self, news: News) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:  # the loop has closed: nobody listens any more
            log.debug("nobody_listens", pieces=len(news))
