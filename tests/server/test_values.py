"""Sizes, durations and counts: as operators write them, and as they read them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from server.values import (
    BadValueError,
    MissingPathError,
    NamedPath,
    choice_of,
    count_between,
    directory_value,
    duration_between,
    existing_directory,
    existing_file,
    factor_or_none,
    file_value,
    format_count,
    format_duration,
    format_size,
    is_gguf,
    model_source,
    named_directory,
    names_near,
    nearest,
    size_between,
)

CHOICE = choice_of("debug", "info", "warning", "error")
any_size = size_between(0, 2**50)
any_duration = duration_between(0, 1e9)
any_factor = factor_or_none(1.05, 1000)
READ: list[tuple[Callable[[str], float], dict[str, float]]] = [
    (any_size, {"0": 0, "8388608": 2**23, "512MiB": 2**29, "2 GiB": 2**31, " 1.5GiB ": 3 * 2**29, "2GB": 2 * 10**9}),
    (any_size, {"1KB": 1000, "10B": 10}),
    (any_duration, {"10": 10.0, "500ms": 0.5, "1.5 s": 1.5, "2min": 120.0, "1h30m": 5400.0, "0": 0.0}),
    (any_factor, {"1.6": 1.6, " 2 ": 2.0, "0": 0.0, "0.0": 0.0, "1000": 1000.0}),
    (count_between(2, 4), {"2": 2, "4": 4}),
    (count_between(0, 10**6), {"32_768": 32_768, "32,768": 32_768}),
]
REFUSED: list[tuple[Callable[[str], float], str, list[str]]] = [
    (any_size, "512MiB", ["", "GiB", "2g", "2 Gib", "2GiB!", "1,5GiB", "-1", "1e9", "0x10", "inf", "٣GiBx"]),
    (any_duration, "500ms", ["", "s", "1h30", "1 day", "-1s", "inf", "nan"]),
    (
        any_factor,
        "from 1.05 to 1000, such as 1.6, or 0 for none",
        ["", "1", "1.04", "1001", "1.6x", "-2", "inf", "nan"],
    ),
    (count_between(2, 4), "from 2 to 4", ["1", "5"]),
]
SHOWN: list[tuple[Callable[[float], str], dict[float, str]]] = [
    (format_size, {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 2**23: "8 MiB", 5.37e9: "5.0 GiB", 2**41: "2 TiB"}),
    (format_duration, {0: "0 ms", 0.5: "500 ms", 1.5: "1.5 s", 75: "75 s", 60: "1 min", 90: "90 s", 7200: "2 h"}),
    (format_count, {999: "999", 99_700: "99.7K", 5_100_000: "5.1M", 8.03e9: "8.0B"}),
]


@pytest.mark.parametrize(("parse", "values"), READ)
def test_what_operators_write_is_read(parse: Callable[[str], float], values: dict[str, float]) -> None:
    assert {text: parse(text) for text in values} == values


@pytest.mark.parametrize(("parse", "expected", "texts"), REFUSED)
def test_what_is_no_value_is_refused_with_what_is(
    parse: Callable[[str], float], expected: str, texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(BadValueError, match=expected):
            parse(text)


@pytest.mark.parametrize(("show", "texts"), SHOWN)
def test_what_operators_read_is_short(show: Callable[[float], str], texts: dict[float, str]) -> None:
    assert {number: show(number) for number in texts} == texts
    if show is format_duration:
        assert [any_duration(text) for text in texts.values()] == list(texts)


def test_nearest_ignores_case_and_kind_of_dash_and_gives_up_when_far() -> None:
    known = ["max_queue", "port"]
    words = ("MAX-QUEUE", "prot", "zebra")
    assert [nearest(word, known) for word in words] == ["max_queue", "port", None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to be in, with some paths."""
    monkeypatch.chdir(tmp_path)
    for file in ("steploop.toml", "templates/chat.jinja", "models/Qwen3-0.6B/config.json"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    for name in ("opt", "home", "abcdefgh"):
        Path(name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "is_wanted", "near"),
    [
        ("stepploop.toml", os.path.isfile, ["steploop.toml"]),
        ("stepploop.toml", os.path.isdir, []),
        ("template/chat.jinja", os.path.isfile, ["templates/chat.jinja"]),  # one name changed, early
        ("template/chat.txt", os.path.isdir, []),
        *((name, os.path.isdir, ["models/Qwen3-0.6B"]) for name in ("models/qwen3", "modls/Qwen3-0.6", "MODELS/qwen")),
        *((name, os.path.isdir, []) for name in ("zzz", "nope", "abc")),  # with little in common
    ],
)
def test_near_a_missing_path_lies_what_looks_like_it(
    missing: str, is_wanted: Callable[[Path], bool], near: list[str], tree: Path
) -> None:
    assert names_near(tree / missing, is_wanted) == [tree / name for name in near]


@pytest.mark.parametrize(
    ("parse", "text", "expected", "proposal"),
    [
        (existing_file, "templates", "a file, and this is a directory", None),
        (file_value, "templates", "a file, and this is a directory", None),
        (existing_directory, "steploop.toml", "a directory, and this is a file", "."),
        (directory_value, "steploop.toml", "a directory, and this is a file", None),
        (existing_file, "template", "a file that exists", None),  # what is near is a directory
        (existing_directory, "model", "a directory that exists; near it: models", "models"),
        (existing_directory, "steplop.toml", "a directory that exists", None),
        *((parse, "~nobody-here/a", "no home directory ~nobody-here", None) for parse in (model_source, file_value)),
        (CHOICE, "lound", "one of debug, info, warning, error", "info"),
        (CHOICE, "xyz", "one of debug, info, warning, error", None),
        (choice_of("auto", "cpu", "cuda", gpu="cuda"), "gpu", "one of auto, cpu, cuda; did you mean cuda?", "cuda"),
    ],
)
def test_a_refusal_proposes_what_may_have_been_meant(
    parse: Callable[[str], object], text: str, expected: str, proposal: str | None, tree: Path
) -> None:
    with pytest.raises(BadValueError) as caught:
        parse(text)
    assert expected in caught.value.expected
    assert caught.value.proposal == proposal


def test_paths_of_what_is_to_be_made_need_not_exist(tree: Path) -> None:
    assert (file_value("new.json"), directory_value("new")) == (Path("new.json"), Path("new"))


def test_a_name_of_a_directory_has_no_control_characters(tmp_path: Path) -> None:
    assert named_directory(f"sql v2={tmp_path}") == NamedPath("sql v2", tmp_path)
    for name in ("", " ", "a\n", "a\x1b[2J", "\u202ea"):
        with pytest.raises(BadValueError, match="NAME=PATH"):
            named_directory(f"{name}={tmp_path}")


@pytest.mark.parametrize("name", ["MODEL.GGUF", "sha256-8eeb52df"])
def test_a_gguf_file_is_known_by_its_suffix_or_its_first_bytes(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"GGUF\x03")
    assert model_source(str(tmp_path / name)) == tmp_path / name
    (tmp_path / "notes").write_bytes(b"GGU")
    with pytest.raises(MissingPathError) as caught:
        model_source(str(tmp_path / "notes"))
    assert "of another kind" in caught.value.expected
    assert not is_gguf(tmp_path / "missing.gguf")
