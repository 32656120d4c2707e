"""Tests of the coordinators of transactions and groups, and of producer state.

Transactions: fencing, timeouts, offsets and restarts. Producer state: compared with a plain list of accepted batches.
Static group members keep their assignment over a restart (KIP-345). Groups: random orders of requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_broker import reads
from headrace_broker.batch import parse_produced
from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, Phase, restore, serialize
from headrace_broker.log import ProducerState
from headrace_broker.protocol.groups import (
    CommitPartition,
    CommitTopic,
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from headrace_broker.transactions import Owner
from tests.support.wire_client import batch, patched
from tests.unit.broker.conftest import BOTH, RANGE, Clients, Harness

OFFSETS = (CommitTopic("t", (CommitPartition(0, 42, "m"),)),)


def _begin(broker: Harness, partition: int, name: str = "tx", now_ms: int = 0) -> tuple[int, int]:
    producer, epoch = broker.run(lambda: broker.transactions.begin_session(name, 1_000, now_ms))
    broker.run(lambda: broker.transactions.add_partitions(name, producer, epoch, {partition}, now_ms))
    broker.put(partition, (b"k", b"v"), producer_id=producer, epoch=epoch, sequence=0, transactional=True)
    return producer, epoch


def test_producer_ids_are_never_given_twice(broker: Harness) -> None:
    first = [broker.run(broker.transactions.new_producer_id) for _ in range(3)]
    broker.restart()
    assert len({*first, broker.run(broker.transactions.new_producer_id)}) == 4


def test_a_time_out_aborts_and_fences(broker: Harness) -> None:
    (partition,) = broker.topic()
    producer, epoch = _begin(broker, partition)
    broker.run(lambda: broker.transactions.expire(1_000, -1))
    assert broker.log.partition(partition).stable == 0
    broker.run(lambda: broker.transactions.expire(1_001, -1))
    assert broker.log.partition(partition).stable == 2
    assert broker.rows(partition, committed=True) == []
    for late in (
        lambda: broker.transactions.end("tx", producer, epoch, commit=True, now_ms=0),
        lambda: broker.transactions.check_append("tx", partition, producer, epoch),
    ):
        with pytest.raises(Rejected) as caught:
            broker.run(late)
        assert caught.value.code is Code.INVALID_PRODUCER_EPOCH


def test_offsets_become_the_groups_with_the_commit(broker: Harness) -> None:
    (partition,) = broker.topic()
    for commit, expected in ((False, {}), (True, {("t", 0): (42, "m")})):
        producer, epoch = _begin(broker, partition)
        broker.run(lambda p=producer, e=epoch: broker.transactions.commit_offsets("tx", p, e, "g", OFFSETS))  # type: ignore[misc]
        assert reads.read_committed_offsets(broker.reader, "g") == ({}, {("t", 0)})
        broker.run(
            lambda p=producer, e=epoch, c=commit: broker.transactions.end("tx", p, e, commit=c, now_ms=0)  # type: ignore[misc]
        )
        assert reads.read_committed_offsets(broker.reader, "g") == (expected, set())


def test_epochs_run_out_into_a_new_producer_id(broker: Harness) -> None:
    producer, _ = broker.run(lambda: broker.transactions.begin_session("tx", 1_000, 0))
    broker.db.execute("UPDATE transactions SET epoch = 32767")
    broker.transactions.reload()
    again, epoch = broker.run(lambda: broker.transactions.begin_session("tx", 1_000, 0))
    assert (again != producer, epoch) == (True, 0)


def test_ids_that_nobody_uses_are_forgotten(broker: Harness) -> None:
    (partition,) = broker.topic()
    _begin(broker, partition, "open", now_ms=5)
    broker.run(lambda: broker.transactions.begin_session("idle", 1_000, 5))
    broker.run(lambda: broker.transactions.expire(6, 6))
    assert broker.db.execute("SELECT id FROM transactions").fetchall() == [("open",)]


def test_producers_that_went_away_are_forgotten_unless_a_transaction_is_open(broker: Harness) -> None:
    (partition,) = broker.topic()
    producer, _ = _begin(broker, partition)
    broker.put(partition, (b"k", b"v"), producer_id=1, epoch=0, sequence=0)
    broker.run(lambda: broker.log.forget_producers(1))
    assert broker.log.producer(partition, 1) is None
    assert broker.log.producer(partition, producer) is not None


def test_a_transaction_outlives_one_of_its_topics(broker: Harness) -> None:
    (remaining,), (deleted,) = broker.topic("kept"), broker.topic("gone")
    producer, epoch = _begin(broker, remaining)
    broker.run(lambda: broker.transactions.add_partitions("tx", producer, epoch, {deleted}, 0))
    broker.put(deleted, (b"k", b"v"), producer_id=producer, epoch=epoch, sequence=0, transactional=True)
    broker.run(lambda: broker.topics.delete("gone"))
    broker.run(lambda: broker.transactions.end("tx", producer, epoch, commit=True, now_ms=0))
    assert len(broker.rows(remaining, committed=True)) == 1
    broker.restart()


def test_an_owner_gets_its_next_epoch_and_a_predecessor_none(broker: Harness) -> None:
    producer, epoch = broker.run(lambda: broker.transactions.begin_session("tx", 1_000, 0))

    def bump(epoch: int) -> tuple[int, int]:
        return broker.run(lambda: broker.transactions.begin_session("tx", 1_000, 0, Owner(producer, epoch)))

    assert bump(epoch) == (producer, epoch + 1)
    assert bump(epoch) == (producer, epoch + 1)  # it did not hear the answer
    broker.restart()
    assert bump(epoch) == (producer, epoch + 1)
    assert broker.run(lambda: broker.transactions.begin_session("tx", 1_000, 0)) == (producer, epoch + 2)
    for old in (epoch, epoch + 1):  # somebody else took it over
        with pytest.raises(Rejected) as caught:
            bump(old)
        assert caught.value.code is Code.PRODUCER_FENCED


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


class TestStaticMembers:
    def _two(self, clients: Clients) -> tuple[str, str]:
        a, b = clients.join(instance="a"), clients.join(instance="b")
        clients.join(a, instance="a")
        clients.sync(b)
        clients.sync(a, {a: b"1", b: b"2"})
        return a, b

    def test_coming_back_under_a_new_id_keeps_the_assignment(self, clients: Clients) -> None:
        a, b = self._two(clients)
        clients.group.changed = False
        again = clients.join(instance="b")
        assert clients.phase() is Phase.STABLE
        assert clients.group.changed, "its new id is saved"
        assert clients.joined[again] == JoinGroupResponse(0, Code.NONE, 2, "range", a, again, ())
        clients.sync(again)
        assert clients.synced[again].assignment == b"2"
        assert clients.heartbeat(b) is Code.UNKNOWN_MEMBER_ID
        assert clients.heartbeat(a) is Code.NONE

    def test_a_leader_that_comes_back_does_not_assign_anew(self, clients: Clients) -> None:
        a, _ = self._two(clients)
        again = clients.join(instance="a")
        assert clients.joined[again].leader == a != again
        assert clients.group.leader == again

    def test_coming_back_with_another_subscription_rebalances(self, clients: Clients) -> None:
        self._two(clients)
        again = clients.join(instance="b", protocols=(Protocol("range", b"other topics"),))
        assert clients.phase() is Phase.PREPARING
        assert again not in clients.joined

    def test_coming_back_during_a_rebalance_joins_it(self, clients: Clients) -> None:
        self._two(clients)
        clients.join(instance="c")
        again = clients.join(instance="b")
        assert clients.phase() is Phase.PREPARING
        assert again not in clients.joined

    def test_what_the_old_id_waits_for_is_answered_as_fenced(self, clients: Clients) -> None:
        a, b = self._two(clients)
        clients.join(b, instance="b", protocols=(Protocol("range", b"other topics"),))
        clients.joined.pop(b)
        clients.join(instance="b")
        assert clients.joined[b] == JoinGroupResponse(0, Code.FENCED_INSTANCE_ID, -1, "", "", b, ())
        clients.join(a, instance="a")
        clients.sync(a_follower := next(m for m in clients.group.members if m != clients.group.leader))
        clients.join(instance="b" if a_follower != a else "a")
        assert clients.synced[a_follower] == SyncGroupResponse(0, Code.FENCED_INSTANCE_ID, b"")

    def test_a_sync_names_the_right_instance(self, clients: Clients) -> None:
        _, b = self._two(clients)
        clients.synced.clear()
        request = SyncGroupRequest("g", 2, b, "b", ())
        clients.group.sync(request, partial(clients.synced.__setitem__, b), clients.now)
        assert clients.synced[b].assignment == b"2"
        with pytest.raises(Rejected) as caught:
            clients.group.sync(request._replace(group_instance_id="a"), lambda _: None, clients.now)
        assert caught.value.code is Code.FENCED_INSTANCE_ID

    def test_one_that_comes_late_waits_for_the_others_that_are_late(self, clients: Clients) -> None:
        a, b = self._two(clients)
        c = clients.join(instance="c", session_s=300)
        clients.group.leave(c, clients.now)
        for member in clients.group.members.values():
            member.expires_s = clients.now + 300
        clients.pass_time(20.1)
        clients.join(b, instance="b", session_s=300)
        clients.pass_time(19)
        assert clients.phase() is Phase.PREPARING
        clients.join(a, instance="a")
        assert clients.phase() is Phase.COMPLETING
        assert len(clients.joined[clients.group.leader].members) == 2

    def test_an_id_with_the_wrong_instance_is_fenced(self, clients: Clients) -> None:
        a, _ = self._two(clients)
        with pytest.raises(Rejected) as caught:
            clients.join(a, instance="b")
        assert caught.value.code is Code.FENCED_INSTANCE_ID

    def test_late_ones_keep_their_place_until_their_session_ends(self, clients: Clients) -> None:
        a, b = self._two(clients)
        clients.group.leave(a, clients.now)
        for _ in range(3):
            clients.pass_time(8)
            clients.group.members[b].expires_s = clients.now + 10
        assert clients.phase() is Phase.PREPARING
        assert list(clients.group.members) == [b]
        clients.pass_time(11)
        assert clients.phase() is Phase.EMPTY


class GroupMachine(RuleBasedStateMachine):
    """Hypothesis state machine of a group: every request gets a response, and members of a stable group agree."""

    def __init__(self) -> None:
        super().__init__()
        self.clients = Clients(Group("g", members_max=4))
        self.waiting: dict[str, float] = {}

    def _try(self, request: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return request(*arguments, **options)
        except Rejected:
            return None

    @rule(instance=st.none() | st.sampled_from(["i", "j"]), protocols=st.sampled_from([RANGE, BOTH]))
    def join(self, instance: str | None, protocols: tuple[Protocol, ...]) -> None:
        self._try(self.clients.join, instance=instance, protocols=protocols)

    @precondition(lambda self: self.clients.group.members)
    @rule(data=st.data(), protocols=st.sampled_from([RANGE, BOTH]))
    def rejoin(self, data: st.DataObject, protocols: tuple[Protocol, ...]) -> None:
        member = data.draw(st.sampled_from(sorted(self.clients.group.members)))
        instance = self.clients.group.members[member].instance_id
        self._try(self.clients.join, member, instance=instance, protocols=protocols)

    @precondition(lambda self: self.clients.joined)
    @rule(data=st.data(), action=st.sampled_from(["sync", "heartbeat", "leave"]))
    def act(self, data: st.DataObject, action: str) -> None:
        member = data.draw(st.sampled_from(sorted(self.clients.joined)))
        if action == "sync":
            everybody = {m: m.encode() for m in self.clients.group.members}
            leads = member == self.clients.group.leader
            self._try(self.clients.sync, member, everybody if leads else None)
        elif action == "heartbeat":
            self.clients.heartbeat(member)
        else:
            self._try(self.clients.group.leave, member, self.clients.now)

    @rule(seconds=st.sampled_from([1.0, 9.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.clients.pass_time(seconds)

    @invariant()
    def nobody_waits_longer_than_a_rebalance(self) -> None:
        group, now = self.clients.group, self.clients.now
        for member in group.members.values():
            if member.joining or member.syncing:
                assert group.phase in (Phase.PREPARING, Phase.COMPLETING)
                assert now <= group.rebalance_ends_s

    @invariant()
    def phases_are_what_they_say(self) -> None:
        group = self.clients.group
        assert bool(group.members) == (group.phase is not Phase.EMPTY)
        assert len(group.members) <= 4
        assert all(key == member.id for key, member in group.members.items())
        if group.phase in (Phase.COMPLETING, Phase.STABLE):
            assert group.leader in group.members
            assert all(group.protocol in {p.name for p in m.protocols} for m in group.members.values())
        if group.phase is Phase.STABLE:
            copy = Group("g")
            restore(copy, serialize(group), now_s=0)
            assert serialize(copy) == serialize(group)
            members = [replace(m, expires_s=0.0, joining=None, syncing=None) for m in group.members.values()]
            assert [replace(m, expires_s=0.0) for m in copy.members.values()] == members


GroupMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAnyOrder = GroupMachine.TestCase
