"""Tests of the texts of single tokens and of sessions, and of the tokenizers of versions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_console.pages.session import describe_absence, message_values, new_messages, reward_values
from headrace_console.read_model.version_queries import Runs
from headrace_console.sources.clients import RegistryReader
from headrace_console.sources.tokenizers import TokenizerReader, TokenTexts, visible_text
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import store_files, store_manifest
from headrace_schemas import Message, Reward
from headrace_schemas.events.chat import FunctionCall, ToolCall
from headrace_schemas.http.registry_api import VersionState
from headrace_schemas.values.blobs import BlobRef, Fingerprint, Manifest
from tests.support.turns import KEY, START, turn

TEXTS = ("Hello wörld, 1 + 1 = 2\n", "日本語 🙂 ▁ <0x41>", "tabs\tand  spaces", "\u202eevil\x1b[31m")


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_tokens_join_to_the_text_that_the_library_tokenized(make: Any) -> None:
    tokenizer = make()
    texts = TokenTexts(tokenizer.to_str().encode())
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert len(ids) > 1
        expected = text if make is byte_level else text.replace("\u2581", " ")
        assert b"".join(texts.data(token_id) or b"" for token_id in ids) == expected.encode()
    assert texts.text(tokenizer.token_to_id("<|end|>")) == "<|end|>"
    assert texts.text(10**6) == "⟨id 1000000⟩"


def test_texts_of_a_unigram_vocabulary_are_found_by_place() -> None:
    model = {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581the", -1.0]]}
    texts = TokenTexts(json.dumps({"model": model, "decoder": {"type": "Metaspace"}}).encode())
    assert texts.text(1) == " the"


NOT_TOKENIZERS = [
    b"", b"[]", b"{}", b'{"model": {"vocab": 1}}', b"[" * 100_000, b'{"model": {"vocab": {"a": 1e999}}}',
    b'{"model": {"vocab": [[]]}}', b'{"model": {"vocab": {}}, "added_tokens": [{"id": -1e999, "content": ""}]}',
]  # fmt: skip


@pytest.mark.parametrize("content", NOT_TOKENIZERS)
def test_tokenizer_that_cannot_be_read_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        TokenTexts(content)


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "added"])
def test_a_piece_of_megabytes_costs_a_page_no_more_than_any_other(kind: str) -> None:
    """Its bytes are no text, and each of them was shown by a copy of those that follow."""
    piece = "\u0142" * 1_000_000
    added = [{"id": 0, "content": piece}] if kind == "added" else []
    vocabulary = {piece: 0} if kind == "BPE" else [[piece, 0.0]]
    model = {"vocab": {} if added else vocabulary}
    texts = TokenTexts(json.dumps({"model": model, "added_tokens": added, "decoder": {"type": "ByteLevel"}}).encode())
    assert len(texts.text(0)) < 10_000
    assert len(texts.data(0) or b"") < 10_000


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", "plain"),
        (b"\xe2\x96", "⟨E2 96⟩"),
        (b"a\xe2\x96 b", "a⟨E2 96⟩ b"),
        (b"\x81\x82x\xf0\x9f", "⟨81 82⟩x⟨F0 9F⟩"),
        ("日".encode(), "日"),
        (b"\x1b[31m\n", "\\x1b[31m\n"),
        ("\u202e".encode(), "\\u202e"),
    ],
)
def test_bytes_that_are_no_whole_character_are_shown_as_numbers(data: bytes, text: str) -> None:
    assert visible_text(data) == text


class Versions:
    """Registry versions with their files in a blob store. Counts the files that are read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blobs = BlobStore((folder / "blobs").as_uri())
        self.reads = 0
        self._folder = folder
        self._states: list[VersionState] = []
        stored = BlobStore.get

        def counted(blobs: BlobStore, ref: BlobRef) -> bytes:
            self.reads += 1
            return stored(blobs, ref)

        monkeypatch.setattr(BlobStore, "get", counted)

    def add(self, number: int, tokenizer: bytes | None, base: str | None = None) -> str:
        """Store a version and return its name. With `base`, the version is an adapter."""
        folder = self._folder / f"version-{number}"
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(str(number).encode())
        if tokenizer is not None and base is None:
            (folder / "tokenizer.json").write_bytes(tokenizer)
        manifest = Manifest(
            name="m",
            lineage="main",
            step=number,
            kind="full" if base is None else "lora",
            base=base,
            files=store_files(self.blobs, folder),
            fingerprint=Fingerprint(token_ids=(1, 2), logprobs=(-1.0,)),
            tokenizer_sha256=hashlib.sha256(tokenizer or b"").hexdigest(),
            template_sha256="0" * 64,
        )
        stored, ref = store_manifest(self.blobs, manifest)
        self._states.append(
            VersionState(
                id=stored.version, model="m", lineage="main", step=number, state="registered", registered_at=START,
                manifest=ref,
            )
        )  # fmt: skip
        return stored.version

    async def versions(self, _model: str) -> tuple[VersionState, ...]:
        return tuple(self._states)


def numbered_tokenizer(number: int) -> bytes:
    return json.dumps({"model": {"vocab": {f"piece-{number}": 0}}}).encode()


async def test_tokenizers_of_the_last_four_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Versions(tmp_path, monkeypatch)
    reader = TokenizerReader(cast("RegistryReader", source), source.blobs)
    names = [source.add(number, numbered_tokenizer(number)) for number in range(5)]

    async def text(name: str) -> str:
        texts, problem = await reader.read(name)
        assert texts is not None, problem
        return texts.text(0)

    assert [await text(name) for name in names] == [f"piece-{number}" for number in range(5)]
    before = source.reads
    assert [await text(name) for name in names[1:]] == [f"piece-{number}" for number in range(1, 5)]
    assert source.reads == before, "the last four are in memory"
    assert await text(names[0]) == "piece-0"
    assert source.reads > before


async def test_adapter_has_the_tokenizer_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Versions(tmp_path, monkeypatch)
    reader = TokenizerReader(cast("RegistryReader", source), source.blobs)
    base = source.add(0, numbered_tokenizer(7))
    texts, _ = await reader.read(source.add(1, numbered_tokenizer(7), base))
    assert texts is not None
    assert texts.text(0) == "piece-7"


async def test_version_without_a_readable_tokenizer_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Versions(tmp_path, monkeypatch)
    reader = TokenizerReader(cast("RegistryReader", source), source.blobs)
    assert await reader.read(source.add(0, None)) == (None, "the version has no tokenizer.json")
    assert "the tokenizer cannot be read" in (await reader.read(source.add(1, b"{}")))[1]
    assert "is not among the newest versions" in (await reader.read("m@ffffffffffff"))[1]


@pytest.mark.parametrize(
    ("statuses", "sentence"),
    [
        (("waiting/session",), "No experience yet: the session is open."),
        (("dropped/eval", "waiting/reward"), "No experience yet: its reward is awaited."),
        (
            ("dropped/eval", "dropped/eval"),
            "No experience: the turns were dropped (eval). "
            "The call was an evaluation (purpose eval), which is never trained.",
        ),
        (("dropped/truncated_sampling (grammar)",), "call with temperature=1 and without top_p and top_k."),
        ((), "No experience yet."),
    ],
)
def test_absence_of_an_experience_is_explained_by_the_turns(statuses: tuple[str, ...], sentence: str) -> None:
    assert describe_absence(statuses).endswith(sentence)


@pytest.mark.parametrize(
    ("content", "calls", "kind"),
    [("x", False, "answer"), ("x", True, "answer and tool call"), (None, True, "tool call")],
)
def test_answer_with_tool_calls_is_named_so(content: str | None, kind: str, *, calls: bool) -> None:
    call = ToolCall(id="c", function=FunctionCall(name="look_up", arguments="{}"))
    message = Message(role="assistant", content=content, tool_calls=(call,) if calls else None)
    assert message_values(message)["kind"] == kind


def test_new_messages_are_those_that_the_turn_before_lacks() -> None:
    user, agent, again = (Message(role=role, content=text) for role, text in
                          (("user", "a"), ("assistant", "x"), ("user", "b")))  # fmt: skip
    first = turn("a", messages=(user,))
    assert new_messages(turn("b", messages=(user, agent, again)), first) == (again,)
    assert new_messages(turn("b", messages=(again,)), first) == (again,)
    assert new_messages(first, None) == (user,)


def test_reward_names_its_run_and_its_reason() -> None:
    row = {
        "source": 1, "outcome": 2, "value": None, "revision": 0, "turn": 0, "at_ms": 0, "partition": 0, "log_offset": 5,
        "trajectory": 7,
    }  # fmt: skip
    texts = {1: "judge:help", 2: "abstained"}
    record = Reward(time=START, trajectory_id="T", session_key=KEY, source="judge:help", outcome="abstained")
    record = record.model_copy(update={"reason": "no answer"})
    values = reward_values(row, {(0, 5): record}, texts, Runs({1: 1, 3: 2}, {6: 1, 7: 3}, 2))
    assert (values["run"], values["first_turn"], values["reason"]) == (2, 3, "no answer")
    assert reward_values(row, {}, texts, Runs({}, {}, 0))["run"] is None, "its run was not read"
