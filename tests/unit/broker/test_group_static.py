"""Static members of a group, which keep their assignment over a restart (KIP-345)."""

from __future__ import annotations

from functools import partial

import pytest

from headrace_broker.errors import Code, Rejected
from headrace_broker.group import Phase
from headrace_broker.protocol.groups import (
    JoinGroupResponse,
    Protocol,
    SyncGroupRequest,
    SyncGroupResponse,
)
from tests.unit.broker.group_clients import Clients


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
