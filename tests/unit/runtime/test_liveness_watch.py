"""Silence counts while the watcher runs."""

from __future__ import annotations

import os

from headrace_runtime.process.liveness import LivenessWatch


def test_silence_that_nobody_watched_does_not_count() -> None:
    watch = LivenessWatch()
    writing = os.dup(watch.open())
    watch.started(0.0)
    watch.poll(1.0)
    assert (watch.silent_s, watch.beats) == (1.0, False)
    watch.poll(3600.0)
    assert watch.silent_s < 10.0, "the watcher was away, or the machine asleep"
    os.write(writing, b"..")
    watch.poll(3601.0)
    assert (watch.silent_s, watch.beats) == (0.0, True)
    watch.poll(3602.0)
    assert watch.silent_s == 1.0
    os.close(writing)
    watch.poll(3603.0)
    assert (watch.silent_s, watch.ended) == (2.0, True), "an end that is closed says nothing"
    watch.close()
