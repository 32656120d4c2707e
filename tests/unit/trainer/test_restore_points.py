"""Tests of restore points, which are stored once with their versions, and of reports after the weights go back or
forward.

The reports list undone, restored and queued experiences.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from headrace_runtime.storage.blobs import digest_of
from headrace_schemas import Experience
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.window import Contribution, ContributionDetail, Entry
from headrace_trainer.learner import VERSION, WEIGHTS
from headrace_trainer.lineage import opening, saving, versions
from headrace_trainer.lineage.saving import sum_bytes
from headrace_trainer.lineage.versions import assemble, share_weights
from headrace_trainer.settings import MemorySettings
from headrace_trainer.torch_learner import tensors
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.test_state import ledger_on, step
from tests.unit.trainer.test_store import POINTER, saved_of, trained
from tests.unit.trainer.world import START, World, experience

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def _generated(chance: random.Random, folder: Path) -> float:
    """Write weights and the files of a version with some shared tensors. Return the share of bytes in both."""
    draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
    weights: dict[str, Tensor] = {}
    files: list[dict[str, Tensor]] = [{} for _ in range(chance.randint(1, 3))]
    for number in range(chance.randint(1, 12)):
        shape = [chance.randint(0, 40) for _ in range(chance.randint(0, 3))]
        tensor = torch.rand(shape, generator=draw).to(chance.choice(TYPES))
        weights[f"layer.{number}"] = tensor
        other = {
            "same": tensor.clone(),
            "other value": tensor + 1,
            "other type": tensor.to(torch.float64),
            "other shape": tensor.reshape(1, *shape),
        }
        kind = chance.choice(["same", "same", "same", "absent", *other])
        if kind != "absent":
            chance.choice(files)[f"layer.{number}"] = other[kind]
    (folder / VERSION).mkdir(parents=True)
    save_file(weights, folder / WEIGHTS, {"headrace": "training state"})
    for number, file in enumerate(files):
        save_file(file or {"more": torch.zeros(1)}, folder / VERSION / f"model-{number}.safetensors", {"format": "pt"})
    return (folder / WEIGHTS).stat().st_size


@pytest.mark.parametrize("seed", range(60))
def test_shared_weights_are_put_together_byte_for_byte(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    monkeypatch.setattr(versions, "_PIECE_BYTES", 64)
    monkeypatch.setattr(versions, "_SHARE_MIN", 0.0)
    size = _generated(random.Random(seed), tmp_path)
    before = digest_of(tmp_path / WEIGHTS)
    shared = share_weights(tmp_path)
    assert shared is not None
    sources = [shared.frame, *(tmp_path / VERSION / path for path in shared.files)]
    assemble(sources, shared.ranges, tmp_path / "again")
    assert digest_of(tmp_path / "again") == before
    framed = sum(part.size for part in shared.ranges if part.source == 0)
    assert shared.frame.stat().st_size == framed <= size


async def test_restore_point_holds_no_tensor_that_its_version_has(world: World, make: Make) -> None:
    saved = await trained(world, make)
    for point in (saved.present, *saved.restore_points.values()):
        assert point.assembly is not None
        assert point.assembly.frame.size < 0.1 * point.weights.size
    names = world.blobs.areas(POINTER)
    bytes_stored = sum(
        path.stat().st_size
        for name in names
        for path in (world.folder / "blobs" / "areas" / POINTER / name / "sha256").rglob("*")
        if path.is_file() and path.name in set(saved.blobs())
    )
    assert bytes_stored == sum_bytes([saved.present, *saved.restore_points.values()])


async def test_state_that_stores_whole_weights_is_continued(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(saving, "share_weights", lambda folder: None)
        earlier.setattr(opening, "share_weights", lambda folder: None)
        old = await trained(world, make)
        assert old.present.assembly is None
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(100, 104)))
    new = saved_of(await world.run(make()))
    assert new.steps == old.steps + 1
    assert new.present.assembly is not None
    assert new.restore_points.items() >= old.restore_points.items()


def test_saved_bytes_are_those_that_the_library_writes() -> None:
    draw = torch.Generator().manual_seed(3)
    shapes: tuple[list[int], ...] = ([], [0], [7], [3, 5], [2, 0, 4], [16, 16])
    weights = {
        f"ü {number}.{dtype}": torch.rand(shape, generator=draw).to(dtype)
        for number, shape in enumerate(shapes)
        for dtype in TYPES
    }
    weights["turned"] = torch.rand(4, 6, generator=draw).T
    about = {"headrace": "training state of lineage main"}
    contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
    assert tensors._bytes(weights, about) == save(contiguous, metadata=about)


def word(revision: int, *, of: int = 0, number: int = 1) -> Experience:
    return experience(number, name(of), reward=float(revision + 1), revision=revision, task="t", run=str(number))


def admitted(state: LineageState, *words: Experience) -> None:
    for index, event in enumerate(words):
        state.admit(event, (0, index), START)


def trained_lineage(state: LineageState, *words: Experience) -> None:
    """Train `words` in one step, and publish a version after it."""
    admitted(state, *words)
    step(state)
    state.history = publish(state.history, state.history.next_number, state.steps)
    state.take_report()


def two_words() -> LineageState:
    """Return a state whose version 1 contains revision 0, and version 2 also revision 1. A second run is the
    baseline."""
    state = ledger_on(chain(0))
    trained_lineage(state, experience(9, name(0), reward=9.0, task="t", run="9"), word(0))
    trained_lineage(state, word(1))
    return state


def undone(state: LineageState) -> list[tuple[int, bool]]:
    return [(reversal.revision, reversal.queued) for reversal in state.undone if reversal.experience_id == "e1"]


def test_what_the_weights_lost_is_told_and_the_last_word_is_queued() -> None:
    state = two_words()
    lost = state.go_back(name(1))
    assert lost == {"e1": (1,)}
    assert state.restored == []
    assert state.bus_positions(lost) == {(0, 0): "e1"}
    state.undo(lost, {"e1": word(1)}, START)
    assert undone(state) == [(1, True)]
    assert [item.experience.revision for item in state.waiting] == [1]
    assert state.has_reversals


def test_weights_that_come_forward_restore_it_and_it_waits_no_more() -> None:
    state = two_words()
    state.undo(state.go_back(name(1)), {"e1": word(1)}, START)
    state.take_report()
    before = state.has_reversals
    assert state.go_back(name(2)) == {}
    assert [(restoration.experience_id, restoration.revision) for restoration in state.restored] == [("e1", 1)]
    assert (before, state.has_reversals) == (False, True)
    assert state.waiting == ()


def test_what_was_never_trained_hides_nothing_that_was() -> None:
    state = ledger_on(chain(0))
    admitted(state, experience(5, name(0), reward=None))
    trained_lineage(state, experience(9, name(0), reward=9.0, task="t", run="9"), word(0))
    assert state.go_back(name(0)) == {"e9": (0,), "e1": (0,)}


def test_a_later_word_goes_on_waiting_when_an_earlier_one_is_restored() -> None:
    state = two_words()
    state.undo(state.go_back(name(1)), {}, START)
    admitted(state, word(2))
    state.go_back(name(2))
    assert [item.experience.revision for item in state.waiting] == [2]


@pytest.mark.parametrize("experiences", [{}, {"e1": word(0)}], ids=["gone from the bus", "an earlier word"])
def test_without_the_last_word_nothing_is_queued(experiences: dict[str, Experience]) -> None:
    state = two_words()
    lost = state.go_back(name(0))
    assert lost == {"e1": (0, 1), "e9": (0,)}
    state.undo({"e1": lost["e1"]}, experiences, START)
    assert undone(state) == [(0, False), (1, False)]
    assert state.waiting == ()


def test_it_is_queued_once() -> None:
    """A version that was trained on the experience was refused; the next one might be refused for the same reason."""
    state = two_words()
    state.undo(state.go_back(name(1)), {"e1": word(1)}, START)
    step(state)
    state.history = publish(state.history, 3, state.steps)
    state.take_report()
    state.undo(state.go_back(name(1)), {"e1": word(1)}, START)
    assert undone(state) == [(1, False)]
    assert state.waiting == ()


def test_a_word_that_was_dropped_is_queued_with_what_is_undone() -> None:
    state = two_words()
    state.window.record_arrival("e1", 2, (name(0),), (0, 7), START)
    state.undo(state.go_back(name(1)), {"e1": word(2)}, START)
    assert undone(state) == [(1, False), (2, True)]


def test_a_full_queue_takes_nothing_back() -> None:
    state = two_words()
    lost = state.go_back(name(1))
    full = LineageState(
        state.history, state.limits, MemorySettings(queue_experiences=1), window=state.window, steps=state.steps
    )
    admitted(full, word(0, number=5))
    assert full.room == 0
    assert full.bus_positions(lost) == {}
    full.undo(lost, {"e1": word(1)}, START)
    assert undone(full) == [(1, False)]


def test_what_can_be_trained_again_is_fresh_known_and_not_waiting() -> None:
    state = ledger_on(chain(4))
    admitted(state, *(word(0, of=version, number=version) for version in (1, 2, 3)))
    step(state)
    state.window.put("no place", Entry(revisions=(0,), versions=(name(4),), touched_ms=0))
    waits = word(0, of=4, number=4)
    admitted(state, waits)
    names = ["unknown", "e4", "no place", "e1", "e2", "e3"]
    assert state.bus_positions(names) == {(0, 1): "e2", (0, 2): "e3"}, "two versions back is fresh, three is not"


def entry(*contributions: Contribution) -> Entry:
    return Entry(revisions=(0, 4), versions=(name(0),), contributions=contributions, touched_ms=0)


def gave(
    revision: int, advantage: float, *, step: int = 1, part: str = "", turns: tuple[float, ...] = ()
) -> Contribution:
    detail = ContributionDetail(part=part, turns=turns) if part or turns else None
    return Contribution(revision=revision, step=step, advantage=advantage, what=detail)


@pytest.mark.parametrize(
    ("contributions", "holds"),
    [
        ([], False),
        ([gave(0, 1.0)], True),
        ([gave(0, 1.0), gave(4, -1.0)], False),
        ([gave(0, 1.0), gave(4, -1.0, step=9)], True),
        ([gave(0, 1.0, part="edit"), gave(4, -1.0, part="other")], True),
        ([gave(0, 0.0, turns=(1.0, -1.0))], True),
        ([gave(0, 0.0, turns=(1.0, -1.0)), gave(4, 0.0, turns=(-1.0, 1.0))], False),
        ([gave(0, 0.0, turns=(1.0,)), gave(4, 0.0, turns=(-1.0, 0.0))], False),
    ],
)
def test_an_experience_is_held_while_its_contributions_do_not_cancel_out(
    contributions: list[Contribution], holds: bool
) -> None:
    assert entry(*contributions).affects_weights(chain(1), 1) is holds


def test_the_revisions_that_are_held_are_those_on_the_line_and_an_unknown_one_is_the_newest() -> None:
    revisions = entry(gave(0, 1.0), gave(2, 1.0, step=9)).revisions_in_weights(chain(1), 1)
    assert revisions == {0}
    assert entry(gave(-1, 1.0)).revisions_in_weights(chain(1), 1) == {4}
    assert entry(gave(1, 1.0)).revisions_in_weights(chain(1), 1) == {1}
