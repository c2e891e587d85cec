"""What a GGUF file's metadata says is what the directory says it was made of; what it must not say is refused."""

import contextlib
import itertools
import json
import random
import struct
import unicodedata
from datetime import datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from core.config_json import parse_model_config
from core.errors import BadCheckpoint, ExitCode, StartupError, UnsupportedModel
from core.gguf import _Cursor, parse_gguf
from core.tokenizer import Tokenizer as OwnTokenizer
from server import gguf_tokenizer
from server.model_files import parse_config, read_model_files
from tests.core.small_tokenizers import TEXT, byte_level, sentencepiece
from tests.gguf_files import byte_level_metadata, parsed, sentencepiece_metadata, write_gguf
from tests.server.tiny_model import CHATML, write_tiny_model

TEXTS = [
    *dict.fromkeys(TEXT),
    "",
    " ",
    "  two  spaces\tand\n\n\nlines \r\n",
    "It's 1234567890 o'clock, WE'LL see",
    "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 = é; \u017ft; ﬁ",
    "Привет, мир! हिन्दी ქართული Ა x.y()",
    "naïve — “quotes” $5+3<=8 ~^|",
    "日本語テキスト 한국어 🏳️‍🌈\x00\x7f",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(path)
    return path


@pytest.fixture
def metadata() -> dict[str, Any]:
    tokenizer = byte_level()
    ends = {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "bos_token_id": tokenizer.token_to_id("<|begin|>")}
    return {**byte_level_metadata(tokenizer, "qwen2", **ends), "tokenizer.chat_template": CHATML}


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def refusal(file: Path) -> StartupError:
    with pytest.raises(StartupError) as caught:
        parse_config(file, read_model_files(file).config)
    assert caught.value.exit_code == ExitCode.MODEL
    return caught.value


def test_file_says_what_its_directory_says(tmp_path: Path, directory: Path, metadata: dict[str, Any]) -> None:
    file = write_gguf(directory, tmp_path / "tiny.gguf", metadata=metadata | {"general.sampling.temp": 0.5})
    ours, theirs = read_model_files(file), read_model_files(directory)
    assert parse_model_config(ours.config) == parse_model_config(
        theirs.config | {"bos_token_id": ours.tokenizer.bos_id, "eos_token_id": ours.tokenizer.eos_id}
    )
    assert ours.eos_ids == theirs.eos_ids
    assert ours.recommended["temperature"] == 0.5
    chat = [{"role": "user", "content": "hi"}]
    now = datetime(2026, 7, 4)
    assert ours.chat_template.render(chat, now=now) == theirs.chat_template.render(chat, now=now)
    for text in [text for text in TEXTS if unicodedata.is_normalized("NFC", text)]:  # as Qwen's does, the tiny one not
        assert ours.tokenizer.encode(text, False) == theirs.tokenizer.encode(text, False)
    assert ours.tokenizer.special_ids == theirs.tokenizer.special_ids


LLAMA3 = (  # of Meta-Llama-3's tokenizer.json, verbatim
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (  # of Mistral-Small-3.1's tokenizer.json, verbatim
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (  # of Seed-Coder's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN35 = (  # of Qwen3.5's tokenizer.json, verbatim
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK2 = (  # of DeepSeek-V2-Lite's, with code points in place of letters
    "[\r\n]",
    rf"\s?{gguf_tokenizer._characters(gguf_tokenizer._CASED)}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
DEEPSEEK3 = (  # of DeepSeek-V3's, likewise
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PRE_TOKENIZERS = {
    "qwen2": None,
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "tekken": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(TEKKEN), "isolated"), BYTES]),
    "glm4": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
    "seed-coder": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SEED), "isolated"), BYTES]),
    "qwen35": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN35), "isolated"), BYTES]),
    "deepseek-llm": pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK2),
            pre_tokenizers.Digits(individual_digits=True),
            BYTES,
        ]
    ),
    "deepseek-v3": pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK3), BYTES]
    ),
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
}


def hugging_faces(pre: str) -> Tokenizer:
    tokenizer = byte_level()
    if pre in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    if pre != "qwen2":
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = pre in ("llama-bpe", "tekken")
    return Tokenizer.from_str(json.dumps(content))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers_give_the_ids_of_hugging_faces(pre: str, tmp_path: Path, directory: Path) -> None:
    theirs = hugging_faces(pre)
    begin = theirs.token_to_id("<|begin|>")
    metadata = byte_level_metadata(theirs, pre, bos_token_id=begin, add_bos_token=True)
    ours = read_model_files(write_gguf(directory, tmp_path / "m.gguf", metadata=metadata)).tokenizer
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text).ids)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("falcon3", "llama-bpe"),
        ("megrez", "qwen2"),
        ("mellum", "gpt-2"),
        ("minerva-7b", "smollm"),
        ("joyai-llm", "deepseek-v3"),
        ("kanana2", "gpt-4o"),
    ],
)
def test_names_that_llama_cpp_splits_alike_are_tokenized_alike(name: str, like: str, metadata: dict[str, Any]) -> None:
    ours, expected = (
        gguf_tokenizer.tokenizer_files({**metadata, "tokenizer.ggml.pre": one}, 1000) for one in (name, like)
    )
    assert ours == expected


@pytest.mark.parametrize("text", TEXTS)
def test_default_pre_tokenizer_splits_as_llama_cpp_does(text: str) -> None:
    """unicode_regex_split: each expression parts what the ones before it left, matches and gaps alike."""
    pieces = [text] if text else []
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in gguf_tokenizer.PRE_TOKENIZERS["default"]]
    )
    for pattern in gguf_tokenizer.PRE_TOKENIZERS["default"]:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_gives_the_ids_of_its_own_algorithm(has_prefix: bool, tmp_path: Path, directory: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece(), add_space_prefix=has_prefix)
    file = write_gguf(roomy(directory, tmp_path), tmp_path / "m.gguf", metadata=metadata)
    ours = read_model_files(file).tokenizer
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    for text in [text for text in TEXTS if text and "<|" not in text]:
        whole = ("▁" if has_prefix else "") + text.replace(" ", "▁")
        assert ours.encode(text) == [1, *merged_by_score(whole, tokens, scores)]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("</s>", add_special_tokens=False) == [2]


def roomy(directory: Path, tmp_path: Path) -> Path:
    """The tiny model with a larger embedding: its tokenizer is another."""
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "roomy"
    path.mkdir()
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"] = np.zeros((512, 64), np.float32)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"vocab_size": 512}
    (path / "config.json").write_text(json.dumps(config))
    return path


def merged_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE: merge the neighbours that make the best piece, the leftmost first, until none does."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = list(text)
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


def test_ends_are_those_named_and_those_that_mean_nothing_else(
    tmp_path: Path, directory: Path, metadata: dict[str, Any]
) -> None:
    begin, end = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    del metadata["tokenizer.ggml.eos_token_id"]
    metadata["tokenizer.ggml.eot_token_id"] = begin
    assert read_model_files(write_gguf(directory, tmp_path / "m.gguf", metadata=metadata)).eos_ids == (begin, end)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.pre": "viking"}, r"pre-tokenizer 'viking' is not supported.*llama-bpe"),
        ({"tokenizer.ggml.model": "t5"}, r"tokenizer 't5' is not supported.*gpt2"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "Token `b c` out of vocabulary"),
        ({"tokenizer.ggml.merges": ["a"]}, "merge 'a' is not of two tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "'a' is there twice"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 10_000}, "eos_token_id is 10000"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4"),
        ({"llama.attention.causal": 0}, "attention.causal=0"),
        ({"llama.block_count": 2**31}, "block_count is 2147483648"),
        ({"llama.attention.head_count": [4, 2]}, r"rewritten\.gguf: llama\.attention\.head_count=\[4, 2\]"),
        ({"llama.attention.head_count_kv": 3}, r"head_count=4 is not a multiple of llama\.attention\.head_count_kv=3"),
        ({"llama.rope.freq_base": 0}, r"rewritten\.gguf: llama\.rope\.freq_base=0"),
        ({"llama.context_length": 0}, r"rewritten\.gguf: llama\.context_length=0.*download it again"),
        ({"general.sampling.temp": "hot"}, r"rewritten\.gguf: general\.sampling\.temp is 'hot'"),
        ({"tokenizer.ggml.eot_token_id": [1, 2]}, r"rewritten\.gguf: .*eot_token_id is \[1, 2\]"),
        ({"tokenizer.ggml.eom_token_id": 10_000}, "eom_token_id is 10000"),
        ({"tokenizer.ggml.pre": ["a"]}, r"rewritten\.gguf: GGUF pre-tokenizer"),
        ({"tokenizer.ggml.merges": "a b"}, r"rewritten\.gguf: .*tokenizer\.ggml\.merges is not a list"),
        ({"split.count": 3}, "one of 3 parts.*llama-gguf-split"),
        ({"general.alignment": 24}, "not a power of two"),
    ],
)
def test_what_would_be_served_wrong_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, directory: Path, metadata: dict[str, Any]
) -> None:
    # written as bytes after those of the same key: the file's writer would refuse some of these itself
    kept = {key: value for key, value in metadata.items() if key not in fields}
    file = rewritten(write_gguf(directory, tmp_path / "m.gguf", metadata=kept), fields)
    with pytest.raises(StartupError, match=f"(?s){message}"):
        parse_config(file, read_model_files(file).config)


def rewritten(file: Path, fields: dict[str, Any]) -> Path:
    """The file's metadata with fields put in; the tensors' offsets count from an aligned end, which moves along."""
    old = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(file.with_name("rewritten.gguf"), "llama")
    for key, found in old.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in fields:
            kind = found.types[0]
            writer.add_key_value(key, found.contents(), kind, found.types[-1] if len(found.types) > 1 else None)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for tensor in old.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return file.with_name("rewritten.gguf")


def test_unknown_architectures_and_formats_are_named(tmp_path: Path, directory: Path) -> None:
    for name in ("falcon", "deepseek32", "kimi-linear"):
        finish(gguf.GGUFWriter(tmp_path / f"{name}.gguf", name))
        assert f"{name!r} is not supported" in refusal(tmp_path / f"{name}.gguf").cause
        assert "llama, qwen2, qwen3" in refusal(tmp_path / f"{name}.gguf").fix
    writer = gguf.GGUFWriter(tmp_path / "iq2.gguf", "llama")
    rows = np.zeros((2, 66), np.uint8)
    writer.add_tensor("output.weight", rows, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    finish(writer)
    assert (
        "output.weight is stored as IQ2_XXS; supported are F32, F16, BF16, Q8_0" in refusal(tmp_path / "iq2.gguf").cause
    )


@pytest.mark.parametrize(
    ("type_id", "message"), [(40, "NVFP4"), (41, "Q1_0"), (42, "Q2_0"), (12, "rows of 48 numbers, Q4_K blocks of 256")]
)
def test_formats_that_are_not_read_and_rows_that_are_no_whole_blocks_are_named(
    type_id: int, message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((2, 48), np.float32))
    finish(writer)
    whole, listed = (tmp_path / "m.gguf").read_bytes(), struct.pack("<QQ", 48, 2)
    assert whole.count(listed) == 1
    changed = whole.replace(listed + bytes(4), listed + struct.pack("<I", type_id))
    with pytest.raises(UnsupportedModel, match=message):
        parse_gguf(memoryview(changed), "m")


@pytest.mark.parametrize(
    ("version", "message"), [(b"\1\0\0\0", "of version 1; 2 and 3 are read"), (b"\0\0\0\3", "that is big-endian")]
)
def test_files_of_other_versions_and_machines_are_named(version: bytes, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_gguf(memoryview(b"GGUF" + version + bytes(16)), "m")


def test_every_truncation_of_the_header_is_an_error(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokenizer.texts", ["one", "two"])
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
    finish(writer)
    whole = (tmp_path / "m.gguf").read_bytes()
    assert parse_gguf(memoryview(whole), "m").metadata["tokenizer.texts"] == ["one", "two"]
    for size, has_tokenizer in itertools.product(range(len(whole)), (True, False)):
        with pytest.raises(StartupError, match="not a whole GGUF file"):
            parse_gguf(memoryview(whole[:size]), "m", has_tokenizer)


def test_without_the_tokenizers_lists_a_header_says_the_same(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("tokenizer.texts", ["one", "two"])
    writer.add_array("tokenizer.numbers", [1.5, 2.5])
    writer.add_string("tokenizer.name", "bpe")
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
    finish(writer)
    whole = memoryview((tmp_path / "m.gguf").read_bytes())
    found, all_of_it = parse_gguf(whole, "m", has_tokenizer=False), parse_gguf(whole, "m")
    assert found.tensors == all_of_it.tensors
    assert found.metadata == all_of_it.metadata | {"tokenizer.texts": [], "tokenizer.numbers": []}


@pytest.mark.parametrize("moved", [-32, -256, 1, 16])
def test_tensors_that_overlap_or_are_not_aligned_are_refused(moved: int, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in ("output.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    finish(writer)
    whole = (tmp_path / "m.gguf").read_bytes() + bytes(64)
    start, second = (one.offset for one in parse_gguf(memoryview(whole), "m").tensors.values())
    place = whole.rindex(struct.pack("<Q", second - start), 0, start)
    changed = whole[:place] + struct.pack("<Q", second - start + moved) + whole[place + 8 :]
    with pytest.raises(StartupError, match="overlaps another, or does not begin at a multiple of 32 bytes"):
        parse_gguf(memoryview(changed), "m")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tokenizer_that_was_read_is_the_one_that_its_json_would_be(kind: str) -> None:
    tokens = ["<unk>", "<s>", "<0x0A>", "a", "b", "ab", "▁", "▁a", "x y"]
    types = [gguf_tokenizer.UNKNOWN, gguf_tokenizer.CONTROL, gguf_tokenizer.BYTE, *[gguf_tokenizer.NORMAL] * 5]
    metadata = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*types, gguf_tokenizer.USER_DEFINED],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0],
    }
    content, config = gguf_tokenizer.tokenizer_files(metadata, len(tokens))
    read, parsed = OwnTokenizer(content, config), OwnTokenizer(json.dumps(content), config)
    assert json.loads(read._backend.to_str()) == json.loads(parsed._backend.to_str())
    assert read.special_ids == parsed.special_ids
    assert [read.bytes_of(number) for number in range(9)] == [parsed.bytes_of(number) for number in range(9)]


HUGE = struct.pack("<Q", 2**60)
HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04" + bytes(100),
        b"GGUF" + struct.pack(">I", 3) + bytes(100),
        HEAD + HUGE + struct.pack("<Q", 0),
        HEAD + struct.pack("<Q", 0) + HUGE,
        HEAD + struct.pack("<QQ", 0, 1) + HUGE + bytes(100),
        HEAD + struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<II", 9, 8) + HUGE,
        HEAD + struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<II", 9, 0) + HUGE,
        HEAD + struct.pack("<QQQ", 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) + bytes(100),
        HEAD + struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(100),
        HEAD + struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, 2**63) + bytes(100),
        HEAD + struct.pack("<QQQ", 1, 0, 1) + b"t" + struct.pack("<I", 2**31) + bytes(100),
    ],
)
def test_hostile_counts_and_offsets_are_errors_at_once(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content)
    refusal(file)


def test_bytes_changed_anywhere_in_the_header_never_crash(
    tmp_path: Path, directory: Path, metadata: dict[str, Any]
) -> None:
    file = write_gguf(directory, tmp_path / "m.gguf", metadata=metadata)
    whole = file.read_bytes()
    num_header_bytes = min(found.offset for found in parsed(file).tensors.values())
    choose = random.Random(3)
    places = [*range(0, 1000, 7), *(choose.randrange(num_header_bytes) for _ in range(150))]
    for place in places:
        changed = bytearray(whole[: num_header_bytes + 100_000])
        changed[place] ^= 1 << choose.randrange(8)
        file.write_bytes(changed)
        with contextlib.suppress(StartupError):  # and nothing else
            parse_config(file, read_model_files(file).config)


LISTED = st.text(max_size=6) | st.sampled_from(["", "\0", "a\0\0\0\0\0\0\0b", "x" * 255, "\u00e9" * 128, "x" * 2**16])


@given(st.lists(LISTED, max_size=12), st.integers(-3, 3), st.binary(max_size=9), st.booleans())
def test_a_lists_texts_are_the_same_all_at_once_and_one_by_one(
    texts: list[str], more: int, rest: bytes, is_kept: bool
) -> None:
    encoded = [text.encode() for text in texts]
    content = b"skip" + b"".join(struct.pack("<Q", len(one)) + one for one in encoded) + rest

    def read(is_plain: bool) -> tuple[object, int]:
        cursor = _Cursor(memoryview(content), "a file")
        cursor.position = 4
        if not is_plain:
            cursor._plain_texts = lambda number, is_kept: None  # type: ignore[method-assign]
        try:
            found: object = cursor._texts("a key", max(0, len(texts) + more), is_kept)
        except BadCheckpoint as error:
            return str(error), 0
        return found, cursor.position

    assert read(is_plain=True) == read(is_plain=False)


def test_a_vocabularys_texts_are_read_all_at_once() -> None:
    texts = [f"\u0120{index}" * (1 + index % 3) for index in range(1000)] + ["\u0120" * 128, "\u4f60\u597d"]
    content = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts) + bytes(20_000)
    cursor = _Cursor(memoryview(content), "a file")
    assert cursor._plain_texts(len(texts), is_kept=True) == texts
    assert cursor.position == len(content) - 20_000
