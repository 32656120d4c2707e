"""Conditions of a rollout, whichever process dies: of each routing, of their sequence, of the decisions, of the calls,
and
of the bus compared with the database. Each function returns the violations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from headrace_registry.storage import rollout_store, store
from headrace_registry.versions import routing as routings
from headrace_runtime.storage.database import Database
from headrace_schemas import ModelEvent, Routing
from headrace_schemas.events.routing import TrafficSplit
from headrace_schemas.rules.assignment import assign_unit
from tests.rollouts.visitors import Call, key_of

SOON_S = 10.0
"""Limit within which every process has received a decision, on a machine that others use."""


def contradictions(routing: Routing) -> list[str]:
    """Champion, arms, withdrawn and served versions of one record fit together."""
    arms = [arm.version for arm in routing.split.arms] if routing.split else []
    served = {routed.version for routed in routing.serve}
    canary = routing.aliases.get("canary")
    by_problem: dict[str, set[str | None]] = {
        "an arm or an alias is withdrawn": {
            routed for routed in (*arms, *routing.aliases.values()) if routed in routing.withdrawn
        },
        "the champion is an arm": {routing.champion} & set(arms),
        "somebody who has users is not served": {
            routed for routed in (*arms, *routing.aliases.values()) if routed not in served
        },
        "a name is of somebody who is not served": {
            routed for routed in routing.names.values() if routed not in served
        },
        "arms without a canary": {routed for routed in arms if canary is None},
        "the canary is the champion": {routing.champion} & {canary or ""},
        "the canary has no arm": {routed for routed in (canary,) if arms and canary not in arms},
    }
    return [
        f"revision {routing.revision}: {problem}: {sorted(map(str, versions))}"
        for problem, versions in by_problem.items()
        if versions
    ]


def in_a_row(seen: Sequence[Routing]) -> list[str]:
    """Check the routings of one model in their order: revisions grow, a champion was on trial before, a withdrawal is
    final."""
    problems = [problem for routing in seen for problem in contradictions(routing)]
    by_revision: dict[int, Routing] = {}
    for routing in seen:
        before = by_revision.setdefault(routing.revision, routing)
        if before != routing:
            problems.append(f"revision {routing.revision} was said twice and differently")
    distinct = list(by_revision.values())
    for routing, then in pairwise(distinct):
        if then.revision <= routing.revision:
            problems.append(f"revision {then.revision} came after {routing.revision}")
        if routing.champion and then.champion != routing.champion and then.champion != routing.aliases.get("canary"):
            problems.append(f"revision {then.revision}: {then.champion} is champion and was not on trial")
        back = set(routing.withdrawn) - set(then.withdrawn)
        if back:
            problems.append(f"revision {then.revision}: {sorted(back)} were withdrawn and are back")
        problems += _moved(routing, then)
    return problems


def _moved(later: Routing, then: Routing) -> list[str]:
    """Check that a candidate keeps its sessions under way: salt and slot stay, its share does not shrink."""
    before = {arm.version: arm for arm in later.split.arms} if later.split else {}
    after = {arm.version: arm for arm in then.split.arms} if then.split else {}
    return [
        f"revision {then.revision}: {version} has other users"
        for version in before.keys() & after.keys()
        if later.split is not None
        and then.split is not None
        and (later.split.salt, before[version].slot) != (then.split.salt, after[version].slot)
    ]


def once(decisions: Sequence[ModelEvent]) -> list[str]:
    """Check that no two of the distinct decisions are the same step."""
    steps = Counter(
        (decision.version, decision.rollout.kind, decision.rollout.stage) for decision in decisions if decision.rollout
    )
    plain = Counter(
        (decision.version, decision.decision)
        for decision in decisions
        if not decision.rollout and decision.decision != "evaluated"
    )
    return [f"{number} times: {action}" for counts in (steps, plain) for action, number in counts.items() if number > 1]


def heard_by(calls: Iterable[Call], split: TrafficSplit, champion: str, withdrawn: str, told_s: float) -> float | None:
    """Return the seconds until the gateway has the decision: until a session that the split would have given the
    withdrawn
    version began and was answered by another one. Sessions from before the rollout do not count.
    """
    sessions: set[str] = set()
    delays_s = []
    for call in calls:
        fresh = call.session not in sessions and call.began_s > told_s
        if fresh and call.version != withdrawn and assign_unit(split, champion, key_of(call.session))[0] == withdrawn:
            delays_s.append(call.ended_s)
        sessions.add(call.session)
    return min(delays_s, default=None)


def answered_by(calls: Iterable[Call], withdrawn: str, heard_s: float) -> list[str]:
    """Calls that a version answered that was out."""
    late = [call for call in calls if call.version == withdrawn and call.began_s > heard_s]
    return [f"{call.session} was answered by {withdrawn} {call.began_s - heard_s:.1f} s after" for call in late]


async def as_stored(
    database: Database, model: str, ended: str, routing: Routing | None, decisions: Sequence[ModelEvent]
) -> list[str]:
    """Check that bus and database agree in the end, and that the rollout of `ended` is over."""
    if not decisions:
        return [f"nothing was decided about {model}"]
    async with database.transaction() as tx:
        record = await store.load_model(tx, model)
        versions = [version for version in await store.all_versions(tx) if version.model == model]
        under_way = await rollout_store.rollouts_under_way(tx, model)
        decided = await store.decisions(tx, [version.version for version in versions])
        expected = await routings._current_routing(tx, decisions[-1].time, record) if record else None
    if record is None or routing is None or expected is None:
        return [f"nothing is known of {model}"]
    problems = []
    if routings._comparable(routing) != routings._comparable(expected):
        problems.append(f"the bus has {routing}, the tables say {expected}")
    if {version.decision_id for version in decided} != {version.decision_id for version in decisions}:
        problems.append(f"{len(decided)} decisions are stored, {len(decisions)} were told")
    if ended in {version.version for version in under_way}:
        problems.append(f"{ended} is still under way")
    promoted = [version.version for version in decisions if version.decision == "promoted"]
    if promoted and promoted[-1] != record.champion:
        problems.append(f"{promoted[-1]} was promoted last, and {record.champion} is champion")
    out = {version.version for version in versions if version.state == "withdrawn"}
    if out != set(routing.withdrawn):
        problems.append(f"withdrawn are {sorted(out)}, the bus says {sorted(routing.withdrawn)}")
    return problems
