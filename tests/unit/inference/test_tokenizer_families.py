"""Tests of tokenizer families: forced calls, schemas, streams and exact echoes, or a refusal that names the answer
form.

`HEADRACE_TOKENIZER_FOLDERS` lists folders with further tokenizers, separated like PATH; their weights are not read.
Incremental decoding is tested with four tokenizers that are built here, including bytes that the library's
`DecodeStream` decodes wrongly.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_inference.chat.detokenizer import Detokenizer, TokenDecoder
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.written import _manifest
from headrace_runtime.grammars.vocabulary import read_token_bytes
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from tests.support import tiny_model
from tests.support.tokenizer_families import FAMILIES, Family
from tests.unit.inference.conftest import Json, client, joined

PLACES = ["Paris", "New  York", 'a "b" {c}\n', "Zürich 😀"]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": PLACES}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HELD = [family for family in FAMILIES if family.holds]
FOLDERS = [Path(name) for name in os.environ.get("HEADRACE_TOKENIZER_FOLDERS", "").split(os.pathsep) if name]
TEXTS = ("plain", " two  spaces ", "naïve 😀 \n\tend", '{"a": [1, "x y"]}', "ends in a space ", "\n")


class Served:
    """A tiny model with one of the tokenizers, behind the HTTP interface."""

    def __init__(self, http: httpx.AsyncClient, version: str, tokenizer: ChatTokenizer) -> None:
        self.http = http
        self.version = version
        self.tokenizer = tokenizer

    async def ask(self, messages: list[Json], **fields: Any) -> Json:
        body = {"model": self.version, "messages": messages, "return_token_ids": True, "max_tokens": 500, **fields}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not fields.get("stream"):
            parsed: Json = answer.json()
            return parsed
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        return joined(chunks)


@pytest.fixture(params=[*HELD, *FOLDERS], ids=lambda param: getattr(param, "name", str(param)))
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    source = request.param
    folder = source.build(tmp_path / "base") if isinstance(source, Family) else _resized(source, tmp_path / "base")
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, folder).manifest)
    engine = TorchEngine(TorchSettings.model_validate({"device": "cpu", "trace": False}))
    await engine.load(folder, manifest)
    tokenizer = ChatTokenizer(folder, manifest)
    async with client(engine, tokenizer, version=manifest.version) as http:
        yield Served(http, manifest.version, tokenizer)
    await engine.stop()


def _resized(source: Path, folder: Path) -> Path:
    """Create a tiny model for an external tokenizer, and return its folder."""
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    Family(source.name, lambda: content).build(folder)
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    return folder


async def test_forms_streams_and_echoes_hold(served: Served) -> None:
    user = {"role": "user", "content": "Weather in Zürich 😀?"}
    fixed: Json = {"seed": 0, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    response = await served.ask([user], **fixed)
    choice = response["choices"][0]
    message = choice["message"]
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert (call["function"]["name"], arguments["place"] in PLACES) == ("weather", True), message
    assert 0 <= arguments["days"] <= 99
    streamed = await served.ask([user], **fixed, stream=True)
    assert streamed["token_ids"] == choice["token_ids"]
    assert [part["function"] for part in streamed["tool_calls"]] == [call["function"]]
    assert (streamed["content"] or None) == message["content"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    following = await served.ask([user, message, result], tools=[TOOL], max_tokens=4)
    conversation_ids = response["prompt_token_ids"] + choice["token_ids"]
    assert following["prompt_token_ids"][: len(conversation_ids)] == conversation_ids

    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    constrained = await served.ask([user], seed=0, response_format=form)
    value = json.loads(constrained["choices"][0]["message"]["content"])
    assert value["place"] in PLACES
    free = await served.ask([user], seed=0, max_tokens=40)
    stream = await served.ask([user], seed=0, max_tokens=40, stream=True)
    assert stream["content"] == free["choices"][0]["message"]["content"]
    after = await served.ask([user, free["choices"][0]["message"], user], max_tokens=2)
    conversation_ids = free["prompt_token_ids"] + free["choices"][0]["token_ids"]
    assert after["prompt_token_ids"][: len(conversation_ids)] == conversation_ids


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_tokenizer_holds_forms_or_the_check_names_the_cause(family: Family, tmp_path: Path) -> None:
    folder = family.build(tmp_path)
    tokenizer = ChatTokenizer(folder, _manifest(folder))
    compiler = GrammarCompiler(Parsers(HERMES, THINK))
    trouble = compiler.check(tokenizer, tokenizer.last_id + 1)
    compiler.close()
    assert bool(trouble) != family.holds, trouble
    assert family.holds or ("cannot be used with grammars" in trouble and "have no token" in trouble)


@pytest.mark.parametrize("family", HELD, ids=lambda family: family.name)
def test_the_bytes_of_tokens_make_up_the_text(family: Family, tmp_path: Path) -> None:
    folder = family.build(tmp_path)
    tokenizer = ChatTokenizer(folder, _manifest(folder))
    inner = tokenizer.transformers_tokenizer.backend_tokenizer
    read = read_token_bytes(inner, tokenizer.last_id + 1)
    assert not read.unlike
    assert all(data is not None for data in read.data)
    prefix_length = len(tokenizer.encode("a"))
    for text in TEXTS:
        ids = tokenizer.encode(f"a{text}")
        data = b"".join(read.data[token] or b"" for token in ids).removeprefix(b" ")
        assert data == f"a{text}".encode(), (prefix_length, text)
        assert tokenizer.text_of(ids).removeprefix(" ") == f"a{text}"


CORPUS = [
    "Hello world, this isn't a test. Größe 日本語 👩‍👩‍👧 naïve don't can ' t .",
    "the quick brown fox, 12 dogs! 漢字",
]
END = "<|end|>"
HALF = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 20,
        trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=[END], show_progress=False),
    )
    return tokenizer


def unigram(*, strip: bool) -> Tokenizer:
    """Return a tokenizer like SentencePiece's: `▁` for spaces, and byte tokens for missing characters."""
    pieces = [
        "▁",
        "▁Hello",
        "▁world",
        ",",
        "▁this",
        "n",
        "'",
        "t",
        "▁a",
        ".",
        "▁the",
        "日本",
        "語",
        *"bcdefghijklmopqrsuvwxyz",
    ]
    scored = [(piece, -3.0 - index / 100) for index, piece in enumerate(pieces)]
    in_bytes = [(f"<0x{byte:02X}>", -8.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *in_bytes, *scored], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    stripped = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    tokenizer.add_special_tokens([END])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.train_from_iterator(
        CORPUS * 20, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", END], show_progress=False)
    )
    return tokenizer


KINDS = {
    "byte-level": byte_level(),
    "unigram": unigram(strip=True),
    "unigram-unstripped": unigram(strip=False),
    "word-piece": word_piece(),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def decoding(kind: str) -> TokenDecoder:
    silent = KINDS[kind].token_to_id(END)
    assert silent is not None
    return TokenDecoder(KINDS[kind], {silent})


def text_in_portions(decoder: TokenDecoder, ids: list[int], cuts: list[int]) -> tuple[str, str]:
    """Decode `ids` in pieces that end at `cuts`. Return the text before and after the end of the stream."""
    stream = Detokenizer(decoder)
    bounds = [0, *sorted(cuts), len(ids)]
    text = "".join(stream.feed(ids[start:end]) for start, end in pairwise(bounds))
    return text, text + stream.end()


@each_kind
@settings(max_examples=150)
@given(data=st.data())
def test_what_is_given_out_depends_on_the_tokens_alone(kind: str, data: st.DataObject) -> None:
    """The decoded text of any tokens is the same in any pieces."""
    ids = data.draw(st.lists(st.integers(0, KINDS[kind].get_vocab_size() - 1), min_size=1, max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    assert text_in_portions(decoding(kind), ids, cuts) == text_in_portions(decoding(kind), ids, list(range(len(ids))))


@each_kind
@settings(max_examples=150)
@given(data=st.data())
def test_text_comes_out_as_the_tokenizer_decodes_it(kind: str, data: st.DataObject) -> None:
    """This includes long runs of bytes: characters that the vocabulary lacks take four or more tokens."""
    text = data.draw(st.text(st.sampled_from([*"aetho ,.'n", "ö", "日", "本", "👩", "\u200d"]), max_size=25))
    ids = KINDS[kind].encode(text).ids
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    expected = decoding(kind).decode(ids)
    early, late = text_in_portions(decoding(kind), ids, cuts)
    assert late == expected
    assert early == expected, "text that is whole waits for no end"


@pytest.mark.parametrize("kind", ["byte-level", "word-piece"])
@settings(max_examples=150)
@given(data=st.data())
def test_any_tokens_come_out_as_the_tokenizer_decodes_them_but_for_nul(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, KINDS[kind].get_vocab_size() - 1), max_size=30))
    assert text_in_portions(decoding(kind), ids, [])[1] == decoding(kind).decode(ids).replace("\0", HALF)


def test_a_sampled_nul_comes_out_as_a_replacement_character() -> None:
    nul = KINDS["byte-level"].token_to_id("\N{LATIN CAPITAL LETTER A WITH MACRON}")  # byte 0 in GPT-2's alphabet
    assert nul is not None
    decoder = decoding("byte-level")
    assert decoder.decode([nul]) == "\0"
    assert text_in_portions(decoder, [nul, nul], [1]) == (HALF * 2, HALF * 2)


def test_one_wrong_byte_costs_one_character() -> None:
    """The tokenizer's own decoder drops the whole run of bytes."""
    decoder = decoding("unigram")
    spelled = {byte: token for token, byte in decoder.bytes_of.items()}
    ids = [spelled[byte] for byte in b"\xc3\xb6\xffok\xe6\x97"]
    assert text_in_portions(decoder, ids, [1, 4]) == (f"ö{HALF}ok", f"ö{HALF}ok{HALF}")
    assert "ok" not in decoder.decode(ids)


def test_half_a_character_is_never_given_out() -> None:
    for kind in ("byte-level", "unigram"):
        stream = Detokenizer(decoding(kind))
        pieces = [stream.feed((token,)) for token in KINDS[kind].encode("a👩b").ids]
        assert HALF not in "".join(pieces)
        assert "".join(pieces).strip() == "a👩b"


def test_silent_tokens_neither_show_nor_part_a_character() -> None:
    decoder = decoding("unigram")
    ids = KINDS["unigram"].encode("👩").ids
    (silent,) = decoder.silent
    parted = [token for token_id in ids for token in (token_id, silent)]
    assert text_in_portions(decoder, parted, []) == text_in_portions(decoder, ids, [])


def test_the_table_of_bytes_is_that_of_the_library(tokenizer: ChatTokenizer) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert tokenizer._bytes_of == {letter: byte for byte, letter in bytes_to_unicode().items()}


def test_why_the_librarys_stream_is_not_used() -> None:
    """If this test fails, `DecodeStream` was fixed; then read docs/decisions/archive and reconsider it."""
    inner, decoder = KINDS["unigram"], decoding("unigram")
    spelled = {byte: token for token, byte in decoder.bytes_of.items()}
    stream = decoders.DecodeStream(skip_special_tokens=False)
    assert stream.step(inner, spelled[ord("a")]) == "a"
    stream.step(inner, spelled[0xFF])
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(inner, inner.token_to_id("▁the"))
    assert not hasattr(stream, "end"), "it has nothing to say of a text that breaks off inside a character"
