"""Names and digests that look alike but differ."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx2

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_operations.supervisor.overrides import toml
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import SettingError
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Feedback, SessionEnd, Turn
from headrace_schemas.values import ids
from headrace_schemas.values.blobs import Fingerprint, Manifest
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings
from tests.attack.program import attack
from tests.attack.stacks import beside
from tests.support import hostile_json, tiny_model
from tests.support.fake_replica import VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, none_of
from tests.unit.trainer.world import experience

_VERSIONS = 4
_LORA_RANK = 4
_FINGERPRINT = Fingerprint(token_ids=(1, 2), logprobs=(-1.0,))


@attack("other templates under old digests, and a base folder that is overwritten")
async def digests(folder: Path, rng: random.Random) -> list[Line]:
    """Check that a digest covers every file that affects a prompt, and that a lineage copies its base at its start."""
    base = tiny_model.build(folder / "base", layers=1)
    twins = await asyncio.to_thread(_twins, folder / "twins", base)
    full = await _overwritten(folder / "full", base, rng, rank=0)
    lora = await _overwritten(folder / "lora", base, rng, rank=_LORA_RANK)
    return [*twins, *full, *lora]


# Two models that differ in one place
def _embedded(text: str) -> Callable[[Path], None]:
    """Return a change that moves the chat template into the tokenizer's configuration, as older transformers versions
    wrote it.
    """

    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        _edit(folder / "tokenizer_config.json", chat_template=text)

    return change


def _file(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return change


def _edit(path: Path, **values: object) -> None:
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


_A, _B = "{{ messages[0].content }}", "{{ messages[-1].content }}!"
_TWINS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "template inside tokenizer_config.json": (_embedded(_A), _embedded(_B)),
    "chat_template.jinja": (_file("chat_template.jinja", _A), _file("chat_template.jinja", _B)),
    "chat_template.json": (
        _file("chat_template.json", json.dumps({"chat_template": _A})),
        _file("chat_template.json", json.dumps({"chat_template": _B})),
    ),
    "additional_chat_templates": (
        _file("additional_chat_templates/tool_use.jinja", _A),
        _file("additional_chat_templates/tool_use.jinja", _B),
    ),
    "generation_config.json": (
        lambda folder: _edit(folder / "generation_config.json", eos_token_id=2),
        lambda folder: _edit(folder / "generation_config.json", eos_token_id=[2, 3]),
    ),
    "special_tokens_map.json": (
        _file("special_tokens_map.json", json.dumps({"eos_token": "<|im_end|>"})),
        _file("special_tokens_map.json", json.dumps({"eos_token": "<|endoftext|>"})),
    ),
    "added_tokens.json": (
        _file("added_tokens.json", json.dumps({"<a>": 300})),
        _file("added_tokens.json", json.dumps({"<a>": 301})),
    ),
    "tokenizer_config.json": (
        lambda folder: _edit(folder / "tokenizer_config.json", eos_token="<|im_end|>"),
        lambda folder: _edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>"),
    ),
    "eos in config.json": (
        lambda folder: _edit(folder / "config.json", eos_token_id=2),
        lambda folder: _edit(folder / "config.json", eos_token_id=3),
    ),
}
_TEMPLATES = 4
"""Number of leading entries that change the chat template: for these `template_sha256` itself must differ."""


def _twins(folder: Path, base: Path) -> list[Line]:
    blobs = BlobStore((folder / "blobs").as_uri())
    shared: list[str] = []
    templates: list[str] = []
    for number, (where, (left, right)) in enumerate(_TWINS.items()):
        pair = [_twin(blobs, base, folder / f"{number}-{side}", change) for side, change in enumerate((left, right))]
        first, second = (manifest for manifest, _ in pair)
        if first.prompt_sha256 == second.prompt_sha256 or first.version == second.version:
            shared.append(where)
        if number < _TEMPLATES and first.template_sha256 == second.template_sha256:
            templates.append(where)
    embedded = [_twin(blobs, base, folder / f"embedded-{side}", _TWINS[next(iter(_TWINS))][side]) for side in (0, 1)]
    digests = {ChatTokenizer(path, manifest).digest for manifest, path in embedded}
    return [
        none_of(_named("models that share prompts though they differ", shared), len(shared), len(_TWINS)),
        none_of(_named("templates that hash as nothing", templates), len(templates), _TEMPLATES),
        Line("a replica tells two embedded templates apart", str(len(digests)), "2", len(digests) == 2),
    ]


def _named(name: str, problems: list[str]) -> str:
    return f"{name} ({', '.join(problems)})" if problems else name


def _twin(blobs: BlobStore, base: Path, folder: Path, change: Callable[[Path], None]) -> tuple[Manifest, Path]:
    shutil.copytree(base, folder)
    change(folder)
    return versions.store(blobs, folder, name="m", lineage="main", step=0, fingerprint=_FINGERPRINT)[0], folder


# A base folder that is overwritten while it is trained
async def _overwritten(folder: Path, base: Path, rng: random.Random, rank: int) -> list[Line]:
    kind = "adapter" if rank else "whole model"
    copy = folder / "base"
    shutil.copytree(base, copy)
    blobs = BlobStore((folder / "blobs").as_uri())
    settings = TrainerSettings.model_validate(
        {
            "base": str(copy),
            "model": "m",
            "batch_experiences": 4,
            "batch_experiences_min": 1,
            "steps_per_version": 1,
            "lora": {"rank": rank},
        }
    )
    lineage = await asyncio.to_thread(open_lineage, settings, blobs, SystemClock())
    _overwrite(copy, rng)
    problems: list[str] = []
    for number in range(_VERSIONS):
        await asyncio.to_thread(_train, lineage, number)
        problems += await _problems_of_newest(lineage, blobs, folder / f"cache-{number}", base)
    published = len(lineage.saved.versions) - 1
    try:
        await asyncio.to_thread(open_lineage, settings, blobs, SystemClock())
        refused = "nothing"
    except SettingError as error:
        refused = str(error)
    return [
        Line(f"versions of a {kind} published", str(published), str(_VERSIONS), published == _VERSIONS),
        none_of(_named("of them do not load or match", problems[:1]), len(problems), published),
        Line("the next start names what has changed", refused[-160:], "chat_template", "chat_template" in refused),
    ]


def _overwrite(folder: Path, rng: random.Random) -> None:
    """Replace the files of a model by invalid files under the same names."""
    for path in versions.model_files(folder):
        path.write_bytes(rng.randbytes(64) if path.suffix == ".safetensors" else b'{"model_type": "nonsense"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')


def _train(lineage: Lineage, number: int) -> None:
    head = lineage.state.history.head
    for offset in range(4):
        lineage.state.admit(experience(4 * number + offset, head, reward=offset % 3), (0, 0), SystemClock().now())
    batch = lineage.next_batch()
    assert batch
    lineage.step(batch, threading.Event())
    lineage.save(publish=True)


async def _problems_of_newest(lineage: Lineage, blobs: BlobStore, cache: Path, base: Path) -> list[str]:
    """Load the newest version as a replica does. Return the problems of the version and any changes of the lineage's
    base.
    """
    checkpoint = lineage.saved.checkpoint
    try:
        manifest, folder = await VersionCache(blobs, cache).fetch(checkpoint.manifest)
        first, first_folder = await VersionCache(blobs, cache).fetch(lineage.saved.versions[0].manifest)
        if manifest.prompt_sha256 != first.prompt_sha256 and manifest.kind == "full":
            return [f"{checkpoint.version} makes other prompts than the base"]
        ChatTokenizer(first_folder, first)
        answers = tiny_model.answers(
            folder, manifest.fingerprint, base=first_folder if manifest.kind == "lora" else None
        )
        delta = max(abs(a - b) for a, b in zip(answers, manifest.fingerprint.logprobs, strict=True))
        unchanged = all(
            (first_folder / path.name).read_bytes() == path.read_bytes() for path in versions.model_files(base)
        )
        return (
            [] if delta < 1e-3 and unchanged else [f"{checkpoint.version}: delta {delta:.2g}, base kept: {unchanged}"]
        )
    except Exception as error:  # noqa: BLE001 - whatever stops a replica is a figure here
        return [f"{checkpoint.version}: {type(error).__name__}: {error}"]


COUNT = 200
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
_BEAT_S = 1.0
_WAIT_S = 30.0


@attack("names that look alike stay different sessions, each with its own feedback")
async def exact_names(folder: Path, rng: random.Random) -> list[Line]:
    """Send a call, a feedback and an end for each name, then read the owners of these events from the topics."""
    sessions = hostile_json.draw(rng, COUNT)
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    keys = toml([_key("open"), _key("bound", session_id="own")])
    gateway = GatewayProcess(folder / "data", broker.address, GATEWAY__KEYS=keys)
    replica = FakeReplica()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        await stack.enter_async_context(replica.running())
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        await view.producer.send(routing(VERSION))
        await stack.enter_async_context(beside(_beat(view, replica)))
        stack.callback(gateway.stop)
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        refused = await _send_all(gateway.url, sessions)
        reached = await _reach_others(gateway.url, [session.name for session in sessions[:20]])
        turns, feedback, ends = await _events(view)
    expected = {session.name: ids.session_key("acme", session.name) for session in sessions}
    values = {event.session_key: event.value for event in feedback}
    correct = sum(values.get(expected[session.name]) == number for number, session in enumerate(sessions))
    return [
        none_of("requests with a lookalike name that were refused", refused, 3 * COUNT),
        _all("sessions of the calls", len({turn.session_key for turn in turns} & set(expected.values()))),
        _all("sessions that keep their name exactly", len({turn.session_id for turn in turns} & set(expected))),
        _all("sessions with their own feedback alone", correct if len(values) == COUNT else 0),
        _all("sessions that were ended", len({end.session_key for end in ends} & set(expected.values()))),
        none_of("requests of a bound key that reached another session", reached, 60),
    ]


def _all(name: str, count: int) -> Line:
    return Line(name, f"{count} of {COUNT}", f"{COUNT}", count == COUNT)


def _key(name: str, **fields: str) -> dict[str, object]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {"name": name, "sha256": digest, "tenant": "acme", "scopes": ["chat", "feedback"], **fields}


async def _send_all(url: str, sessions: list[hostile_json.NamedSession]) -> int:
    """Send all requests of the sessions. Return how many were refused."""
    refused = 0
    async with httpx2.AsyncClient(base_url=url, headers={"authorization": "Bearer open"}, timeout=60) as client:
        for number, session in enumerate(sessions):
            status, _ = await asyncio.to_thread(hostile_json.post, url, session, "/v1/chat/completions", _CHAT, "open")
            body = {"session_id": session.name, "value": number}
            judged = await client.post("/v1/feedback", json=body)
            ended = await client.post(f"/v1/sessions/{quote(session.name, safe='')}/end")
            refused += (status != 200) + (judged.status_code != 202) + (ended.status_code != 202)
    return refused


async def _reach_others(url: str, names: list[str]) -> int:
    """Send requests about other sessions with the bound key. Return how many were not refused with 403."""
    reached = 0
    async with httpx2.AsyncClient(base_url=url, headers={"authorization": "Bearer bound"}, timeout=60) as client:
        for name in names:
            answers = [
                await client.post("/v1/chat/completions", json=_CHAT, headers={b"x-session-id": name.encode()}),
                await client.post("/v1/feedback", json={"session_id": name, "value": -1}),
                await client.post(f"/v1/sessions/{quote(name, safe='')}/end"),
            ]
            reached += sum(answer.status_code != 403 for answer in answers)
    return reached


async def _events(view: BusView) -> tuple[list[Turn], list[Feedback], list[SessionEnd]]:
    """Wait until all events have arrived or the time is over, and return the events on the topics."""
    async with asyncio.timeout(_WAIT_S * 2):
        for _ in range(int(_WAIT_S)):
            turns, feedback, ends = await view.read(Turn), await view.read(Feedback), await view.read(SessionEnd)
            if min(len(turns), len(feedback), len(ends)) >= COUNT:
                break
            await asyncio.sleep(1)
    return turns, feedback, ends


async def _beat(view: BusView, replica: FakeReplica) -> None:
    while True:
        await view.producer.send(replica.heartbeat())
        await asyncio.sleep(_BEAT_S)
