"""What has to hold of a rollout whoever dies: of each routing, of all of them together, of the decisions, of the calls,
and of the bus beside the database. Each function returns what does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from headrace_registry import routing as routings
from headrace_registry import store
from headrace_registry.rollouts import kept
from headrace_runtime.database import Database
from headrace_schemas import ModelEvent, Routing
from headrace_schemas.assignment import assign_unit
from headrace_schemas.events.routing import TrafficSplit
from tests.rollouts.visitors import Call, key_of

SOON_S = 10.0
"""After so long everybody has heard of a decision, on a machine that does other things beside."""


def whole(routing: Routing) -> list[str]:
    """Champion, arms, withdrawn and served versions of one record fit together."""
    arms = [arm.version for arm in routing.split.arms] if routing.split else []
    served = {one.version for one in routing.serve}
    canary = routing.aliases.get("canary")
    found: dict[str, set[str | None]] = {
        "an arm or an alias is withdrawn": {
            one for one in (*arms, *routing.aliases.values()) if one in routing.withdrawn
        },
        "the champion is an arm": {routing.champion} & set(arms),
        "somebody who has users is not served": {
            one for one in (*arms, *routing.aliases.values()) if one not in served
        },
        "a name is of somebody who is not served": {one for one in routing.names.values() if one not in served},
        "arms without a canary": {one for one in arms if canary is None},
        "the canary is the champion": {routing.champion} & {canary or ""},
        "the canary has no arm": {one for one in (canary,) if arms and canary not in arms},
    }
    return [f"revision {routing.revision}: {what}: {sorted(map(str, who))}" for what, who in found.items() if who]


def in_a_row(seen: Sequence[Routing]) -> list[str]:
    """The records of one model, as they came: revisions grow, a champion was on trial before, who is out stays out."""
    found = [problem for one in seen for problem in whole(one)]
    known: dict[int, Routing] = {}
    for one in seen:
        before = known.setdefault(one.revision, one)
        if before != one:
            found.append(f"revision {one.revision} was said twice and differently")
    distinct = list(known.values())
    for one, then in pairwise(distinct):
        if then.revision <= one.revision:
            found.append(f"revision {then.revision} came after {one.revision}")
        if one.champion and then.champion != one.champion and then.champion != one.aliases.get("canary"):
            found.append(f"revision {then.revision}: {then.champion} is champion and was not on trial")
        back = set(one.withdrawn) - set(then.withdrawn)
        if back:
            found.append(f"revision {then.revision}: {sorted(back)} were withdrawn and are back")
        found += _moved(one, then)
    return found


def _moved(one: Routing, then: Routing) -> list[str]:
    """Whom a candidate has must not change while it is under way: salt and slot stay, its share does not shrink."""
    before = {arm.version: arm for arm in one.split.arms} if one.split else {}
    after = {arm.version: arm for arm in then.split.arms} if then.split else {}
    return [
        f"revision {then.revision}: {version} has other users"
        for version in before.keys() & after.keys()
        if one.split is not None
        and then.split is not None
        and (one.split.salt, before[version].slot) != (then.split.salt, after[version].slot)
    ]


def once(told: Sequence[ModelEvent]) -> list[str]:
    """`told` are the distinct decisions: no two of them are the same step."""
    steps = Counter((one.version, one.rollout.kind, one.rollout.stage) for one in told if one.rollout)
    plain = Counter((one.version, one.decision) for one in told if not one.rollout and one.decision != "evaluated")
    return [f"{number} times: {what}" for counts in (steps, plain) for what, number in counts.items() if number > 1]


def heard_by(calls: Iterable[Call], split: TrafficSplit, champion: str, gone: str, told_s: float) -> float | None:
    """When the gateway is seen to have the decision: a session whom the split would have given the version `gone` began
    after it was told, and was answered by another one. Sessions from before the rollout are no part of it."""
    known: set[str] = set()
    heard = []
    for call in calls:
        fresh = call.session not in known and call.began_s > told_s
        if fresh and call.version != gone and assign_unit(split, champion, key_of(call.session))[0] == gone:
            heard.append(call.ended_s)
        known.add(call.session)
    return min(heard, default=None)


def answered_by(calls: Iterable[Call], gone: str, heard_s: float) -> list[str]:
    """Calls that a version answered that was out."""
    late = [call for call in calls if call.version == gone and call.began_s > heard_s]
    return [f"{call.session} was answered by {gone} {call.began_s - heard_s:.1f} s after" for call in late]


async def as_stored(
    database: Database, model: str, ended: str, shown: Routing | None, told: Sequence[ModelEvent]
) -> list[str]:
    """The bus says in the end what the database says, and the rollout of `ended` is over."""
    if not told:
        return [f"nothing was decided about {model}"]
    async with database.transaction() as tx:
        record = await store.model(tx, model)
        versions = [one for one in await store.every(tx) if one.model == model]
        under_way = await kept.under_way(tx, model)
        decided = await store.decisions(tx, [one.version for one in versions])
        wanted = await routings._wanted(tx, told[-1].time, record) if record else None
    if record is None or shown is None or wanted is None:
        return [f"nothing is known of {model}"]
    found = []
    if routings._content(shown) != routings._content(wanted):
        found.append(f"the bus has {shown}, the tables say {wanted}")
    if {one.decision_id for one in decided} != {one.decision_id for one in told}:
        found.append(f"{len(decided)} decisions are stored, {len(told)} were told")
    if ended in {one.version for one in under_way}:
        found.append(f"{ended} is still under way")
    promoted = [one.version for one in told if one.decision == "promoted"]
    if promoted and promoted[-1] != record.champion:
        found.append(f"{promoted[-1]} was promoted last, and {record.champion} is champion")
    out = {one.version for one in versions if one.state == "withdrawn"}
    if out != set(shown.withdrawn):
        found.append(f"withdrawn are {sorted(out)}, the bus says {sorted(shown.withdrawn)}")
    return found
