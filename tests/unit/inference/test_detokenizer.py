"""Incremental decoding for four kinds of tokenizers that are built here, and the errors of the library's
`DecodeStream` for sampled bytes that are not characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_inference.chat.detokenizer import Decoding, Detokenizer
from headrace_inference.chat.tokenizer import ChatTokenizer

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
    """Build a tokenizer like SentencePiece's: `▁` for spaces, and bytes for missing characters."""
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


def decoding(kind: str) -> Decoding:
    silent = KINDS[kind].token_to_id(END)
    assert silent is not None
    return Decoding(KINDS[kind], {silent})


def in_portions(decoder: Decoding, ids: list[int], cuts: list[int]) -> tuple[str, str]:
    """Return the text before the end and the text at the end."""
    stream = Detokenizer(decoder)
    bounds = [0, *sorted(cuts), len(ids)]
    text = "".join(stream.feed(ids[start:end]) for start, end in pairwise(bounds))
    return text, text + stream.end()


@each_kind
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_given_out_depends_on_the_tokens_alone(kind: str, data: st.DataObject) -> None:
    """Any tokens, in any portions."""
    ids = data.draw(st.lists(st.integers(0, KINDS[kind].get_vocab_size() - 1), min_size=1, max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    assert in_portions(decoding(kind), ids, cuts) == in_portions(decoding(kind), ids, list(range(len(ids))))


@each_kind
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text_comes_out_as_the_tokenizer_decodes_it(kind: str, data: st.DataObject) -> None:
    """Long runs of bytes included: each sign is four or more tokens of a vocabulary that lacks it."""
    text = data.draw(st.text(st.sampled_from([*"aetho ,.'n", "ö", "日", "本", "👩", "\u200d"]), max_size=25))
    ids = KINDS[kind].encode(text).ids
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=4))
    expected = decoding(kind).of(ids)
    early, late = in_portions(decoding(kind), ids, cuts)
    assert late == expected
    assert early == expected, "text that is whole waits for no end"


@pytest.mark.parametrize("kind", ["byte-level", "word-piece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_come_out_as_the_tokenizer_decodes_them_but_for_nul(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, KINDS[kind].get_vocab_size() - 1), max_size=30))
    assert in_portions(decoding(kind), ids, [])[1] == decoding(kind).of(ids).replace("\0", HALF)


def test_a_sampled_nul_comes_out_as_a_replacement_character() -> None:
    nul = KINDS["byte-level"].token_to_id("\N{LATIN CAPITAL LETTER A WITH MACRON}")  # byte 0 in GPT-2's alphabet
    assert nul is not None
    decoder = decoding("byte-level")
    assert decoder.of([nul]) == "\0"
    assert in_portions(decoder, [nul, nul], [1]) == (HALF * 2, HALF * 2)


def test_one_wrong_byte_costs_one_character() -> None:
    """The tokenizer's own decoder shows none of the run."""
    decoder = decoding("unigram")
    spelled = {byte: token for token, byte in decoder.bytes_of.items()}
    ids = [spelled[byte] for byte in b"\xc3\xb6\xffok\xe6\x97"]
    assert in_portions(decoder, ids, [1, 4]) == (f"ö{HALF}ok", f"ö{HALF}ok{HALF}")
    assert "ok" not in decoder.of(ids)


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
    assert in_portions(decoder, parted, []) == in_portions(decoder, ids, [])


def test_the_table_of_bytes_is_that_of_the_library(tokenizer: ChatTokenizer) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert tokenizer._bytes_of == {letter: byte for byte, letter in bytes_to_unicode().items()}


def test_why_the_librarys_stream_is_not_used() -> None:
    """When this fails, DecodeStream has learnt it: look at docs/decisions/archive again."""
    inner, decoder = KINDS["unigram"], decoding("unigram")
    spelled = {byte: token for token, byte in decoder.bytes_of.items()}
    stream = decoders.DecodeStream(skip_special_tokens=False)
    assert stream.step(inner, spelled[ord("a")]) == "a"
    stream.step(inner, spelled[0xFF])
    with pytest.raises(Exception, match="Invalid prefix"):
        stream.step(inner, inner.token_to_id("▁the"))
    assert not hasattr(stream, "end"), "it has nothing to say of a text that breaks off inside a character"
