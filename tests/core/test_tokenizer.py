"""Ids and text, against transformers' own tokenizer of the same files."""

import json
import pathlib
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, processors
from transformers import PreTrainedTokenizerFast

from core.detokenizer import Detokenizer
from core.errors import InvalidRequest
from core.token_bytes import TokenBytes
from core.tokenizer import MAX_PIECE_CHARS, Tokenizer, UnsupportedTokenizer
from server.loaded_engine import compiler_of
from tests.core import small_tokenizers
from tests.pooled_models import word_pieces

KINDS = ("byte_level", "sentencepiece")
CONFIGS: dict[str, dict[str, Any]] = {
    "byte_level": {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}},
    "sentencepiece": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}
PHRASES = [
    "",
    " ",
    "The engine thread",
    "  two spaces, and  more ",
    "line\n\n\tindented\r\n",
    "fährt über 你好 😀 👩‍👩‍👧 \N{ZERO WIDTH JOINER}",
    "a <|im_start|>user<|im_end|> b <s> </s><tool call>",
    "<0x41> ▁ Ġ é",
]


@cache
def backend(kind: str) -> tokenizers.Tokenizer:
    made: tokenizers.Tokenizer = getattr(small_tokenizers, kind)()
    return made


@cache
def ours(kind: str) -> Tokenizer:
    return Tokenizer(backend(kind).to_str(), CONFIGS[kind])


@cache
def theirs(kind: str) -> PreTrainedTokenizerFast:
    names = {"bos_token": ours(kind).special_tokens["bos_token"], "eos_token": ours(kind).special_tokens["eos_token"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend(kind), **names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", PHRASES)
def test_ids_and_text_are_those_of_transformers(kind: str, text: str) -> None:
    for add_special_tokens in (True, False):
        ids = ours(kind).encode(text, add_special_tokens)
        assert ids == theirs(kind).encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours(kind).decode(ids, skip) == theirs(kind).decode(ids, skip_special_tokens=skip)


@given(st.sampled_from(KINDS), st.text(max_size=30))
def test_random_text_has_the_ids_and_the_text_of_transformers(kind: str, text: str) -> None:
    ids = ours(kind).encode(text)
    assert ids == theirs(kind).encode(text)
    assert ours(kind).decode(ids) == theirs(kind).decode(ids, skip_special_tokens=True)


@given(st.sampled_from(KINDS), st.text(max_size=30))
def test_streamed_text_is_the_decoded_text(kind: str, text: str) -> None:
    ids = ours(kind).encode(text)
    detokenizer = Detokenizer(ours(kind).table)
    assert "".join(map(detokenizer.push_token, ids)) + detokenizer.finish() == ours(kind).decode(ids)


@given(st.lists(st.integers(0, 400), max_size=12))
def test_random_ids_of_bytes_decode_as_transformers_does(ids: list[int]) -> None:
    assert ours("byte_level").decode(ids) == theirs("byte_level").decode(ids, skip_special_tokens=True)


def test_text_round_trips_through_bytes_of_each_token() -> None:
    text = "über 你好 😀  x"
    for kind, lead in (("byte_level", b""), ("sentencepiece", b" ")):
        ids = ours(kind).encode(text, add_special_tokens=False)
        assert b"".join([ours(kind).bytes_of(token_id) for token_id in ids]) == lead + text.encode()


def test_every_id_has_a_string_and_leads_back() -> None:
    tokenizer = ours("sentencepiece")
    assert tokenizer.vocab_size == backend("sentencepiece").get_vocab_size()
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.id_of(tokenizer.str_of(token_id)) == token_id
    newline = tokenizer.id_of("<0x0A>")
    assert newline is not None
    assert (tokenizer.bytes_of(newline), tokenizer.text_of(newline)) == (b"\n", "\n")
    assert tokenizer.str_of(tokenizer.vocab_size) == ""
    assert tokenizer.id_of("no such token") is None


def test_special_tokens_have_names_ids_and_no_text() -> None:
    tokenizer = ours("byte_level")
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.text_of(2) == "<|im_end|>"
    assert tokenizer.table.bytes_of(2) == b""
    tool_id = tokenizer.id_of("<tool call>")
    assert tool_id is not None
    assert tokenizer.table.bytes_of(tool_id) == b"<tool call>"


def test_tokens_known_to_the_config_alone_are_added_as_transformers_adds_them() -> None:
    fields = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    listed = {
        "500": {"content": "<b>", "special": False, **fields},
        "401": {"content": "<a>", "special": True, **fields},
    }
    config = {"added_tokens_decoder": listed, "pad_token": "<pad>"}
    tokenizer = Tokenizer(backend("byte_level").to_str(), config)
    other = PreTrainedTokenizerFast(
        tokenizer_object=backend("byte_level"),
        added_tokens_decoder={int(key): tokenizers.AddedToken(**value) for key, value in listed.items()},
        pad_token="<pad>",
    )
    assert tokenizer.encode("x<a>y<b><pad>") == other.encode("x<a>y<b><pad>")
    ids = tokenizer.encode("x<a>y<b><pad>")
    assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True) == "xy<b>"


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_config_decides_on_bos_and_eos(add_bos: bool, add_eos: bool) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(backend("sentencepiece").to_str(), {**flags, **names})
    other = PreTrainedTokenizerFast(tokenizer_object=backend("sentencepiece"), **flags, **names)
    assert tokenizer.encode("a step") == other.encode("a step")


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("key", ["add_bos_token", "add_eos_token"])
def test_an_absent_key_leaves_tokenizer_jsons_template(
    single: str, flag: bool | None, key: str, tmp_path: pathlib.Path
) -> None:
    """What the other key says nothing of is as transformers reads it from the same directory."""
    other = tokenizers.Tokenizer.from_str(backend("sentencepiece").to_str())
    other.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    config = {"bos_token": "<s>", "eos_token": "</s>", **({} if flag is None else {key: flag})}
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    ids = Tokenizer(other.to_str(), config).encode("a step")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("a step")
    is_bos = key == "add_bos_token"
    assert (2 in ids if is_bos else 1 in ids) == (2 in theirs if is_bos else 1 in theirs)
    assert (1 in ids if is_bos else 2 in ids) == (flag if flag is not None else (1 if is_bos else 2) in theirs)
    if flag is None:
        assert ids == theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["a", " ", "!", "7", "é", "\n", "你", "▁", "a!"])
def test_long_runs_are_cut_into_bounded_pieces_without_loss(kind: str, unit: str) -> None:
    text = unit * 60_000
    tokenizer = ours(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == (text if kind == "byte_level" else text.replace("▁", " "))
    pre_tokenizer = tokenizer._backend.pre_tokenizer
    assert pre_tokenizer is not None
    assert max(len(piece) for piece, _ in pre_tokenizer.pre_tokenize_str(text)) <= MAX_PIECE_CHARS


@pytest.mark.parametrize("kind", KINDS)
def test_long_ordinary_text_is_not_changed_by_the_bound(kind: str) -> None:
    text = "\n".join(small_tokenizers.TEXT) * 40
    assert len(text) > 3 * MAX_PIECE_CHARS
    assert ours(kind).encode(text) == theirs(kind).encode(text)


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"U\+D800.*character 2"):
        ours("byte_level").encode("ab\ud800")


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), "Replace"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), r"ByteLevel \+ Strip"),
        (None, "null"),
    ],
)
def test_unsupported_decoder_is_named(decoder: decoders.Decoder | None, name: str) -> None:
    other = tokenizers.Tokenizer.from_str(backend("byte_level").to_str())
    other.decoder = decoder
    with pytest.raises(UnsupportedTokenizer, match=name):
        Tokenizer(other.to_str())


def test_broken_file_is_a_typed_error() -> None:
    with pytest.raises(UnsupportedTokenizer, match="cannot be read"):
        Tokenizer(b"{}")
    for listed in ({"x": {}}, {"1": {}}, [1]):
        with pytest.raises(UnsupportedTokenizer, match="added_tokens_decoder"):
            Tokenizer(backend("byte_level").to_str(), {"added_tokens_decoder": listed})


def test_metaspace_decoder_strips_its_own_space() -> None:
    other = tokenizers.Tokenizer.from_str(backend("sentencepiece").to_str())
    other.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    ids = other.encode("a step é", add_special_tokens=False).ids
    assert Tokenizer(other.to_str()).decode(ids) == other.decode(ids) == "a step é"


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], ["<fim_prefix>", "a", "<fim_suffix>", "b", "<fim_middle>"]),
        (["[PREFIX]", "[SUFFIX]"], ["[SUFFIX]", "b", "[PREFIX]", "a"]),
        (["<fim_prefix>", "<fim_suffix>"], None),
    ],
)
def test_a_text_between_two_others_is_asked_for_by_the_models_marks(
    marks: list[str], expected: list[str] | None
) -> None:
    known = small_tokenizers.byte_level()
    known.add_special_tokens([*marks, "<|fim_pad|>"])
    tokenizer = Tokenizer(known.to_str())
    ids = tokenizer.encode_around("a", "b", add_special_tokens=False)
    assert (None if ids is None else list(map(tokenizer.str_of, ids))) == expected
    assert list(map(tokenizer.str_of, tokenizer.fill_end_ids)) == ["<|fim_pad|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_is_held_once(kind: str) -> None:
    tokenizer = Tokenizer(backend(kind).to_str(), CONFIGS[kind])
    held = tokenizer.full_table.token_bytes
    tables = tokenizer.full_table, tokenizer.table, tokenizer.table_showing({*tokenizer.special_tokens.values()})
    compiler = compiler_of(tokenizer, [tokenizer.eos_id])  # type: ignore[list-item]
    vocabulary = compiler._vocabulary
    assert len({id(one) for one in (held, vocabulary.token_bytes, *(table.token_bytes for table in tables))}) == 1
    assert not any(text for table in tables for text in table.texts)
    assert not any(held.known)  # no object for a token that nobody has asked for
    ids = tokenizer.encode("fährt 😀", add_special_tokens=False)
    assert [table.decode(ids) for table in tables[1:]] == ["fährt 😀"] * 2
    assert {one for one in held.known if one is not None} == {held[token_id] for token_id in ids}
    assert [*held] == [held[token_id] for token_id in range(len(held))]
    assert tables[1].bytes_of(tokenizer.eos_id or 0) == tables[1].bytes_of(len(held)) == tables[0].bytes_of(-1) == b""


def test_word_pieces_are_told_as_text_and_pairs_are_cut_at_the_longer_one() -> None:
    tokenizer = Tokenizer(word_pieces().to_str())
    ids = tokenizer.encode("Hello, the queue's head")
    assert len(ids) > 8  # the file's own truncation does not hold
    assert tokenizer.decode(ids) == "hello , the queue ' s head"
    shown = b"".join(map(tokenizer.table.bytes_of, tokenizer.encode("hello waits")))
    assert shown == b" hello waits"
    whole, second_from = tokenizer.encode_pair("hello there", "waits and then")
    names = [tokenizer.str_of(token_id) for token_id in whole]
    assert names[0] == "[CLS]"
    assert names[second_from - 1] == names[-1] == "[SEP]"
    num_first = second_from - 2
    for most in range(len(whole), 2, -1):
        cut, at = tokenizer.encode_pair("hello there", "waits and then", most)
        assert len(cut) == most
        if most >= 2 * num_first + 3:
            assert cut[:second_from] == whole[:second_from]
            assert at == second_from


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=12), st.binary(min_size=1, max_size=3))
def test_tokens_are_found_by_their_bytes(tokens: list[bytes], part: bytes) -> None:
    found = TokenBytes.of(tokens)
    assert [*found] == tokens
    assert found.lengths.tolist() == [*map(len, tokens)]
    assert [*found.containing(part)] == [i for i, one in enumerate(tokens) if part in one]
    assert found.beginning_with(part) == {i: one for i, one in enumerate(tokens) if one and one[0] in part}
