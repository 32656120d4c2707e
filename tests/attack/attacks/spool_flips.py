"""Flipped bits in all files of the gateway's spool."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from headrace_gateway.capture.spool import Spool, Spooled
from tests.system.program import Line, at_most, none_of

TITLE = "flipped bytes in the spool of a gateway that was killed"
_FLIPS = 500
_EVENTS = 120
_RESERVE_BYTES = 1 << 17


async def attack(folder: Path, rng: random.Random) -> list[Line]:
    intact = folder / "whole"
    written = [_event(number, rng) for number in range(_EVENTS)]
    count = rng.randrange(10, 30)
    async with Spool(intact, 1 << 30, _RESERVE_BYTES) as spool:
        for at in range(0, _EVENTS, 10):
            await spool.append(written[at : at + 10])
        await spool.remove(await spool.oldest(count))
    silent = crashed = untold = worst = reported = 0
    for trial in range(_FLIPS):
        flipped = folder / f"flip-{trial}"
        shutil.copytree(intact, flipped)
        _flip(flipped, rng)
        try:
            records = await _read(flipped)
        except Exception:  # noqa: BLE001 (whatever it is, that gateway would not start)
            crashed += 1
            continue
        finally:
            shutil.rmtree(flipped)
        written_by_value = {event.value: event for event in written}
        good = [record for record in records if not record.damage]
        silent += sum(
            record.value not in written_by_value or written_by_value[record.value].topic != record.topic
            for record in good
        )
        lost = len({event.value for event in written[count:]} - {record.value for record in good})
        damaged = sum(bool(record.damage) for record in records)
        worst, reported = max(worst, lost), reported + damaged
        untold += max(0, lost - damaged)
    return [
        none_of("flips that changed an event unseen", silent, _FLIPS),
        none_of("flips after which the gateway does not start", crashed, _FLIPS),
        at_most("records lost to one flip", worst, 1),
        none_of("losses without a dead letter", untold, _FLIPS),
        Line("records given up with their place", str(reported), f"at most {_FLIPS}, and some", 0 < reported <= _FLIPS),
    ]


async def _read(folder: Path) -> list[Spooled]:
    async with Spool(folder, 1 << 30, _RESERVE_BYTES) as spool:
        return await spool.oldest(10 * _EVENTS)


def _event(number: int, rng: random.Random) -> Spooled:
    text = rng.randbytes(rng.randrange(20, 900)).hex()
    return Spooled(rng.choice(["turns", "feedback"]), b'{"number":%d,"text":"%s"}' % (number, text.encode()))


def _flip(folder: Path, rng: random.Random) -> None:
    """Flip one bit: with probability one half in the bytes of records, otherwise anywhere in any file."""
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    segments = [path for path in files if path.suffix == ".spool" and any(path.read_bytes()[:64])]
    path = rng.choice(segments if rng.random() < 0.5 else files)
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0")) if path in segments else len(data)
    data[rng.randrange(end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
