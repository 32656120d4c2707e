"""Trajectories per second of a replay: `python -m benchmarks.replay`.

The benchmark fills an embedded broker with trajectories, their experiences and feedback. Then it measures the part of
`headrace replay` before training, which depends on the model: copying experiences, and scoring trajectories again with
a reward function. Both must reach 2,000 per second. Wall time depends on other users of the machine, so that the report
includes the CPU time of the command and its programs (without the broker), and the rate at which one core decodes the
same trajectories, which a busy machine lowers equally. The benchmark takes some minutes and writes
`reports/bench-replay.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headrace.producing import Outgoing, producing
from headrace.topics import Range
from headrace_cli.terminal import ProgressDisplay
from headrace_operations.replay import copying, runner
from headrace_operations.replay.partition_merge import Journal, open_merge
from headrace_operations.replay.request import Report, Request, make
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings
from headrace_schemas import Branch, Dialogue, Experience, Feedback, Message, Span, Trajectory
from headrace_schemas.values.ids import session_key
from tests.support.servers import BrokerProcess

RATE_MIN = 2_000
TOKENS, TURNS, SAMPLED = 320, 3, 24
DECODED = 2_000
START = datetime(2026, 1, 1, tzinfo=UTC)
REWARD = """
def answer(trajectory, context):
    return float(context["expected"] in trajectory.final_answer)
"""


def trajectory(number: int) -> Trajectory:
    """Return a trajectory of three turns and 320 tokens; every fourth one has the expected answer."""
    draw = random.Random(number)
    turn_ids = [f"chatcmpl-{number}-{turn}" for turn in range(TURNS)]
    spans = tuple(
        Span(
            start=80 + 100 * turn - SAMPLED,
            logprobs=tuple(-draw.random() for _ in range(SAMPLED)),
            turn_id=turn_ids[turn],
            version="bench@0123456789abcdef",
        )
        for turn in range(TURNS)
    )
    answer = "it is 42" if number % 4 == 0 else "I cannot tell"
    texts = [("user", f"How many mails did sender {number % 97} send?"), ("assistant", "search"), ("tool", "3 results")]
    messages = tuple(Message.model_validate({"role": role, "content": text}) for role, text in texts)
    return Trajectory(
        time=START + timedelta(seconds=number),
        trajectory_id=f"t{number}",
        session_key=session_key("default", f"s{number}"),
        session_id=f"s{number}",
        task_id=f"task-{number % 50}",
        run_id=str(number),
        model="bench",
        branches=(Branch(token_ids=tuple(draw.randrange(300) for _ in range(TOKENS)), spans=spans),),
        dialogues=(Dialogue(messages=(*messages, Message(role="assistant", content=answer))),),
        end_reason="end_call",
        started_at=START + timedelta(seconds=number - 3),
        context={"expected": "42"},
    )


def experience(of: Trajectory, number: int) -> Experience:
    return Experience(
        time=of.time,
        experience_id=Experience.id_of(of.trajectory_id, 0),
        trajectory_id=of.trajectory_id,
        session_key=of.session_key,
        session_id=of.session_id,
        task_id=of.task_id,
        run_id=of.run_id,
        model=of.model,
        branch=of.branches[0],
        turn_ids=of.branches[0].turn_ids,
        reward=float(number % 4 == 0),
    )


def events(number: int) -> Iterator[Trajectory | Experience | Feedback]:
    trajectory_of_number = trajectory(number)
    yield trajectory_of_number
    yield experience(trajectory_of_number, number)
    if number % 10 == 0:
        yield Feedback(
            time=trajectory_of_number.time, feedback_id=f"f{number}",
            session_key=trajectory_of_number.session_key, value=1.0, msg_ids=trajectory_of_number.branches[0].turn_ids,
        )  # fmt: skip


@asynccontextmanager
async def stored(folder: Path, count: int, progress: ProgressDisplay) -> AsyncIterator[str]:
    """Run a broker that holds `count` trajectories and their other events, and yield its address."""
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    try:
        await topics.ensure(BusSettings(address=broker.address))
        async with producing(broker.address) as producer:
            for first in range(0, count, 200):
                numbers = range(first, min(first + 200, count))
                await producer.send([Outgoing.of(event, "bench") for number in numbers for event in events(number)])
                progress.update(numbers.stop, count, "storing")
        yield broker.address
    finally:
        await asyncio.to_thread(broker.stop)


def request(bus: str, folder: Path, lineage: str, *, rescored: bool) -> Request:
    """Return a replay request as `headrace replay run` makes it."""
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 2048}', "utf-8")
    settings = {
        "data_dir": folder / "data",
        "trainer.model": "bench",
        "trainer.base": folder / "base",
        "trainer.max_staleness": 10_000_000,
        "scorer.functions": [f"{folder / 'rewards.py'}:answer"],
    }
    topic = Trajectory.topic if rescored else Experience.topic
    return make(lineage, Range(topic), Overrides(None, settings, os.environ), bus)


async def copy_events(replay_request: Request, progress: ProgressDisplay) -> tuple[Report, float, float]:
    """Run the first half of a replay, until training would begin. Return its report, its wall time and its CPU time in
    seconds."""

    def tick(phase: str, count: int, total: int) -> None:
        progress.update(count, total or None, phase)

    report = Report(replay_request.lineage, replay_request.of, replay_request.topic_range.topic)
    began, busy = time.perf_counter(), cpu_s()
    async with open_merge(replay_request.bus, replay_request.topic_range) as merge:
        await copying.create(replay_request.bus, replay_request.lineage)
        await runner.copy(replay_request, report, merge, Journal((), (), "nothing was trained"), tick)
    return report, time.perf_counter() - began, cpu_s() - busy


def cpu_s() -> float:
    """Return the CPU seconds of this process and of all its finished child processes."""
    usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def decoding_rate() -> float:
    """Return the trajectories per second that one core decodes from bytes to events, an upper bound of this machine."""
    values = [trajectory(number).to_json() for number in range(DECODED)]
    began = time.perf_counter()
    for value in values:
        Trajectory.from_json(value)
    return DECODED / (time.perf_counter() - began)


async def measure(count: int) -> dict[str, object]:
    with (
        ProgressDisplay("bench-replay", unit="trajectories", estimate=False) as progress,
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as name,
    ):
        folder = Path(name)
        before = decoding_rate()
        began = time.perf_counter()
        async with stored(folder, count, progress) as bus:
            print(f"{count} trajectories stored in {time.perf_counter() - began:.0f} s")
            rates, cpu_ms = {}, {}
            for part, rescored in (("copied", False), ("scored_again", True)):
                replay_request = request(bus, folder, part.replace("_", "-"), rescored=rescored)
                report, seconds, busy_s = await copy_events(replay_request, progress)
                assert report.experiences == count, report
                rates[part], cpu_ms[part] = count / seconds, 1000 * busy_s / count
                print(f"{part}: {rates[part]:,.0f} a second")
        decoded = (before + decoding_rate()) / 2
    return {
        "trajectories": count,
        "tokens_per_trajectory": TOKENS,
        "json_bytes_per_trajectory": len(trajectory(0).to_json()),
        "rate_wanted": RATE_MIN,
        "rates": rates,
        "cpu_ms_per_trajectory": cpu_ms,
        "one_core_decodes": decoded,
        "share_of_one_core_decoding": {part: rate / decoded for part, rate in rates.items()},
        "reached": all(rate >= RATE_MIN for rate in rates.values()),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("reports/bench-replay.json"))
    options = parser.parse_args()
    report = asyncio.run(measure(options.trajectories))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0 if report["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
