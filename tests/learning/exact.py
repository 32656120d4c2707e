"""The exact way to withdraw a reward: a replay that knows the withdrawal from the start equals a stream without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace_schemas import Event, Experience
from headrace_schemas.events.envelope import Envelope
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trainer import Trainer
from tests.support.torch_learners import policy_of
from tests.unit.trainer.world import Bus, World, experience

_TAKEN_BACK = 5


async def differing_bytes(folder: Path, base: Path) -> tuple[int, int]:
    """Count the bytes of the weights that differ between a lineage without an experience and (a) a replay of the stream
    with
    its withdrawal, (b) the lineage that trained it and was corrected, for comparison.
    """
    world = World(folder)
    live = await world.run(_settings(base))
    version = world.bus.checkpoints[0].version
    stream = [experience(n, version, reward=n % 3, task=f"t{n % 2}", run=str(n)) for n in range(16)]
    last_word = experience(_TAKEN_BACK, version, None, revision=1, task="t1", branch=False)
    world.bus.produce(*stream, last_word)
    live = await world.run(_settings(base), wait_s=31)
    assert world.bus.fates[f"e{_TAKEN_BACK}", 1] == "trained", "it was corrected"

    corrected_stream = [last_word if n == _TAKEN_BACK else event for n, event in enumerate(stream)]
    without = [event for n, event in enumerate(stream) if n != _TAKEN_BACK]
    replayed = await _again(world, base, "replayed", corrected_stream)
    never = await _again(world, base, "never", without)
    return _difference(replayed, never), _difference(live, never)


async def _again(world: World, base: Path, lineage: str, stream: list[Experience]) -> Trainer:
    world.bus = Bus(partitions=1)
    for event in stream:
        world.bus.add(lineage, event.to_json(), 0, _headers(event))
    return await world.run(_settings(base, lineage=lineage, replays="main", topic=lineage, until_end=True))


def _headers(event: Event) -> list[tuple[str, bytes | None]]:
    return [*Envelope.of(event, "test").headers()]


def _settings(base: Path, **overrides: object) -> TrainerSettings:
    return TrainerSettings.model_validate(
        {
            "base": str(base),
            "model": "m",
            "batch_experiences": 4,
            "batch_experiences_min": 1,
            "save_interval_s": 1e-9,
            "steps_per_version": 1,
            "max_staleness": 50,
            **overrides,
        }
    )


def _difference(left: Trainer, right: Trainer) -> int:
    left_bytes, right_bytes = (b"".join(_bytes(files)) for files in (left, right))
    return sum(a != b for a, b in zip(left_bytes, right_bytes, strict=True))


def _bytes(trainer: Trainer) -> Iterator[bytes]:
    assert trainer.lineage is not None
    return (tensor.numpy().tobytes() for _, tensor in sorted(policy_of(trainer.lineage).tensors().items()))
