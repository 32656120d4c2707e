"""What is read of a model is that model's, and as far as was asked."""

from __future__ import annotations

from sqlalchemy import update

from headrace_registry import store
from headrace_registry.tables import VERSIONS
from tests.unit.registry.rig import MODEL, START
from tests.unit.registry.transitions import NOBODY, OTHER, Book


async def test_a_model_is_read_by_its_name(book: Book) -> None:
    assert await store.model(book.tx, MODEL) is None
    (mine,) = await book.crown(0)
    (theirs,) = await book.crown(0, model=OTHER)
    assert ((await book.model()).champion, (await book.model(OTHER)).champion) == (mine, theirs)
    assert (await book.version(mine)).model == MODEL
    assert await store.version(book.tx, NOBODY) is None


async def test_versions_come_newest_first_and_no_more_than_wanted(book: Book) -> None:
    names = [await book.add(step) for step in (2, 0, 1)]
    await book.add(9, model=OTHER)
    assert [one.version for one in await store.newest(book.tx, MODEL, 10)] == names[::-1]
    assert [one.version for one in await store.newest(book.tx, MODEL, 2)] == [names[2], names[1]]


async def test_only_what_is_withdrawn_is_listed_so_the_last_one_first(book: Book) -> None:
    names = [await book.add(step) for step in range(3)]
    theirs = await book.add(9, model=OTHER)
    await book.transition.withdraw(await book.model(), names[0], "bad")
    await book.transition.withdraw(await book.model(), names[1], "bad")
    await book.transition.withdraw(await book.model(OTHER), theirs, "bad")
    assert await store.withdrawn(book.tx, MODEL, 10) == [names[1], names[0]]
    assert await store.withdrawn(book.tx, MODEL, 1) == [names[1]]


async def test_ancestry_is_the_line_back_to_what_is_not_registered(book: Book) -> None:
    first = await book.add(0, NOBODY)
    second = await book.add(1, first)
    third = await book.add(2, second)
    await book.add(3, second)
    assert await store.ancestry(book.tx, third) == {first, second, third}
    assert await store.ancestry(book.tx, None) == set()
    assert {one.version for one in await store.children(book.tx, [second])} >= {third}


async def test_a_view_has_what_waits_who_has_a_role_and_the_bases(book: Book) -> None:
    previous, champion = await book.crown(0, 1)
    rejected, candidate = await book.add(2), await book.add(3)
    await book.transition.reject(await book.model(), rejected, "worse", {})
    await book.transition.adopt(await book.model(), candidate, ())
    event, manifest = book.checkpoint(4, base=rejected)
    await book.transition.register(event, manifest, None)
    await book.add(5, model=OTHER)
    view = await store.view(book.tx, await book.model(), "gate")
    assert [one.version for one in view.waiting] == [event.version]
    assert {*view.versions} == {previous, champion, candidate, event.version, rejected}


async def test_what_nobody_trains_waits_only_if_somebody_asked_for_it(book: Book) -> None:
    event, manifest = book.checkpoint(0)
    await book.transition.register(event, manifest, None, trained=False)
    assert (await store.view(book.tx, await book.model(), "gate")).waiting == ()
    await book.transition.request(await book.version(event.version), "gate")
    (waiting,) = (await store.view(book.tx, await book.model(), "gate")).waiting
    assert waiting.version == event.version


async def test_a_view_counts_the_rollouts_of_its_model(book: Book) -> None:
    await book.crown(0)
    for begun in range(3):
        view = await store.view(book.tx, await book.model(), "gate", now=START)
        assert (view.under_way, view.slots, view.begun_lately) == (begun, 2 if begun else None, begun)
        if begun < 2:
            await book.roll_out(1 + begun)
    assert (await store.view(book.tx, await book.model(), "gate")).begun_lately == 0, "nobody said what time it is"


async def test_a_version_whose_files_are_gone_says_so(book: Book) -> None:
    kept, gone = [await book.add(step) for step in range(2)]
    await book.tx.execute(update(VERSIONS).where(VERSIONS.c.version == gone).values(collected_ms=1))
    assert [(await book.version(name)).collected for name in (kept, gone)] == [False, True]


async def test_only_the_present_gates_word_on_who_has_a_role_counts(book: Book) -> None:
    previous, champion = await book.crown(0, 1)
    for gate, name in (("gate", champion), ("another gate", previous)):
        await book.transition.evaluated(await book.version(name), gate, {"t": 0.5}, {})
    view = await store.view(book.tx, await book.model(), "gate")
    assert view.audited == {champion}
