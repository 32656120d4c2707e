"""The history of champions: whom a rollback goes back to, also the second one in a row."""

from __future__ import annotations

from sqlalchemy import select

from headrace_registry import store
from headrace_registry.tables import CHAMPIONS
from tests.unit.registry.rig import MODEL
from tests.unit.registry.transitions import Book


async def _back(book: Book) -> tuple[str | None, str | None]:
    await book.transition.roll_back(await book.model(), "worse")
    model = await book.model()
    return model.champion, model.previous


async def test_rollbacks_in_a_row_go_back_champion_by_champion(book: Book) -> None:
    first, second, third, _ = await book.crown(0, 1, 2, 3)
    assert await _back(book) == (third, second)
    assert await _back(book) == (second, first)
    assert await _back(book) == (first, None)


async def test_a_withdrawn_champion_is_passed_over_at_once(book: Book) -> None:
    """Before there was a history, nobody was left to go back to."""
    first = await book.add(0)
    await book.transition.promote(await book.model(), first, "", {})
    line = [first]
    for step in (1, 2):
        one = await book.add(step)  # a sibling, not a child: withdrawing one leaves the other
        await book.transition.promote(await book.model(), one, "", {})
        line.append(one)
    await book.transition.withdraw(await book.model(), line[1], "complaints")
    assert (await book.model()).previous == first
    assert await _back(book) == (first, None)


async def test_who_reigned_twice_is_gone_back_to_once(book: Book) -> None:
    first, second = [await book.add(step) for step in (0, 1)]
    for version in (first, second, first):
        await book.transition.promote(await book.model(), version, "", {})
    assert (await book.model()).previous == second
    assert await _back(book) == (second, None), "the first one is withdrawn"
    left = list((await book.tx.execute(select(CHAMPIONS.c.version))).scalars())
    assert left == [first, second]


async def test_a_version_that_is_up_for_promotion_again_is_nobody_to_go_back_to(book: Book) -> None:
    first, second, _ = await book.crown(0, 1, 2)
    await book.transition.request(await book.version(second), "gate")
    assert await store.heir(book.tx, MODEL, (await book.model()).champion) == first
