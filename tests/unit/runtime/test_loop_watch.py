"""Work that blocks an event loop is measured on a busy machine too; work in threads is not.

Garbage collection of a service: imports are exempt, and new objects are collected rarely.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from prometheus_client import REGISTRY

from headrace_runtime.process.loop_watch import INTERVAL_S, LoopWatch, watch_loop
from headrace_runtime.process.worker_threads import WorkerThreads
from tests.support.loop_block import blocked


def compute(cpu_s: float) -> str:
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        pass
    return threading.current_thread().name


async def test_one_long_callback_is_seen_and_many_short_ones_are_none() -> None:
    async with blocked() as block:
        compute(0.15)
    assert block.busy_s >= 0.15
    async with blocked() as block:
        for _ in range(30):
            compute(0.005)
            await asyncio.sleep(0)
    assert block.busy_s < 0.1


async def test_no_garbage_is_collected_in_a_measured_block() -> None:
    def collections() -> int:
        return sum(generation["collections"] for generation in gc.get_stats())

    before = collections()
    async with blocked():
        lists = [[number] for number in range(100_000)]
        assert collections() == before
    lists += [[number] for number in range(100_000)]
    assert collections() > before


async def test_work_on_much_is_done_beside_the_loop() -> None:
    threads = WorkerThreads(1, inline_bytes=10)
    try:
        async with blocked() as block:
            names = [await threads.run(size, lambda: compute(0.15)) for size in (11, 10_000_000)]
        assert block.busy_s < 0.1
        assert len({*names, threading.current_thread().name}) == 3, "what is large has a thread of its own"
        assert await threads.run(10, lambda: compute(0)) == threading.current_thread().name
        with pytest.raises(ZeroDivisionError):
            await threads.run(11, lambda: 1 // 0)
    finally:
        threads.close()


async def test_the_longest_block_is_a_metric_and_forgotten_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_runtime.process.loop_watch._WINDOW_S", 0.05)
    watch = LoopWatch(0.001)
    running = asyncio.create_task(watch.run())

    def gauge() -> float:
        return REGISTRY.get_sample_value("headrace_event_loop_block_seconds", {"kind": "busy"}) or 0.0

    await asyncio.sleep(0)
    compute(0.2)
    await asyncio.sleep(0.02)
    assert gauge() >= 0.2
    async with asyncio.timeout(30):
        while gauge() >= 0.2:  # noqa: ASYNC110 (a gauge tells nobody)
            await asyncio.sleep(0.01)
    running.cancel()


async def test_a_service_is_watched_as_long_as_it_runs() -> None:
    async def work() -> None:
        assert "loop-watch" in {task.get_name() for task in asyncio.all_tasks()}

    await watch_loop(work())
    await asyncio.sleep(0)
    assert "loop-watch" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize("seed", range(3))
async def test_watch_at_its_own_interval_sees_each_block_and_wakes_the_loop_seldom(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    watch = LoopWatch()
    running = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    for _ in range(5):  # wherever in the interval a block begins and ends
        await asyncio.sleep(chance.uniform(0.0, INTERVAL_S / 4))
        watch.take("busy"), watch.take("late")
        block_s = chance.uniform(0.05, INTERVAL_S / 2)
        compute(block_s)
        await asyncio.sleep(0.001)
        assert block_s <= watch.take("busy") < block_s + 0.05
        assert watch.take("late") >= block_s
        time.sleep(block_s)  # noqa: ASYNC251 (a call that blocks is what is to be seen)
        await asyncio.sleep(0.001)
        assert watch.take("busy") < 0.05
        assert watch.take("late") >= block_s * 0.8
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    await asyncio.sleep(4 * INTERVAL_S)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before <= 8
    running.cancel()


async def test_watches_of_one_loop_end_in_any_order_and_leave_its_selector_as_it_was() -> None:
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = selector.select
    watches = [LoopWatch() for _ in range(3)]
    running = [asyncio.create_task(watch.run()) for watch in watches]
    await asyncio.sleep(0)
    for number in (0, 2, 1):
        running[number].cancel()
        await asyncio.gather(running[number], return_exceptions=True)
        compute(0.06)
        await asyncio.sleep(0.001)
        seen = [watch.take() >= 0.06 for watch in watches]
        assert seen == [not task.done() for task in running]
    assert selector.select == select


PROGRAM = """
import gc, json, resource, weakref
from headrace_runtime.main import GARBAGE_THRESHOLD, tune_garbage_collection

class Cycle:
    def __init__(self):
        self.me = self
        self.payload = bytearray(256)

passes = []
gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if phase == "start" else None)

def work(rounds):
    passes.clear()
    for _ in range(rounds):
        Cycle()
    return len(passes)

untuned = work(500_000)
imported = len(gc.get_objects())
tune_garbage_collection(GARBAGE_THRESHOLD)
left = len(gc.get_objects())
tuned = work(500_000)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
work(2_000_000)
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
last = weakref.ref(Cycle())
gc.collect()
print(json.dumps([untuned, tuned, imported, left, growth, last() is None]))
"""


def test_service_collects_seldom_and_keeps_its_memory_bounded_through_two_million_cycles() -> None:
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True, capture_output=True, text=True
    ).stdout
    untuned, tuned, imported, left, growth_kib, collected = json.loads(output)
    assert tuned * 20 < untuned, "collections for the same work"
    assert left * 20 < imported, "objects that a collection looks at"
    assert growth_kib < 64 * 1024, "garbage waits for the threshold and no longer"
    assert collected
