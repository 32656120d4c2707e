"""Planted reasons for missing training on running stacks: the page Why has to name each reason within ten seconds."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from tests.console.stack import BATCHES, MODEL, ConsoleStack, console_stack
from tests.support.fake_llm import FakeLLM, status
from tests.support.machine import SmallDisk
from tests.support.processes import wait_until
from tests.system.program import Line

NAMED_S_MAX = 10.0
_EFFECT_S_MAX = 60.0
_TRAINS = r"Experiences are being trained"
_GATE = """
import json, pathlib, sys, time
print(json.dumps({"gate": ["t"], "audit": ["a"]}), flush=True)
first, hold = map(pathlib.Path, sys.argv[1:])
for line in sys.stdin:
    play = json.loads(line)
    if not first.exists():  # the audit of the first version comes before any trial
        first.write_text(play["version"])
    while hold.exists():
        time.sleep(0.05)
    print(json.dumps(play | {"score": float(play["version"] == first.read_text())}), flush=True)
"""
"""Program of the gate: the first version always succeeds, every other version fails. The program waits for a file to be
removed.
"""


@dataclass(frozen=True)
class Why:
    """A reader of the page Why, logged in."""

    stack: ConsoleStack
    http: httpx2.Client

    def page(self) -> tuple[str, str]:
        """Return the answer on the page and its figures, without HTML tags."""
        reply = self.http.get("/flow", headers={"hx-request": "true"})
        assert reply.status_code == 200, reply.text
        answer, _, numbers = " ".join(re.sub(r"<[^>]*>", " ", reply.text).split()).partition("The numbers behind it")
        return answer, numbers

    def text(self) -> str:
        """Return the answer of the page."""
        return self.page()[0]

    def runs_to_batch(self) -> int:
        """Return the number of runs that complete the trainer's batch."""
        waiting = re.search(r"experiences that wait for a batch ([0-9]+)", self.page()[1])
        assert waiting is not None
        return 4 - int(waiting[1]) % 4


Act = Callable[["Why", contextlib.ExitStack], None]
"""Function that plants a reason. The page is read afterwards, then the callbacks on the exit stack undo the change."""


@dataclass(frozen=True)
class Plant:
    """A planted reason for missing training, and the sentence with which the page must name it."""

    cause: str
    fault: str
    sentence: str
    act: Act
    stalls: bool = False
    """Whether the page names the reason only once training counts as stalled; the ten seconds then start at that time.
    """


@dataclass(frozen=True)
class Scene:
    """Settings of one stack, and the reasons that are planted on it in sequence."""

    settings: dict[str, object]
    plants: tuple[Plant, ...]
    serves: bool = True
    """Whether the first version must be in service before the first reason is planted."""
    is_small_disk: bool = False
    without: tuple[str, ...] = field(default=())


def _calls(count: int, task: str, **options: object) -> Act:
    def act(why: Why, _undo: contextlib.ExitStack) -> None:
        for number in range(count):
            why.stack.call(f"{task} {number}", **options)  # type: ignore[arg-type]

    return act


def _nothing(_why: Why, _undo: contextlib.ExitStack) -> None:
    """Plant no reason, because the settings of the stack already contain it."""


def _stopped(service: str) -> Act:
    def act(why: Why, undo: contextlib.ExitStack) -> None:
        pid = why.stack.supervisor.pids[service]
        os.kill(pid, signal.SIGSTOP)
        undo.callback(os.kill, pid, signal.SIGCONT)

    return act


def _training(why: Why, _undo: contextlib.ExitStack) -> None:
    """Let the trainer use all waiting experiences in a step, after which the page may name no earlier reason."""
    for number in range(why.runs_to_batch()):
        why.stack.call(f"task {number % 2}")
    wait_until(lambda: re.search(_TRAINS, why.text()), _EFFECT_S_MAX, "the stack trains again")


def _singles(why: Why, _undo: contextlib.ExitStack) -> None:
    """Play tasks with a single run each."""
    for number in range(why.runs_to_batch()):
        why.stack.call(f"single {number}")


def _after_training(act: Act) -> Act:
    def trained_first(why: Why, undo: contextlib.ExitStack) -> None:
        _training(why, undo)
        act(why, undo)

    return trained_first


def _garbage(why: Why, _undo: contextlib.ExitStack) -> None:
    """Send more invalid records in a row to the scorer than it refuses for the stack's only tenant before it pauses."""
    why.stack.send_garbage(20)


def _unfinished(why: Why, undo: contextlib.ExitStack) -> None:
    undo.callback(why.stack.end, why.stack.call("open", ends=False)[0])


def _unrewarded(why: Why, undo: contextlib.ExitStack) -> None:
    for number in range(2):
        session, _ = why.stack.call(f"task {number}")
        undo.callback(why.stack.feedback, session, 0.5)


def _stale(why: Why, _undo: contextlib.ExitStack) -> None:
    """Train a version that does not become champion, then make calls that the first version answers."""
    with why.stack.registry() as registry:
        registry.pause(MODEL, reason="so that the first version goes on")
    wait_until(lambda: why.runs_to_batch() == 2, _EFFECT_S_MAX, "the two runs that got feedback wait for a batch")
    for number in range(2):
        why.stack.call(f"task {number}", value=number / 4)
    wait_until(lambda: re.search(_TRAINS, why.text()), _EFFECT_S_MAX, "the first step is taken")
    for number in range(4):
        why.stack.call(f"task {number}", value=number / 4)


def _gated(folder: Path) -> Act:
    def act(why: Why, _undo: contextlib.ExitStack) -> None:
        (folder / "hold").touch()
        why.text()  # so that the console has read the trainer's counters before the first step
        for number in range(4):  # two runs of each task, so that the step changes the weights
            why.stack.call(f"task {number % 2}")
        wait_until(lambda: re.search(_TRAINS, why.text()), _EFFECT_S_MAX, "the first step is taken")

    return act


def _released(folder: Path) -> Act:
    def act(why: Why, _undo: contextlib.ExitStack) -> None:
        (folder / "hold").unlink()
        wait_until(lambda: re.search(_TRAINS, why.text()), _EFFECT_S_MAX, "experiences of the refused version")

    return act


def _full(why: Why, undo: contextlib.ExitStack) -> None:
    disk = SmallDisk(why.stack.folder, 0)
    disk.fill()
    undo.callback(disk.free)


def scenes(base: Path, judge: FakeLLM) -> Iterator[Scene]:
    """Yield the scenes in the order in which they run, each on a stack of its own."""
    trained = {**BATCHES, "trainer.base": str(base)}
    yield Scene(
        {},
        (
            Plant(
                "service_not_started",
                "no base model",
                r"The trainer is not started: trainer\.base is not set",
                _nothing,
            ),
        ),
        serves=False,
    )
    yield Scene(
        {**trained, "dead_letters.run_max": 3, "scorer.reward_wait_s": 2.0},
        (
            Plant("no_traffic", "no call", r"No call was captured since the gateway started", _nothing),
            Plant(
                "only_evaluations",
                "calls for evaluation only",
                r"Only evaluations were captured so far",
                _calls(2, "task", purpose="eval"),
            ),
            Plant("sessions_open", "a session that goes on", r"1 session is open", _unfinished),
            Plant("batch_not_full", "one run of a batch of four", r"1 experience waits for a batch of 4", _nothing),
            Plant(
                "source_fails",
                "a reward function that raises",
                r"function:\S* failed \d+ times in a row: KeyError",
                _after_training(_calls(3, "fail")),
            ),
            Plant("service_away", "a stopped trainer", r"The trainer does not answer", _stopped("trainer")),
            Plant("service_away", "a stopped replica", r"The inference does not answer", _stopped("inference")),
            Plant(
                "dropped",
                "calls with temperature 0",
                r"The trainer dropped experiences: no logprobs 2.*temperature=1",
                _after_training(_calls(2, "task", temperature=0)),
                stalls=True,
            ),
            Plant(
                "dropped",
                "runs that no source scores",
                r"The trainer dropped experiences: no reward \d",
                _after_training(_calls(2, "none")),
                stalls=True,
            ),
            Plant(
                "no_traffic",
                "an agent that stopped calling",
                r"No call was captured since an experience was last trained",
                _training,
                stalls=True,
            ),
            Plant("no_advantage", "tasks that are played once", r"The last step changed no weights", _singles),
            Plant("consumer_paused", "records that the scorer refuses", r"The scorer is paused", _garbage),
        ),
    )
    yield Scene(
        {**trained, "scorer.required": ["feedback"], "scorer.functions": [], "trainer.max_staleness": 0},
        (
            Plant("rewards_awaited", "no feedback", r"2 runs wait for rewards of feedback", _unrewarded),
            Plant(
                "stale",
                "answers of a version that is too old",
                r"The trainer dropped experiences: stale \d",
                _stale,
                stalls=True,
            ),
        ),
    )
    yield Scene(
        {
            **trained,
            "trainer.algorithm": "grpo",
            "trainer.group_size": 2,
            "trainer.group_wait_s": 2.0,
            "disk_free_bytes_min": 1_000_000,
        },
        (
            Plant("equal_rewards", "the same reward for every run", r"All runs of each task had equal rewards", _equal),
            Plant("service_unready", "a full disk", r"The \w+ is not ready: .*(space|disk)", _full),
        ),
        is_small_disk=True,
    )
    yield Scene(
        {
            **trained,
            "judge.endpoint.base_url": judge.base_url,
            "judge.endpoint.model": "judge",
            "judge.endpoint.api_key": "wrong",
            "trainer.health.entropy_min": 100.0,
            "trainer.health.patience_steps": 1,
        },
        (
            Plant(
                "source_fails",
                "a wrong key of the judge's endpoint",
                r"judge:\S+ failed .* in a row: .*401",
                _calls(1, "task"),
            ),
            Plant(
                "training_stopped",
                "a health limit that is passed",
                r"Training is stopped: a limit of its health",
                _calls(4, "task"),
            ),
        ),
    )
    folder = base.parent
    gate = [sys.executable, "-S", "-c", _GATE, str(folder / "first"), str(folder / "hold")]
    yield Scene(
        {**trained, "registry.gate.command": gate, "registry.gate.audit_tasks": 1},
        (
            Plant("version_at_gate", "a gate that takes long", r"is at the gate", _gated(folder), stalls=True),
            Plant(
                "weights_went_back",
                "a gate that refuses",
                r"The weights went back \d",
                _released(folder),
                stalls=True,
            ),
        ),
    )
    yield Scene(
        {**trained, "registry.probe_timeout_s": 0.01},
        (Plant("no_version", "a first version that fails its probe", r"no version serves", _nothing),),
        serves=False,
    )


def _equal(why: Why, _undo: contextlib.ExitStack) -> None:
    """Play two runs of each of two tasks, all with the same reward."""
    for number in range(4):
        why.stack.call(f"equal {number % 2}")


def lines(folder: Path, base: Path) -> Iterator[Line]:
    """Yield a result line for each planted reason."""
    named = total = 0
    with FakeLLM(status(401)) as judge:
        for number, scene in enumerate(scenes(base, judge)):
            for line in _play(scene, folder / str(number)):
                total, named = total + 1, named + line.holds
                yield line
    yield Line("planted causes that the page names", f"{named} of {total}", "all", named == total > 0)


def _play(scene: Scene, folder: Path) -> Iterator[Line]:
    with contextlib.ExitStack() as running:
        if scene.is_small_disk:
            try:
                running.enter_context(SmallDisk(folder / "data", 300))
            except PermissionError as error:
                yield Line("a small disk", str(error), "can be mounted", holds=False)
                return
        stack = running.enter_context(console_stack(folder, scene.settings))
        if scene.serves:
            stack.supervisor.wait_ready(180)
        http = running.enter_context(httpx2.Client(base_url=stack.url, timeout=30.0, trust_env=False))
        assert http.get(stack.login_path()).status_code == 303
        why = Why(stack, http)
        for plant in scene.plants:
            yield _read(plant, why)


def _read(plant: Plant, why: Why) -> Line:
    with contextlib.ExitStack() as undo:
        plant.act(why, undo)
        if plant.stalls:
            wait_until(lambda: not re.search(_TRAINS, why.text()), _EFFECT_S_MAX, "training counts as stalled")
        began_s = time.monotonic()
        while not (named := re.search(plant.sentence, text := why.text())) and time.monotonic() - began_s < NAMED_S_MAX:
            time.sleep(0.25)
        seconds = time.monotonic() - began_s
    figure = f"named after {seconds:.1f} s" if named else f"the page states: {text[:200]}"
    return Line(f"{plant.cause}: {plant.fault}", figure, f"named within {NAMED_S_MAX:g} s", bool(named), {"text": text})
