"""Producer state of a partition, compared with a plain list of accepted batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_broker.batch import parse_produced
from headrace_broker.errors import Code, Rejected
from headrace_broker.idempotence import ProducerState
from tests.support.record_batches import batch, patched


def _accept(producer: ProducerState, sequence: int, count: int, offset: int, epoch: int = 0) -> None:
    sent = parse_produced(batch([(None, b"x")] * count, producer_id=1, epoch=epoch, sequence=sequence))
    assert producer.duplicate_of(sent) is None
    producer.note(sent, offset, now_ms=1)


@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=12), start=st.integers(0, 100))
def test_the_last_five_are_duplicates_and_the_next_is_next(counts: list[int], start: int) -> None:
    producer = ProducerState(0)
    sent = []
    sequence = start
    for offset, count in enumerate(counts):
        _accept(producer, sequence, count, offset * 10)
        sent.append((sequence, count, offset * 10))
        sequence += count
    for known_sequence, count, offset in sent[-5:]:
        stored = parse_produced(batch([(None, b"x")] * count, producer_id=1, epoch=0, sequence=known_sequence))
        assert producer.duplicate_of(stored) == offset
    for known_sequence, count, _ in sent[:-5]:
        _refuses(producer, known_sequence, count, 0, Code.OUT_OF_ORDER_SEQUENCE)
    _refuses(producer, sequence + 1, 1, 0, Code.OUT_OF_ORDER_SEQUENCE)
    _accept(producer, sequence, 1, 999)


def _refuses(producer: ProducerState, sequence: int, count: int, epoch: int, code: Code) -> None:
    sent = parse_produced(batch([(None, b"x")] * count, producer_id=1, epoch=epoch, sequence=sequence))
    with pytest.raises(Rejected) as caught:
        producer.duplicate_of(sent)
    assert caught.value.code is code


def test_a_new_epoch_starts_at_zero_and_ends_the_old_one() -> None:
    producer = ProducerState(0)
    _accept(producer, 0, 3, 0)
    _refuses(producer, 3, 1, 1, Code.OUT_OF_ORDER_SEQUENCE)
    _accept(producer, 0, 1, 3, epoch=1)
    _refuses(producer, 3, 1, 0, Code.INVALID_PRODUCER_EPOCH)
    _refuses(producer, 0, 3, 0, Code.INVALID_PRODUCER_EPOCH)


def test_a_duplicate_has_the_same_length() -> None:
    producer = ProducerState(0)
    _accept(producer, 0, 3, 0)
    _refuses(producer, 0, 2, 0, Code.OUT_OF_ORDER_SEQUENCE)


@pytest.mark.parametrize(
    ("last", "count", "following"),
    [(2**31 - 2, 3, 1), (2**31 - 1, 1, 0), (2**31 - 2, 1, 2**31 - 1), (2**30, 1, 2**30 + 1)],
)
def test_sequences_wrap_behind_the_largest_int32(last: int, count: int, following: int) -> None:
    producer = ProducerState(0)
    _accept(producer, last, count, 0)
    wrapped = parse_produced(patched(batch(producer_id=1, epoch=0, sequence=following)))
    assert producer.duplicate_of(wrapped) is None


def test_a_transaction_is_open_from_its_first_batch_on() -> None:
    producer = ProducerState(0)
    _accept(producer, 0, 1, 10)
    assert producer.open_from is None
    for sequence, offset in ((1, 20), (2, 30)):
        sent = batch(producer_id=1, epoch=0, sequence=sequence, transactional=True)
        producer.note(parse_produced(sent), offset, now_ms=1)
        assert producer.open_from == 20


def test_it_survives_being_packed() -> None:
    producer = ProducerState(2)
    for number in range(7):
        _accept(producer, number, 1, number, epoch=2)
    again = ProducerState.unpacked(2, producer.packed(), None, 1)
    assert again == producer
