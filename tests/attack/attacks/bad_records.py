"""Damaged and hostile records among good ones: each is dead-lettered with its offset, and all others are processed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from headrace_schemas import DeadLetter, Experience, Trajectory, Turn
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values.blobs import BlobRef
from tests.attack.stacks import Place, SmallStack, small_stack
from tests.support.turns import ask, end, user
from tests.system.program import Line, none_of

TITLE = "damaged records, missing blobs and wrong headers among good records"
SESSIONS = 120
BAD = 60

Bad = Callable[[Turn, SmallStack, random.Random], tuple[bytes | None, tuple[tuple[str, bytes], ...], str]]


def _cut(turn: Turn, _stack: SmallStack, rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    value = turn.to_json()
    return value[: rng.randrange(1, len(value) - 1)], (), "invalid_json"


def _flipped(turn: Turn, _stack: SmallStack, rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    value = bytearray(turn.to_json())
    value[rng.choice([0, len(value) - 1])] ^= 0x10
    return bytes(value), (), "invalid_json"


def _empty(_turn: Turn, _stack: SmallStack, _rng: random.Random) -> tuple[None, tuple[tuple[str, bytes], ...], str]:
    return None, (), "empty_value"


def _no_usage(turn: Turn, _stack: SmallStack, _rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    return turn.to_json().replace(b'"usage"', b'"usages"'), (), "invalid_event"


def _no_reference(
    turn: Turn, _stack: SmallStack, _rng: random.Random
) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    return turn.to_json(), (("ce_dataref", b"file:///nowhere"),), "invalid_blob_reference"


def _missing(turn: Turn, stack: SmallStack, _rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    ref = stack.blobs.ref(turn.to_json())
    return ref.model_dump_json().encode(), Envelope.of(turn, "x", dataref=ref.uri).headers(), "missing_blob"


def _corrupt(turn: Turn, stack: SmallStack, rng: random.Random) -> tuple[bytes, tuple[tuple[str, bytes], ...], str]:
    ref: BlobRef = stack.blobs.put(turn.to_json())
    path = Path(ref.uri.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return ref.model_dump_json().encode(), Envelope.of(turn, "x", dataref=ref.uri).headers(), "corrupt_blob"


KINDS: tuple[Bad, ...] = (_cut, _flipped, _empty, _no_usage, _no_reference, _missing, _corrupt)


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    async with small_stack(folder) as stack:
        collector, scorer = stack.service("collector"), stack.service("scorer", SCORER__REWARD_WAIT_S=1)
        for service in (collector, scorer):
            service.start()
        good, bad = await _send(stack, rng)
        letters = await stack.until(DeadLetter, lambda events: len(events) >= len(bad))
        experiences = await stack.until(Experience, lambda events: len(_turns(events)) >= len(good), 90)
        closed = await stack.events(Trajectory)
        origins = [(letter.source_topic, letter.source_partition, letter.source_offset) for letter in letters]
        reasons = {origin: letter.reason for origin, letter in zip(origins, letters, strict=True)}
        wrong = [origin for origin, reason in bad.items() if reasons.get(origin) != reason]
        reached = _turns(experiences)
        sampled = _sampled(closed)
        changed = [turn for turn, tokens in sampled.items() if tokens != good.get(turn)]
        ended = [service.name for service in (collector, scorer) if not service.running()]
        return [
            none_of("services that ended", len(ended), 2),
            none_of("bad records without the dead letter of their place and reason", len(wrong), len(bad)),
            none_of("dead letters that were written twice, or for a good record", len(origins) - len(bad), len(bad)),
            none_of("good turns that did not reach `experiences`", len(good.keys() - reached), len(good)),
            none_of("turns that were passed on with other tokens than were sampled", len(changed), len(good)),
        ]


async def _send(stack: SmallStack, rng: random.Random) -> tuple[dict[str, tuple[int, ...]], dict[Place, str]]:
    """Send good turns mixed with bad records.

    Returns:
        The sampled tokens of each good turn, and the expected dead-letter reason for the place of each bad record.
    """
    good: dict[str, tuple[int, ...]] = {}
    bad: dict[Place, str] = {}
    work = ["good"] * SESSIONS + ["bad"] * BAD
    rng.shuffle(work)
    for number, kind in enumerate(work):
        turn = ask([user(f"question {number}")], session=f"s{number}", at=number)
        if kind == "good":
            good[turn.turn_id] = turn.choices[0].token_ids
            await stack.send(turn)
            await stack.send(end(f"s{number}", at=number + 10))
        else:
            value, headers, reason = rng.choice(KINDS)(turn, stack, rng)
            bad[await stack.send_raw("turns", turn.session_key, value, headers)] = reason
    return good, bad


def _turns(experiences: list[Experience]) -> set[str]:
    return {turn for experience in experiences for turn in experience.turn_ids}


def _sampled(closed: list[Trajectory]) -> dict[str, tuple[int, ...]]:
    """Return the sampled tokens of each turn, as the trajectories contain them."""
    return {
        span.turn_id: branch.token_ids[span.start : span.stop]
        for trajectory in closed
        for branch in trajectory.branches
        for span in branch.spans
    }
