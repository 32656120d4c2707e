"""One session: its turns with their texts, the outcomes of its experiences, and its rewards and feedback."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from headrace_console.advantages import Steps, describe_advantage, first_version, step_name, training_sentences
from headrace_console.dead_letters import refusal_reasons
from headrace_console.flow_rules import describe_reason
from headrace_console.pages.page import NotFound, Page, Visit
from headrace_console.pages.sessions import parse_position
from headrace_console.read_model import queries, tables
from headrace_console.read_model.packing import unpack_id, unpack_numbers
from headrace_console.read_model.queries import Row, SessionRecords, position_of
from headrace_console.read_model.status import HistoryEntry, history_of, split_status
from headrace_console.read_model.version_queries import Runs, runs_of, steps_of
from headrace_runtime.clock import from_epoch_ms
from headrace_schemas import Feedback, Message, Reward, Turn

_MESSAGES_MAX = 20
_SPEAKERS_MAX = 50


async def session(visit: Visit) -> Response:
    """Show a session with its last turns, or with the turns before the position in the URL query."""
    parameters = visit.parameters("before")
    before = parse_position(parameters["before"]) if "before" in parameters else None
    async with visit.transaction() as tx:
        session = await queries.session_of(tx, visit.user.scope, visit.path("key"))
        if session is None:
            raise NotFound
        rows = await queries.session_records(tx, session["id"], before)
        runs = await runs_of(tx, [session["id"]])
        in_order = sorted(rows.experiences, key=lambda row: min(unpack_numbers(row["turns"]), default=0))
        histories = [history_of(row["history"]) for row in in_order]
        entries = [entry for history in histories for entry in history]
        steps = await steps_of(tx, {(entry.lineage, entry.save) for entry in entries})
        numbers = {session["version"], *(number for save in steps.values() for number in save)}
        numbers |= {entry.reason for entry in entries}
        texts = {**rows.texts, **await queries.texts_of(tx, numbers)}
    turns = await visit.parts.records.read_rows("turns", rows.turns)
    rewards = await visit.parts.records.read_rows("rewards", rows.rewards[:_SPEAKERS_MAX])
    feedback = await visit.parts.records.read_rows("feedback", rows.feedback[:_SPEAKERS_MAX])
    outcomes = await _outcomes(visit, rows, feedback)
    experiences = [unpack_numbers(row["turns"]) for row in in_order]
    numbers_by_id = {unpack_id(row["name"]): row["id"] for row in rows.turns}
    sentences = training_sentences(zip(experiences, histories, strict=True), numbers_by_id, steps, texts)
    first = rows.turns[0] if rows.turns else None
    return visit.render(
        "session.html",
        session=session,
        version=texts.get(session["version"], ""),
        statuses=[(session[kind], kind) for kind in tables.STATUSES if session[kind]],
        runs=runs.count,
        turns=_turns(rows, runs, turns, texts, sentences),
        earlier=f"?before={first['at_ms']}.{first['id']}" if first is not None and rows.has_earlier_turns else None,
        experiences=[
            _experience(row, runs, history, steps, texts) for row, history in zip(in_order, histories, strict=True)
        ],
        absence=describe_absence(texts.get(row["status"], "") for row in rows.turns),
        rewards=[reward_values(row, rewards, texts, runs) for row in rows.rewards[:_SPEAKERS_MAX]],
        feedback=[_feedback(row, feedback, outcomes) for row in rows.feedback[:_SPEAKERS_MAX]],
        speakers_max=_SPEAKERS_MAX,
        is_edited=bool(session["flags"] & tables.FLAGS["edited"]),
        can_give_feedback=visit.user.has_role("reviewer"),
    )


async def _outcomes(
    visit: Visit, rows: SessionRecords, events: Mapping[tuple[int, int], object]
) -> Mapping[tuple[int, int], str]:
    """Return the effect of each feedback on training, in words, by the feedback's position on the topic."""
    feedback = {
        position_of(row): event
        for row in reversed(rows.feedback[:_SPEAKERS_MAX])
        if isinstance(event := events.get(position_of(row)), Feedback)
    }
    async with visit.transaction() as tx:
        refused = await refusal_reasons(tx, [event.event_id for event in feedback.values()])
    outcomes = feedback_outcomes(
        list(feedback.values()),
        counted={rows.texts[row["source"]] for row in rows.rewards if row["value"] is not None},
        untrained={
            unpack_id(row["name"]): "eval" if row["eval"] else rows.texts[row["untrained"]]
            for row in rows.turns
            if row["eval"] or row["untrained"]
        },
        refused=refused,
        weight=visit.parts.rules.rewards.weight,
    )
    return dict(zip(feedback, outcomes, strict=True))


def _turns(
    rows: SessionRecords,
    runs: Runs,
    events: Mapping[tuple[int, int], object],
    texts: Mapping[int, str],
    sentences: Mapping[int, Sequence[str]],
) -> list[dict[str, object]]:
    """Return the template values of each turn: its numbers, its training, and the messages that it adds to the
    prompt.
    """
    entries, previous = [], None
    beginnings = frozenset(runs.first_turns.values())
    for row in rows.turns:
        event = events.get(position_of(row))
        turn = event if isinstance(event, Turn) else None
        messages = new_messages(turn, previous) if turn is not None else ()
        status = split_status(texts.get(row["status"], ""))
        entries.append(
            {
                **row,
                "run": runs.of_turn.get(row["id"]),
                "begins_run": row["id"] in beginnings,
                "response_id": unpack_id(row["name"]),
                "at": from_epoch_ms(row["at_ms"]),
                "version": texts.get(row["version"], ""),
                "arm": texts.get(row["arm"] or 0, ""),
                "status": ": ".join(filter(None, status)),
                "finish": texts.get(row["finish"] or 0, ""),
                "sentences": sentences.get(row["id"], ()),
                "has_text": turn is not None,
                "hidden": turn.message_count - len(messages[-_MESSAGES_MAX:]) if turn is not None else 0,
                "messages": [message_values(message) for message in messages[-_MESSAGES_MAX:]],
                "answers": [message_values(choice.message) for choice in turn.choices] if turn is not None else [],
            }
        )
        previous = turn or previous
    return entries


def new_messages(turn: Turn, previous: Turn | None) -> tuple[Message, ...]:
    """Return the messages of a turn that the turn before it does not have.

    An event that extends another turn contains only the new messages, so all of them are returned.
    """
    if turn.extends is not None or previous is None or previous.extends is not None:
        return turn.messages
    earlier = (*previous.messages, previous.choices[0].message)
    shared = 0
    for message, other in zip(turn.messages, earlier, strict=False):
        if message.role != other.role or message.text != other.text:
            break
        shared += 1
    return turn.messages[shared:]


def message_text(message: Message) -> str:
    """Return the text of a message, followed by its tool calls."""
    calls = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or ()]
    return "\n".join(filter(None, (message.text, *calls)))


def message_values(message: Message) -> dict[str, object]:
    """Return the template values of a message: role, text, and kind (answer, tool call or both)."""
    kind = "answer" if not message.tool_calls else "answer and tool call" if message.text else "tool call"
    return {"role": message.role, "text": message_text(message), "kind": kind}


def describe_absence(statuses: Iterable[str]) -> str:
    """Return a sentence that explains from the statuses of a session's turns why it has no experience."""
    details = list(dict.fromkeys(split_status(name) for name in statuses if name))
    waiting = {"session": "the session is open", "reward": "its reward is awaited"}
    awaited = [waiting.get(detail, detail) for status, detail in details if status == "waiting"]
    if awaited:
        return f"No experience yet: {', and '.join(awaited)}."
    dropped = [detail for status, detail in details if status == "dropped"]
    if not dropped:
        return "No experience yet."
    names = ", ".join(detail.replace("_", " ") for detail in dropped)
    return f"No experience: the turns were dropped ({names}). {' '.join(map(describe_reason, dropped))}"


def _experience(
    row: Row,
    runs: Runs,
    history: Sequence[HistoryEntry],
    steps: Steps,
    texts: Mapping[int, str],
) -> dict[str, object]:
    """Return the template values of an experience, with the outcome of each revision, the newest outcome first."""
    outcomes = [
        {
            "sentence": f"revision {entry.revision}: {_outcome(entry, steps, texts)}",
            "version": "" if entry.kind == "dropped" else first_version(entry, steps, texts),
        }
        for entry in reversed(history)
    ]
    first_turn = min(unpack_numbers(row["turns"]), default=0)
    return {
        **row,
        "id": unpack_id(row["name"]),
        "first_turn": first_turn,
        "run": runs.of_turn.get(first_turn),
        "no_reward": texts.get(row["no_reward"] or 0, "").replace("_", " "),
        "outcomes": outcomes,
    }


def _outcome(entry: HistoryEntry, steps: Steps, texts: Mapping[int, str]) -> str:
    step = step_name(entry, steps, texts)
    if entry.kind == "dropped":
        return f"dropped, {texts[entry.reason].replace('_', ' ')} ({step})"
    effect = describe_advantage(entry.advantage)
    return f"{entry.kind}{effect and f': {effect}'} ({step})"


def reward_values(
    row: Row, events: Mapping[tuple[int, int], object], texts: Mapping[int, str], runs: Runs
) -> dict[str, object]:
    """Return the template values of a reward. Its explanation is None once its record has expired."""
    event = events.get(position_of(row))
    reward = event if isinstance(event, Reward) else None
    first_turn = runs.first_turns.get(row["trajectory"])
    return {
        **row,
        "source": texts.get(row["source"], ""),
        "outcome": texts.get(row["outcome"], "").replace("_", " "),
        "first_turn": first_turn,
        "run": runs.of_turn.get(first_turn or 0),
        "at": from_epoch_ms(row["at_ms"]),
        "reason": reward.reason if reward is not None else None,
    }


def _feedback(
    row: Row, events: Mapping[tuple[int, int], object], outcomes: Mapping[tuple[int, int], str]
) -> dict[str, object]:
    event = events.get(position_of(row))
    if not isinstance(event, Feedback):
        return {"at": from_epoch_ms(row["at_ms"]), "has_text": False}
    parts = json.dumps(event.parts, ensure_ascii=False) if event.parts else ""
    value = event.label or parts or ("" if event.value is None else f"{event.value:g}")
    return {
        "at": from_epoch_ms(row["at_ms"]),
        "has_text": True,
        "source": event.metric_source,
        "rater": event.rater or "",
        "kind": f"{event.feedback_kind} withdrawn" if event.withdrawn else event.feedback_kind,
        "value": value,
        "comment": event.comment or "",
        "edit": event.edit.text if event.edit is not None else "",
        "turns": len(event.msg_ids),
        "outcome": outcomes.get(position_of(row), ""),
    }


def feedback_outcomes(
    feedback: Sequence[Feedback],
    *,
    counted: Collection[str],
    untrained: Mapping[str, str],
    refused: Mapping[str, str],
    weight: Callable[[str], float],
) -> list[str]:
    """Return, for each feedback, a phrase about its effect on training.

    Args:
        feedback: the feedback of one session, in the order of the log.
        counted: sources with a reward of the session.
        untrained: response id of each turn that no algorithm trains, with the reason.
        refused: event id of each dead-lettered feedback, with the reason.
        weight: function that returns the weight of a source in the reward.
    """
    last = {_target_of(event): number for number, event in enumerate(feedback) if event.event_id not in refused}
    outcomes = []
    for number, event in enumerate(feedback):
        valid = last.get(_target_of(event), number)
        if event.event_id in refused:
            outcomes.append(f"dead-lettered: {refused[event.event_id]}")
        elif valid != number:
            outcomes.append("withdrawn" if feedback[valid].withdrawn else "superseded")
        elif event.withdrawn:
            outcomes.append("in effect")
        elif not event.has_content:
            outcomes.append("attached to the session")
        else:
            outcomes.append(_effect_of(event, counted, untrained, weight))
    return outcomes


def _target_of(event: Feedback) -> tuple[Any, ...]:
    """Return the key under which later feedback replaces earlier feedback: source, rater and judged object."""
    pair = event.preference.pair if event.preference is not None else ()
    return event.source, event.metric, event.rater, event.feedback_kind, event.level, event.choice, event.msg_ids, pair


def _effect_of(
    event: Feedback, counted: Collection[str], untrained: Mapping[str, str], weight: Callable[[str], float]
) -> str:
    reasons = {untrained.get(turn_id) for turn_id in event.msg_ids}
    if reasons and None not in reasons:
        return "trains nothing: " + ", ".join(sorted(str(reason).replace("_", " ") for reason in reasons))
    if event.feedback_kind != "value":
        return "passed to the trainer, whose algorithm decides"
    sources = {event.metric_source, *(f"{event.source}:{metric}" for metric in event.parts)}
    matched = sources & set(counted)
    if matched and not any(weight(source) for source in matched):
        return "no part of the reward: the weight of the source is 0, and only reward functions read it"
    return "counted in the reward" if matched else "not matched yet"


PAGES = (Page("/s/{key}", session),)
