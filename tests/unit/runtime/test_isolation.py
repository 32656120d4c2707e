"""Tests that a failing item of a step fails alone with a reason, and of Faust's settings and program digests.

The other items are processed, whatever is raised and at whatever stage. A program's digest changes with each file of
its code, and with no other file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, delete, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.dead_letters import dead_letter
from headrace_runtime.kafka.wire import Record
from headrace_runtime.process.programs import program_digest
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage import isolation
from headrace_runtime.storage.isolation import each, process_batch
from headrace_runtime.storage.tables import StreamTables
from headrace_runtime.stream import stream_service
from headrace_runtime.stream.processor import StepFailed
from headrace_schemas import DeadLetter, Event, Feedback, Reward
from headrace_schemas.values.ids import session_key
from tests.support.streams import Bench, Service, bench
from tests.support.turns import START

metadata = MetaData()
tables = StreamTables(metadata)
items = Table("items", metadata, Column("n", Integer, primary_key=True))
effects = Table("effects", metadata, Column("n", Integer), Column("what", Text))
KEY = session_key("default", "s")
Plant = Callable[[AsyncConnection, int], Awaitable[Sequence[Event]]]


def reward(number: int, **values: object) -> Reward:
    fields: dict[str, object] = {"time": START, "trajectory_id": str(number), "session_key": KEY, "source": "f"}
    return Reward.model_validate({**fields, "outcome": "abstained", **values})


async def _value_error(_tx: AsyncConnection, _number: int) -> Sequence[Event]:
    raise ValueError("not a number \x00 \ud83d")


async def _validation_error(_tx: AsyncConnection, number: int) -> Sequence[Event]:
    return [reward(number, outcome="scored", value="x")]


async def _unicode_error(_tx: AsyncConnection, _number: int) -> Sequence[Event]:
    "\ud83d".encode()
    return []


async def _overflow(tx: AsyncConnection, number: int) -> Sequence[Event]:
    await tx.execute(insert(effects).values(n=2**70, what=str(number)))
    raise OverflowError("PostgreSQL refuses the statement")


async def _recursion(_tx: AsyncConnection, _number: int) -> Sequence[Event]:
    json.loads("[" * 200_000)
    return []


async def _wrong_statement(tx: AsyncConnection, _number: int) -> Sequence[Event]:
    await tx.execute(text("SELECT no_such_column FROM items"))
    return []


async def _wrong_value(tx: AsyncConnection, _number: int) -> Sequence[Event]:
    """Cause a database error: PostgreSQL refuses the text, and SQLite cannot read it back."""
    if tx.dialect.name == "sqlite":
        await tx.execute(text("SELECT CAST(x'ff' AS TEXT)"))
    await tx.execute(insert(effects).values(n=1, what="\x00"))
    return []


async def _not_sendable(_tx: AsyncConnection, number: int) -> Sequence[Event]:
    return [reward(number).model_copy(update={"reason": "bad \ud83d end"})]


class _Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


async def _hostile(_tx: AsyncConnection, _number: int) -> Sequence[Event]:
    raise _Hostile


PLANTS: dict[str, Plant] = {
    "ValueError": _value_error,
    "ValidationError": _validation_error,
    "UnicodeEncodeError": _unicode_error,
    "OverflowError": _overflow,
    "RecursionError": _recursion,
    "a wrong statement": _wrong_statement,
    "a value that the database refuses": _wrong_value,
    "an event that cannot be sent": _not_sendable,
    "an exception without a text": _hostile,
}


class Steps:
    """A step that writes an effect and a reward for each row of `items`. `plant` is called for the row `poisoned`."""

    def __init__(self, *, in_batches: bool = False) -> None:
        self.in_batches = in_batches
        self.plant: Plant | None = None
        self.plant_fail: Plant | None = None
        self.poisoned = 3
        self.tries: list[int] = []

    async def step(self, tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        numbers = (await tx.execute(select(items.c.n).order_by(items.c.n))).scalars().all()

        async def work(number: int) -> Sequence[Event]:
            self.tries.append(number)
            await tx.execute(insert(effects).values(n=number, what="done"))
            await tx.execute(delete(items).where(items.c.n == number))
            if number == self.poisoned and self.plant is not None:
                return await self.plant(tx, number)
            return [reward(number)]

        async def fail(number: int, reason: str) -> Sequence[Event]:
            if self.plant_fail is not None:
                return await self.plant_fail(tx, number)
            await tx.execute(delete(items).where(items.c.n == number))
            return [dead_letter("test", Record("items", 0, number, None, b"{}"), "poisoned", reason)]

        async def work_together(batch: Sequence[int]) -> Sequence[Event]:
            return [event for number in batch for event in await work(number)]

        if self.in_batches:
            return await process_batch(tx, "test", numbers, work_together, fail)
        return await each(tx, "test", numbers, work, fail)


@pytest.fixture(params=[False, True], ids=["each", "process_batch"])
def steps(request: pytest.FixtureRequest) -> Steps:
    return Steps(in_batches=request.param)


@pytest.fixture
async def stream(database_url: str, data_dir: Path, steps: Steps) -> AsyncIterator[Bench]:
    async def on_feedback(_event: Feedback, _handling: object) -> Sequence[Event]:
        return []

    service = Service(tables, {"feedback": on_feedback}, after_batch=steps.step)
    async with bench(service, database_url, data_dir) as service_bench:
        async with service_bench.processor.database.transaction() as tx:
            await tx.execute(insert(items), [{"n": number} for number in range(6)])
        yield service_bench


async def effects_of(stream: Bench) -> list[tuple[int, str]]:
    async with stream.processor.database.transaction() as tx:
        rows = await tx.execute(select(effects.c.n, effects.c.what).order_by(effects.c.n))
        return [(row.n, row.what) for row in rows]


OTHERS = [0, 1, 2, 4, 5]


@pytest.mark.parametrize("after_batch", [False, True], ids=["timer", "after a batch"])
@pytest.mark.parametrize("kind", PLANTS)
async def test_a_poisoned_item_ends_alone(stream: Bench, steps: Steps, kind: str, after_batch: bool) -> None:
    steps.plant = PLANTS[kind]
    if after_batch:
        await stream.deliver(Feedback(time=START, feedback_id="a", session_key=KEY, value=1.0))
    else:
        await stream.step(steps.step)
    (letter,) = stream.sent(DeadLetter)
    assert (letter.source_offset, letter.reason) == (3, "poisoned")
    assert letter.error
    assert [reward_event.trajectory_id for reward_event in stream.sent(Reward)] == [str(number) for number in OTHERS]
    assert await effects_of(stream) == [(number, "done") for number in OTHERS]
    assert await stream.count("items") == 0, "nothing comes back after a restart"
    assert steps.tries.count(3) == 1 + isolation.TRIES, "with the others, then three times alone"
    await stream.step(steps.step)
    assert len(stream.sent(DeadLetter)) == 1


@pytest.mark.parametrize("kind", PLANTS)
async def test_an_owner_that_cannot_name_the_item_stops_nobody_either(stream: Bench, steps: Steps, kind: str) -> None:
    steps.plant = steps.plant_fail = PLANTS[kind]
    await stream.step(steps.step)
    assert await effects_of(stream) == [(number, "done") for number in OTHERS]


async def test_an_item_that_fails_once_is_done_at_the_next_try(stream: Bench, steps: Steps) -> None:
    async def once(_tx: AsyncConnection, number: int) -> Sequence[Event]:
        if steps.tries.count(number) <= isolation.TRIES:
            raise ValueError("not yet")
        return [reward(number)]

    steps.plant = once
    await stream.step(steps.step)
    assert stream.sent(DeadLetter) == []
    assert len(stream.sent(Reward)) == 6


async def test_what_is_away_is_waited_for_and_no_item_is_blamed(stream: Bench, steps: Steps) -> None:
    async def away(_tx: AsyncConnection, number: int) -> Sequence[Event]:
        if steps.tries.count(number) < 4:
            raise Unavailable("the blob store is away")
        return [reward(number)]

    steps.plant = away
    await stream.step(steps.step)
    assert stream.sent(DeadLetter) == []
    assert len(stream.sent(Reward)) == 6


async def test_process_batch_runs_once_for_all_items(stream: Bench) -> None:
    batches: list[list[int]] = []

    async def step(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        async def work(batch: Sequence[int]) -> Sequence[Event]:
            batches.append([*batch])
            return [reward(number) for number in batch]

        return [*await process_batch(tx, "test", range(6), work), *await process_batch(tx, "test", [], work)]

    await stream.step(step)
    assert batches == [[0, 1, 2, 3, 4, 5]]
    assert len(stream.sent(Reward)) == 6


async def test_a_step_that_does_not_isolate_its_items_is_no_step(stream: Bench, steps: Steps) -> None:
    """Injected fault: without `each`, the first failing item also fails all others."""

    async def careless(tx: AsyncConnection, _now: datetime) -> Sequence[Event]:
        events: list[Event] = []
        for number in (await tx.execute(select(items.c.n))).scalars().all():
            events += [reward(number)] if number != 3 else await _value_error(tx, number)
        return events

    with pytest.raises(StepFailed, match="careless: ValueError"):
        await stream.step(careless)
    assert stream.sent(Reward) == []


@pytest.mark.parametrize("text_", ["\x00", "\ud83d", "x" * 10_000, "\x1b[31m", ""], ids=repr)
def test_a_dead_letter_holds_whatever_a_record_holds(text_: str) -> None:
    raw = text_.encode("utf-8", "surrogatepass")
    headers = (("ce_id", raw), (text_ or "x", raw), ("", raw), ("none", None))
    record = Record("turns", 0, 1, raw, raw * 400, headers)
    for event_id in (None, text_):
        letter = dead_letter("test", record, "poisoned", text_, 1, event_id)
        assert DeadLetter.from_json(letter.to_json()) == letter
        assert letter.event_id


@pytest.mark.parametrize(("request_s", "session_s"), [(30.0, 10.0), (5.0, 10.0), (30.0, 60.0)])
def test_every_pair_of_bounds_that_settings_allow_can_start(request_s: float, session_s: float, tmp_path: Path) -> None:
    """Faust does not start if a request may take less time than a session."""
    bus = BusSettings(request_timeout_s=request_s, session_timeout_s=session_s)
    conf = stream_service._app("group", bus, tmp_path).conf
    assert conf.broker_session_timeout == session_s
    assert conf.broker_request_timeout == max(request_s, session_s)


FILES = {
    "gate.py": "import helper\nfrom parts import scoring\nimport json, late.one\n",
    "helper.py": "def play():\n    from deep.down import well\n    return well\n",
    "parts/__init__.py": "from . import shared\n",
    "parts/scoring.py": "from .shared import unit\nfrom ..outside import nothing\n",
    "parts/shared.py": "unit = 1\n",
    "deep/down.py": "well = 1\n",
    "late/one.py": "broken = (\n",
    "entry/__init__.py": "",
    "entry/__main__.py": "import helper\n",
}
BESIDE = {"other.py": "x = 1\n", "tasks.jsonl": "{}\n", "parts/unused.py": "", "out.log": "a\n"}
SCRIPT = ("{python}", "gate.py", "--tasks", "tasks.jsonl", "--log", "out.log")
MODULE = ("{python}", "-m", "entry")
COVERED = {
    SCRIPT: {name for name in FILES if not name.startswith("entry")},
    MODULE: {"entry/__init__.py", "entry/__main__.py", "helper.py", "deep/down.py"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {**FILES, **BESIDE}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize("command", COVERED, ids=["script", "module"])
@pytest.mark.parametrize("name", [*FILES, *BESIDE])
@pytest.mark.parametrize("change", ["edit", "remove"])
def test_a_digest_covers_the_code_and_nothing_else(
    folder: Path, command: tuple[str, ...], name: str, change: str
) -> None:
    before = program_digest(command, folder)
    assert program_digest(command, folder) == before
    if change == "edit":
        (folder / name).write_text((folder / name).read_text() + "# more\n")
    else:
        (folder / name).unlink()
    assert (program_digest(command, folder) != before) is (name in COVERED[command])


def test_a_digest_does_not_depend_on_where_the_folder_lies(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    for name, content in FILES.items():
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(content)
    assert program_digest(SCRIPT, folder) == program_digest(SCRIPT, other)
    assert program_digest((*SCRIPT, "more"), folder) != program_digest(SCRIPT, folder)


@pytest.mark.parametrize("command", [(), ("./gate",), ("python", "-m", "json.tool"), ("python", "-m"), ("a\x00.py",)])
def test_a_command_without_code_here_has_the_digest_of_its_words(tmp_path: Path, command: tuple[str, ...]) -> None:
    words = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()
    assert program_digest(command, tmp_path) == words


def test_a_program_that_imports_itself_or_much_ends(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b\nimport a\n")
    (tmp_path / "b.py").write_text("import a\n" + "".join(f"import m{n}\n" for n in range(1_500)))
    for number in range(1_500):
        (tmp_path / f"m{number}.py").write_text("")
    assert program_digest(("a.py",), tmp_path)
