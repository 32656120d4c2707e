"""Tests of the consumer group's state machine, with a clock that the test controls."""

from __future__ import annotations

import pytest

from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Group, GroupMember, Phase, restore, serialize
from headrace_broker.protocol.groups import (
    JoinedMember,
    JoinGroupRequest,
    JoinGroupResponse,
    Protocol,
    SyncGroupResponse,
)
from tests.unit.broker.conftest import BOTH, RANGE, Clients


def test_one_member(clients: Clients) -> None:
    a = clients.join()
    answer = clients.joined[a]
    assert (answer.generation_id, answer.leader, answer.protocol_name) == (1, a, "range")
    assert [m.member_id for m in answer.members] == [a]
    assert clients.phase() is Phase.COMPLETING
    assert not clients.group.changed, "nothing to save before the assignments"
    clients.sync(a, {a: b"all"})
    assert clients.synced[a] == SyncGroupResponse(0, Code.NONE, b"all")
    assert clients.phase() is Phase.STABLE
    assert clients.group.changed


def test_a_second_member_has_everybody_join_again(clients: Clients) -> None:
    a = clients.join()
    clients.sync(a, {a: b"all"})
    b = clients.join()
    assert b not in clients.joined
    assert clients.heartbeat(a) is Code.REBALANCE_IN_PROGRESS
    clients.join(a)
    assert clients.joined[b].generation_id == clients.joined[a].generation_id == 2
    assert {m.member_id for m in clients.joined[a].members} == {a, b}
    assert clients.joined[b].members == ()
    clients.sync(b)
    assert b not in clients.synced
    clients.sync(a, {a: b"1", b: b"2"})
    assert clients.synced[b].assignment == b"2"


def test_who_waits_to_join_is_not_silent(clients: Clients) -> None:
    """A pending JoinGroup request keeps its member alive, because the member cannot send heartbeats while it waits."""
    a = clients.join(rebalance_s=30, session_s=60)
    clients.sync(a, {a: b"all"})
    b = clients.join(session_s=10)
    clients.pass_time(12)
    assert b not in clients.joined
    assert set(clients.group.members) == {a, b}
    clients.join(a)
    clients.pass_time(2)
    assert clients.joined[b].error_code == Code.NONE
    assert {m.member_id for m in clients.joined[a].members} == {a, b}


def test_who_waits_for_its_assignment_is_not_silent(clients: Clients) -> None:
    a = clients.join(rebalance_s=30, session_s=60)
    clients.sync(a, {a: b"all"})
    b = clients.join(session_s=10)
    clients.join(a, rebalance_s=30, session_s=60)
    clients.sync(b)
    clients.pass_time(12)
    assert b not in clients.synced
    clients.sync(a, {a: b"1", b: b"2"})
    assert clients.synced[b].assignment == b"2"


def test_who_does_not_join_again_in_time_is_out(clients: Clients) -> None:
    a = clients.join(rebalance_s=5, session_s=60)
    clients.sync(a, {a: b"all"})
    b = clients.join(rebalance_s=5, session_s=60)
    clients.pass_time(4.9)
    assert b not in clients.joined
    clients.pass_time(0.2)
    assert clients.joined[b].leader == b
    assert clients.heartbeat(a) is Code.UNKNOWN_MEMBER_ID


def test_a_silent_member_is_removed_and_the_others_hear_of_it(clients: Clients) -> None:
    a, b = clients.join(), clients.join()
    clients.settle(a, b)
    for _ in range(4):
        clients.pass_time(3)
        code = clients.heartbeat(a)
    assert code is Code.REBALANCE_IN_PROGRESS
    clients.join(a)
    assert [m.member_id for m in clients.joined[a].members] == [a]


def test_heartbeats_keep_a_member_for_ever(clients: Clients) -> None:
    a = clients.join()
    clients.sync(a)
    for _ in range(100):
        clients.pass_time(9)
        assert clients.heartbeat(a) is Code.NONE


def test_leaving_ends_the_wait_of_the_others(clients: Clients) -> None:
    a, b = clients.join(), clients.join()
    clients.settle(a, b)
    clients.group.leave(a, clients.now)
    assert clients.heartbeat(b) is Code.REBALANCE_IN_PROGRESS
    clients.join(b)
    assert clients.joined[b].leader == b
    clients.sync(b, {b: b"all"})
    clients.group.changed = False
    clients.group.leave(b, clients.now)
    assert clients.phase() is Phase.EMPTY
    assert clients.group.changed, "that nobody is left is saved"
    assert clients.group.generation == 4


def test_a_leader_that_never_assigns_does_not_hold_the_group(clients: Clients) -> None:
    a, b = clients.join(rebalance_s=5), clients.join(rebalance_s=5)
    clients.join(a, rebalance_s=5)
    clients.sync(b)
    for _ in range(3):
        clients.pass_time(2)
        clients.heartbeat(a)
    assert clients.synced[b].error_code == Code.REBALANCE_IN_PROGRESS
    clients.join(b, rebalance_s=5)
    assert clients.joined[b].leader == b


def test_a_lost_answer_is_given_again(clients: Clients) -> None:
    a = clients.join()
    first = clients.joined.pop(a)
    clients.join(a)
    assert clients.joined[a] == first
    clients.sync(a, {a: b"all"})
    clients.synced.clear()
    clients.sync(a)
    assert clients.synced[a].assignment == b"all"


def test_a_follower_that_joins_again_unchanged_changes_nothing(clients: Clients) -> None:
    a, b = clients.join(), clients.join()
    clients.settle(a, b)
    follower = b if clients.group.leader == a else a
    clients.join(follower)
    assert clients.phase() is Phase.STABLE
    clients.join(clients.group.leader)
    assert clients.phase() is Phase.PREPARING


def test_only_the_last_of_two_equal_requests_waits(clients: Clients) -> None:
    a = clients.join()
    clients.sync(a, {a: b"all"})
    b = clients.join()
    clients.join(b)
    assert clients.joined[b] == JoinGroupResponse(0, Code.REBALANCE_IN_PROGRESS, -1, "", "", b, ())
    clients.join(a)
    assert clients.joined[b].error_code == Code.NONE
    clients.sync(b)
    clients.sync(b)
    assert clients.synced[b] == SyncGroupResponse(0, Code.REBALANCE_IN_PROGRESS, b"")


def test_who_leaves_while_it_waits_hears_that_it_is_no_member(clients: Clients) -> None:
    a = clients.join()
    clients.sync(a, {a: b"all"})
    b = clients.join()
    clients.group.leave(b, clients.now)
    assert clients.joined[b] == JoinGroupResponse(0, Code.UNKNOWN_MEMBER_ID, -1, "", "", b, ())
    b = clients.join()
    clients.join(a)
    clients.sync(b)
    clients.group.leave(b, clients.now)
    assert clients.synced[b] == SyncGroupResponse(0, Code.UNKNOWN_MEMBER_ID, b"")


def test_the_leader_learns_what_each_member_subscribes_to(clients: Clients) -> None:
    a = clients.join(protocols=BOTH)
    clients.sync(a)
    b = clients.join(protocols=(Protocol("range", b"its topics"),))
    clients.join(a, protocols=BOTH)
    listed = (JoinedMember(a, None, b"r"), JoinedMember(b, None, b"its topics"))
    assert clients.joined[a] == JoinGroupResponse(0, Code.NONE, 2, "range", a, a, listed)


def test_who_has_been_there_longest_leads_when_the_leader_is_gone(clients: Clients) -> None:
    a, b, c = clients.join(), clients.join(), clients.join()
    clients.settle(a, b, c)
    clients.group.leave(a, clients.now)
    clients.join(c)
    clients.join(b)
    assert clients.group.leader == b


def test_a_time_is_over_when_it_has_passed_not_when_it_is_reached(clients: Clients) -> None:
    with pytest.raises(Rejected):
        clients.group.join(*_first_call("x", expires_s=4), lambda _: None, 0)
    clients.pass_time(4)
    a = clients.join("x", session_s=10, rebalance_s=20)
    clients.sync(a)
    clients.pass_time(10)
    assert clients.heartbeat(a) is Code.NONE
    b = clients.join(session_s=60)
    clients.pass_time(10)
    clients.heartbeat(a)
    clients.pass_time(10)
    assert set(clients.group.members) == {a, b}, "20 s to join again"
    clients.join(a, session_s=60)
    clients.sync(b)
    clients.pass_time(20)
    assert set(clients.group.members) == {a, b}, "20 s to assign"
    clients.pass_time(0.1)
    assert set(clients.group.members) == {b}


def _first_call(member_id: str, expires_s: float) -> tuple[JoinGroupRequest, GroupMember]:
    request = JoinGroupRequest("g", 10_000, 10_000, "", None, "consumer", RANGE)
    return request, GroupMember(member_id, None, "c", "h", 10, 10, RANGE, expires_s=expires_s)


def test_changed_subscriptions_rebalance(clients: Clients) -> None:
    a, b = clients.join(), clients.join()
    clients.settle(a, b)
    follower = b if clients.group.leader == a else a
    clients.join(follower, protocols=(Protocol("range", b"other topics"),))
    assert clients.phase() is Phase.PREPARING


def test_the_protocol_that_all_know_and_most_like(clients: Clients) -> None:
    a = clients.join(protocols=BOTH)
    assert clients.joined[a].protocol_name == "sticky"
    clients.sync(a)
    b = clients.join(protocols=RANGE)
    clients.join(a, protocols=BOTH)
    assert clients.joined[b].protocol_name == "range"
    with pytest.raises(Rejected) as caught:
        clients.join(protocols=(Protocol("cooperative", b""),))
    assert caught.value.code is Code.INCONSISTENT_GROUP_PROTOCOL


def test_ids_that_nobody_came_back_with_are_forgotten(clients: Clients) -> None:
    with pytest.raises(Rejected) as caught:
        clients.group.join(*_first_call("x", expires_s=10), lambda _: None, 0)
    assert caught.value.code is Code.MEMBER_ID_REQUIRED
    clients.pass_time(11)
    with pytest.raises(Rejected) as caught:
        clients.join("x")
    assert caught.value.code is Code.UNKNOWN_MEMBER_ID


def test_a_full_group(clients: Clients) -> None:
    clients.group.members_max = 1
    clients.join()
    with pytest.raises(Rejected) as caught:
        clients.join()
    assert caught.value.code is Code.GROUP_MAX_SIZE_REACHED


def test_ids_that_were_given_out_fill_a_group_too(clients: Clients) -> None:
    clients.group.members_max = 2
    clients.join()
    with pytest.raises(Rejected):
        clients.group.join(*_first_call("x", expires_s=10), lambda _: None, 0)
    with pytest.raises(Rejected) as caught:
        clients.join()
    assert caught.value.code is Code.GROUP_MAX_SIZE_REACHED
    clients.group.leave("x", clients.now)
    clients.join()
    assert len(clients.group.members) == 2


def test_commits(clients: Clients) -> None:
    group = clients.group
    group.check_commit("", -1, 0)
    with pytest.raises(Rejected) as caught:
        group.check_commit("", 0, 0)
    assert caught.value.code is Code.UNKNOWN_MEMBER_ID, "who names a generation says that it is a member"
    a = clients.join()
    with pytest.raises(Rejected, match="REBALANCE"):
        group.check_commit(a, 1, 0)
    clients.sync(a)
    group.check_commit(a, 1, 0)
    for member, generation, code in (
        (a, 2, Code.ILLEGAL_GENERATION),
        ("x", 1, Code.UNKNOWN_MEMBER_ID),
        ("", -1, Code.UNKNOWN_MEMBER_ID),
    ):
        with pytest.raises(Rejected) as caught:
            group.check_commit(member, generation, 0)
        assert caught.value.code is code


def test_a_restart_costs_no_rebalance(clients: Clients) -> None:
    a, b = clients.join(), clients.join(instance="b")
    clients.join(a)
    clients.sync(b)
    clients.sync(a, {a: b"1", b: b"2"})
    again = Clients(Group("g"))
    restore(again.group, serialize(clients.group), now_s=100.0)
    again.joined, again.now = clients.joined, 100.0
    assert again.heartbeat(a) is again.heartbeat(b) is Code.NONE
    again.sync(b)
    assert again.synced[b].assignment == b"2"
    assert (again.group.generation, again.group.leader) == (2, a)
    again.pass_time(10.1)
    assert again.phase() is Phase.EMPTY, "who is not heard of after the restart is out"


def test_who_commits_in_a_transaction_is_a_member_of_this_generation(clients: Clients) -> None:
    a = clients.join(instance="one")
    clients.sync(a, {a: b"all"})
    clients.group.check_member(a, 1, "one")
    for member, generation, instance, code in (
        (a, 0, "one", Code.ILLEGAL_GENERATION),
        ("other", 1, None, Code.UNKNOWN_MEMBER_ID),
        ("other", 1, "one", Code.FENCED_INSTANCE_ID),
    ):
        with pytest.raises(Rejected) as caught:
            clients.group.check_member(member, generation, instance)
        assert caught.value.code is code
    clients.join()  # a rebalance on its way refuses nothing: who comes next waits for the transaction
    clients.group.check_member(a, 1, "one")
