"""Faults of a run and their times, drawn from the seed before anything starts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokafka import TopicPartition

from headrace_schemas import Feedback
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.ids import response_id, session_key
from tests.simulation.process import USUAL_COMMIT_S, VirtualClock

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

SPAN_S = 20.0
"""Seconds within which faults begin; they may last longer."""
SKEW_MAX_S = 5.0
"""Maximum error of a clock in seconds."""
_STREAM = ("collector", "scorer")
_POISONED = ("turns", "feedback", "session-ends", "trajectories", "rewards", "experiences", "checkpoints")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a run. `kind` names the function that injects it."""

    at_s: float
    kind: str
    seed: int


def plan(draw: random.Random) -> list[Fault]:
    """Draw the faults of a run: most kinds occur in most runs, each several times."""
    kinds = draw.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=draw.randint(8, 20))
    return sorted(
        (Fault(draw.uniform(0.5, SPAN_S), kind, draw.getrandbits(32)) for kind in kinds), key=lambda f: f.at_s
    )


async def inject(cluster: Cluster, faults: list[Fault]) -> None:
    """Inject the faults at their times. `Cluster.heal` ends the lasting ones."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for fault in faults:
        await asyncio.sleep(max(0.0, begun_s + fault.at_s - loop.time()))
        cluster.trace("fault", fault.kind)
        KINDS[fault.kind][1](cluster, random.Random(fault.seed))


def _kill(cluster: Cluster, draw: random.Random) -> None:
    slot = draw.choice(cluster.slots)
    if slot.process is not None:
        cluster.count("kill")
        slot.process.die()


def _stop(cluster: Cluster, draw: random.Random) -> None:
    slot = draw.choice([slot for slot in cluster.slots if slot.service in _STREAM])
    if slot.process is not None:
        cluster.count("stop")
        slot.process.stop()


def _commit_refused(cluster: Cluster, draw: random.Random) -> None:
    cluster.mishaps.arm_commit(draw.choice([*_STREAM, "registry"]), "refused", draw.randint(1, 4))


def _commit_unanswered(cluster: Cluster, draw: random.Random) -> None:
    cluster.mishaps.arm_commit(draw.choice(_STREAM), "unanswered")


def _die_before_commit(cluster: Cluster, draw: random.Random) -> None:
    cluster.mishaps.arm_commit(draw.choice([*_STREAM, "registry"]), "die_before")


def _die_after_commit(cluster: Cluster, draw: random.Random) -> None:
    cluster.mishaps.arm_commit(draw.choice([*_STREAM, "registry"]), "die_after")


def _die_while_saving(cluster: Cluster, draw: random.Random) -> None:
    cluster.mishaps.arm_blob_death("trainer", draw.randint(1, 9))


def _rebalance(cluster: Cluster, draw: random.Random) -> None:
    groups = [group for _, group in sorted(cluster.bus.groups.items()) if len(group.members) > 1]
    if groups:
        cluster.count("rebalance")
        draw.choice(groups).rebalance()


def _bus_silent(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("bus_away_silent")
    cluster.bus.outage.until_s = asyncio.get_running_loop().time() + draw.choice([0.3, 2.0, 6.0])
    cluster.bus.outage.how = "silent"


def _bus_refusing(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("bus_away_refusing")
    cluster.bus.outage.until_s = asyncio.get_running_loop().time() + draw.choice([0.3, 2.0, 6.0])
    cluster.bus.outage.how = "refusing"


def _slow_bus(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("slow_bus")
    cluster.bus.slow_s = draw.choice([0.02, 0.1])
    asyncio.get_running_loop().call_later(draw.uniform(1, 5), setattr, cluster.bus, "slow_s", 0.0)


def _slow_database(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("slow_database")
    cluster.mishaps.commit_s = draw.choice([0.1, 1.0])
    asyncio.get_running_loop().call_later(draw.uniform(1, 5), setattr, cluster.mishaps, "commit_s", USUAL_COMMIT_S)


def _delay(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("delay")
    topic = draw.choice(["feedback", "session-ends", "trajectories", "rewards", "experiences", "model-events"])
    cluster.bus.hold(draw.choice(cluster.bus.partitions_of(topic)), draw.uniform(0.5, 8.0))


def _late_turns(cluster: Cluster, draw: random.Random) -> None:
    """Delay turns, so that session ends and feedback arrive before the turns that they refer to."""
    cluster.count("late_turns")
    seconds = draw.uniform(0.5, 6.0)
    for topic_partition in cluster.bus.partitions_of("turns"):
        cluster.bus.hold(topic_partition, seconds)


def _duplicates(cluster: Cluster, draw: random.Random) -> None:
    cluster.bus.repeat = 0.4
    asyncio.get_running_loop().call_later(draw.uniform(1, 6), setattr, cluster.bus, "repeat", 0.0)


def _slow_trainer(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("slow_trainer")
    cluster.training_s = draw.choice([0.5, 2.0])
    asyncio.get_running_loop().call_later(draw.uniform(2, 8), setattr, cluster, "training_s", 0.02)


def _blobs_away(cluster: Cluster, draw: random.Random) -> None:
    cluster.count("blobs_away")
    cluster.mishaps.blobs_away = True
    asyncio.get_running_loop().call_later(draw.uniform(0.2, 4.0), setattr, cluster.mishaps, "blobs_away", False)


def _clock_step(cluster: Cluster, draw: random.Random) -> None:
    """Move the clock of one process, forwards or backwards with equal probability."""
    cluster.count("clock_step")
    cluster.skews_s[draw.choice(cluster.slots).name] = draw.uniform(-SKEW_MAX_S, SKEW_MAX_S)


def _poison(cluster: Cluster, draw: random.Random) -> None:
    """Append a record that no service can parse as an event."""
    topic = draw.choice(_POISONED)
    topic_partition = draw.choice(cluster.bus.partitions_of(topic))
    value, reason = draw.choice([(b"{", "invalid_json"), (b'{"time": 1}', "invalid_event"), (None, "empty_value")])
    record = cluster.bus.append(topic_partition, b"k", value, (), "somebody")
    cluster.ledger.poison[topic, topic_partition.partition, record.offset] = reason
    cluster.count("poison")


def _astray(cluster: Cluster, draw: random.Random) -> None:
    """Append feedback about a turn that does not exist."""
    key = session_key("default", f"nobody {draw.getrandbits(32)}")
    feedback = Feedback(
        time=VirtualClock().now(), feedback_id=f"astray {key}", session_key=key, msg_ids=(response_id(key),), value=1.0
    )
    topic_partition = TopicPartition(feedback.topic, cluster.bus.partition_of(feedback.topic, feedback.key.encode()))
    cluster.bus.append(
        topic_partition,
        feedback.key.encode(),
        feedback.to_json(),
        Envelope.of(feedback, "somebody").headers(),
        "somebody",
    )
    cluster.ledger.astray.add(feedback.event_id)
    cluster.count("feedback_astray")


KINDS: dict[str, tuple[float, Callable[[Cluster, random.Random], None]]] = {
    "kill": (4, _kill),
    "stop": (1, _stop),
    "commit_refused": (1, _commit_refused),
    "commit_unanswered": (0.7, _commit_unanswered),
    "die_before_commit": (2, _die_before_commit),
    "die_after_commit": (2, _die_after_commit),
    "die_while_saving": (1.5, _die_while_saving),
    "rebalance": (2, _rebalance),
    "bus_silent": (1, _bus_silent),
    "bus_refusing": (1, _bus_refusing),
    "slow_bus": (0.7, _slow_bus),
    "slow_database": (1, _slow_database),
    "delay": (2, _delay),
    "late_turns": (1, _late_turns),
    "duplicates": (1.5, _duplicates),
    "slow_trainer": (1, _slow_trainer),
    "blobs_away": (0.7, _blobs_away),
    "clock_step": (2, _clock_step),
    "poison": (1.5, _poison),
    "feedback_astray": (0.5, _astray),
}
"""Weight and function of each kind of fault."""
