"""Tests of a replica process on a real bus: the `openai` package, swaps under load, invalid records, crashes, clean
stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, Replica, Routing, ServedVersion
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.processes import wait_until
from tests.support.servers import BrokerProcess
from tests.support.service_process import ReplicaProcess

WAIT_S = 20.0
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Who sent the mail?"}]
TOOLS: list[openai.types.chat.ChatCompletionFunctionToolParam] = [
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
]


@dataclass
class ReplicaRig:
    """A broker, a blob store with versions, one replica, and the replica's heartbeats on the bus."""

    bus: BusSettings
    blobs: BlobStore
    replica: ReplicaProcess
    first: ServedVersion
    second: ServedVersion
    corrupt: ServedVersion
    revision: list[int] = field(default_factory=lambda: [0])

    @contextlib.asynccontextmanager
    async def producer(self) -> AsyncIterator[EventProducer]:
        producer = EventProducer(self.bus, "test", self.blobs)
        await producer.start()
        try:
            yield producer
        finally:
            await producer.stop()

    async def route(self, *serve: ServedVersion) -> None:
        """Publish a routing table whose champion is the last version."""
        self.revision[0] += 1
        aliases = {"champion": serve[-1].version} if serve else {}
        async with self.producer() as producer:
            await producer.send(
                Routing.model_validate(
                    {
                        "time": utcnow(),
                        "model": "tiny",
                        "revision": self.revision[0],
                        "aliases": aliases,
                        "serve": serve,
                    }
                )
            )

    async def heartbeats(self) -> AsyncIterator[Replica | None]:
        """Return all records of `replicas`; None is a tombstone."""
        reader = consumer(self.bus, "test")
        await reader.start()
        try:
            await reader.seek_to_beginning(*await assign_all(reader, Replica.topic))
            async for message in reader:
                record = record_of(message)
                if record.key != self.replica.replica_id.encode():
                    continue
                event = None if record.value is None else (await decode(record, self.blobs)).event
                assert event is None or isinstance(event, Replica)
                yield event
        finally:
            await reader.stop()

    async def until(self, condition: Callable[[Replica], bool], since: float = 0.0) -> Replica:
        """Return the first heartbeat after `since` (seconds since the epoch) for which `condition` holds."""
        async with asyncio.timeout(WAIT_S):
            async for beat in self.heartbeats():
                if beat is not None and beat.time.timestamp() >= since and condition(beat):
                    return beat
        raise AssertionError("unreachable")

    async def ready(self, *versions: ServedVersion) -> Replica:
        """Wait until exactly `versions` are loaded and ready."""
        names = {version.version for version in versions}
        return await self.until(
            lambda beat: {item.version for item in beat.versions} == names and all(beat.ready(name) for name in names),
            since=time.time(),
        )

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.replica.url}/v1", api_key="unused", max_retries=0)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.replica.url}/v1", api_key="unused", max_retries=0)


async def eventually(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, WAIT_S, "the condition")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaRig]:
    root = tmp_path_factory.mktemp("inference")
    broker = BrokerProcess(root / "broker")
    broker.start()
    replica = ReplicaProcess(root / "data", broker.address)
    blobs = BlobStore((root / "data" / "blobs").absolute().as_uri())
    bus = BusSettings(address=broker.address)
    try:
        with ThreadPoolExecutor(1) as starting:  # importing torch takes both processes a while
            started = starting.submit(replica.start)
            built = _rig(root, bus, blobs, replica)
            started.result()
        yield built
    finally:
        replica.stop()
        broker.stop()


def _rig(root: Path, bus: BusSettings, blobs: BlobStore, replica: ReplicaProcess) -> ReplicaRig:
    base = tiny_model.build(root / "first")
    first = tiny_model.publish(blobs, base)
    trained = tiny_model.perturbed(base, root / "second", seed=1)
    second = tiny_model.publish(blobs, trained, step=1, parent=first.version)
    broken = tiny_model.perturbed(base, root / "corrupt", seed=2)
    corrupt = tiny_model.publish(blobs, broken, step=2, parent=first.version)
    (weights,) = (blobs.ref(path.read_bytes()) for path in broken.glob("*.safetensors"))
    Path(weights.uri.removeprefix("file://")).write_bytes(b"not what it was")
    return ReplicaRig(bus, blobs, replica, first, second, corrupt)


async def test_01_it_is_healthy_before_anybody_routes_anything(rig: ReplicaRig) -> None:
    beat = await rig.until(lambda beat: True)
    assert beat.versions == ()
    assert beat.url == rig.replica.url
    async with httpx.AsyncClient(base_url=rig.replica.url) as http:
        await eventually(lambda: httpx.get(f"{rig.replica.url}/health").status_code == 200)
        assert (await http.get("/v1/models")).json()["data"] == []
    with pytest.raises(openai.NotFoundError) as missing:
        rig.client().chat.completions.create(model="tiny", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


async def test_02_routing_is_followed_and_announced(rig: ReplicaRig) -> None:
    await rig.route(rig.first)
    beat = await rig.ready(rig.first)
    probe = beat.versions[0].probe
    assert probe is not None
    assert probe.passed
    assert probe.max_abs_delta < 1e-3
    assert [model.id for model in rig.client().models.list()] == [rig.first.version]


def test_03_the_openai_package_unmodified(rig: ReplicaRig) -> None:
    client = rig.client()
    answer = client.chat.completions.create(
        model=rig.first.version, messages=MESSAGES, max_tokens=12, logprobs=True, top_logprobs=2, seed=1, tools=TOOLS
    )
    assert answer.model == rig.first.version
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens <= 12
    chunks = list(
        client.chat.completions.create(
            model=rig.first.version,
            messages=MESSAGES,
            max_tokens=12,
            seed=1,
            stream=True,
            tools=TOOLS,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=12, seed=1, tools=TOOLS) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(deltas) == text
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="repetition_penalty"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"repetition_penalty": 1.1})


async def test_04_the_async_package_with_many_at_once(rig: ReplicaRig) -> None:
    async with rig.async_client() as client:

        async def send_call(number: int) -> str | None:
            answer = await client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=20, seed=number, temperature=0.8
            )
            return answer.choices[0].message.content

        together = await asyncio.gather(*map(send_call, range(16)))
        assert together == [await send_call(number) for number in range(16)]
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=9, stream=True, extra_body={"ignore_eos": True}
        )
        ends = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
    assert [end for end in ends if end] == ["length"]


async def test_05_what_is_malformed_is_refused_and_nothing_else_is_disturbed(rig: ReplicaRig) -> None:
    async with httpx.AsyncClient(base_url=rig.replica.url) as http:
        going = asyncio.create_task(
            http.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": MESSAGES, "max_tokens": 300, "ignore_eos": True},
                timeout=WAIT_S,
            )
        )
        bodies = {b"{": 400, b'{"model": "tiny", "messages": 3}': 400, b"x" * 17_000_000: 413}
        for body, status in bodies.items():
            headers = {"content-type": "application/json"}
            response = await http.post("/v1/chat/completions", content=body, headers=headers, timeout=WAIT_S)
            assert response.status_code == status
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await going).json()["usage"]["completion_tokens"] == 300


@pytest.mark.parametrize("stream", [True, False])
async def test_06_a_client_that_leaves_stops_its_sequence(rig: ReplicaRig, stream: bool) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "stream": stream, "ignore_eos": True, "max_tokens": 1500}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    head += "content-type: application/json\r\n\r\n"
    _, writer = await asyncio.open_connection("127.0.0.1", rig.replica.port)
    writer.write(head.encode() + data)
    await writer.drain()
    await eventually(lambda: rig.replica.metric("headrace_inference_running") > 0)
    before = await asyncio.to_thread(rig.replica.metric, "headrace_inference_sampled_tokens_total")
    writer.close()
    await eventually(lambda: rig.replica.metric("headrace_inference_running") == 0)
    after = await asyncio.to_thread(rig.replica.metric, "headrace_inference_sampled_tokens_total")
    assert after - before < 1400, "it did not run to its end"


async def test_07_weights_are_swapped_without_a_failed_request(rig: ReplicaRig) -> None:
    """P8 and P3: under load, while versions are loaded, routed and unloaded, each request gets the version that it
    names."""
    current = rig.first.version
    served: list[str] = []
    stop = asyncio.Event()

    async def work(client: openai.AsyncOpenAI) -> None:
        while not stop.is_set():
            requested = current
            answer = await client.chat.completions.create(model=requested, messages=MESSAGES, max_tokens=8)
            assert answer.model == requested
            served.append(requested)

    async with rig.async_client() as client, asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(work(client))
        await rig.route(rig.first, rig.second)
        await rig.ready(rig.first, rig.second)
        current = rig.second.version
        await asyncio.sleep(0.3)
        await rig.route(rig.second)
        await rig.ready(rig.second)
        stop.set()
    assert served.count(rig.first.version) > 10
    assert served.count(rig.second.version) > 10
    with pytest.raises(openai.NotFoundError):
        rig.client().chat.completions.create(model=rig.first.version, messages=MESSAGES)


async def test_08_a_corrupt_checkpoint_is_a_failed_version_and_nothing_more(rig: ReplicaRig) -> None:
    await rig.route(rig.second, rig.corrupt)
    beat = await rig.until(lambda beat: len(beat.versions) == 2 and beat.versions[1].state == "failed", time.time() - 1)
    assert beat.ready(rig.second.version)
    assert "do not hash to" in (beat.versions[1].error or "")
    answer = rig.client().chat.completions.create(model=rig.second.version, messages=MESSAGES, max_tokens=3)
    assert answer.model == rig.second.version
    await rig.route(rig.second)
    await rig.ready(rig.second)


async def test_09_poison_on_routing_is_dead_lettered_and_changes_nothing(rig: ReplicaRig) -> None:
    poison = [b"{", b'{"model": 3}', b"\xff\x00"]
    async with rig.producer() as producer:
        await producer.send_raw([Outgoing(Routing.topic, b"tiny", value, ()) for value in poison])
    reader = consumer(rig.bus, "test")
    await reader.start()
    try:
        await reader.seek_to_beginning(*await assign_all(reader, DeadLetter.topic))
        letters: list[DeadLetter] = []
        async with asyncio.timeout(WAIT_S):
            while len(letters) < len(poison):
                event = (await decode(record_of(await reader.getone()), rig.blobs)).event
                assert isinstance(event, DeadLetter)
                letters.append(event)
    finally:
        await reader.stop()
    assert [letter.value for letter in letters] == poison
    assert {(letter.service, letter.source_topic) for letter in letters} == {("inference", "routing")}
    await rig.ready(rig.second)


async def test_09b_an_older_table_than_the_newest_is_history(rig: ReplicaRig) -> None:
    """A registry that lost its lease may still write, so the highest revision is the valid one."""
    rig.revision[0] -= 1
    await rig.route()  # the same revision: a correction, taken
    await rig.ready()
    rig.revision[0] += 3
    await rig.route(rig.second)
    await rig.ready(rig.second)
    newest, rig.revision[0] = rig.revision[0], 0
    await rig.route()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.ready(), 1.5)
    rig.revision[0] = newest
    await rig.route(rig.second)
    await rig.ready(rig.second)


async def test_10_after_a_crash_it_has_again_what_routing_says(rig: ReplicaRig) -> None:
    rig.replica.kill()
    await asyncio.to_thread(rig.replica.start)
    await rig.ready(rig.second)
    answer = rig.client().chat.completions.create(model=rig.second.version, messages=MESSAGES, max_tokens=3)
    assert answer.model == rig.second.version


async def test_11_a_clean_stop_finishes_what_was_begun_and_says_goodbye(rig: ReplicaRig) -> None:
    stopped_at = time.time()
    async with rig.async_client() as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=800, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = aiter(stream)
        await anext(chunks)
        rig.replica.terminate()
        reasons = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length"
    assert await asyncio.to_thread(rig.replica.wait) == 0
    last: list[Replica | None] = []
    async with asyncio.timeout(WAIT_S):
        async for beat in rig.heartbeats():
            last.append(beat)
            if beat is None and last[-2] is not None and last[-2].time.timestamp() >= stopped_at:
                break
    farewell = last[-2]
    assert farewell is not None
    assert farewell.stopping
    assert not farewell.ready(rig.second.version)


def test_12_a_wrong_setting_stops_the_start_by_name(rig: ReplicaRig, tmp_path: Path) -> None:
    wrong = ReplicaProcess(tmp_path, rig.bus.address, INFERENCE__TTL_S=0.1)
    with pytest.raises(TimeoutError):
        wrong.start(timeout_s=0.1)
    assert wrong.wait() == 2, "without importing torch first"
    assert "setting inference.ttl_s = 0.1" in wrong.log
