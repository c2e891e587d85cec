"""Sizes, durations and counts: as operators write them, and as they read them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from server.values import (
    BadValueError,
    choice_of,
    count_between,
    duration_between,
    existing_directory,
    existing_file,
    factor_or_none,
    file_value,
    format_count,
    format_duration,
    format_size,
    model_source,
    names_near,
    nearest,
    size_between,
)

any_size = size_between(0, 2**50)
any_duration = duration_between(0, 1e9)
any_factor = factor_or_none(1.05, 1000)
READ: list[tuple[Callable[[str], float], dict[str, float]]] = [
    (any_size, {"0": 0, "8388608": 2**23, "512MiB": 2**29, "2 GiB": 2**31, " 1.5GiB ": 3 * 2**29, "2GB": 2 * 10**9}),
    (any_size, {"1KB": 1000, "10B": 10}),
    (any_duration, {"10": 10.0, "500ms": 0.5, "1.5 s": 1.5, "2min": 120.0, "1h": 3600.0, "0": 0.0}),
    (any_factor, {"1.6": 1.6, " 2 ": 2.0, "0": 0.0, "0.0": 0.0, "1000": 1000.0}),
    (count_between(2, 4), {"2": 2, "4": 4}),
    (count_between(0, 10**6), {"32_768": 32_768, "32,768": 32_768}),
]
REFUSED: list[tuple[Callable[[str], float], str, list[str]]] = [
    (any_size, "512MiB", ["", "GiB", "2g", "2 Gib", "2GiB!", "1,5GiB", "-1", "1e9", "0x10", "inf", "٣GiBx"]),
    (any_duration, "500ms", ["", "s", "1m", "1 day", "-1s", "inf", "nan"]),
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
    assert nearest("MAX-QUEUE", known) == "max_queue"
    assert nearest("prot", known) == "port"
    assert nearest("zebra", known) is None


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="this is a directory"):
        existing_file(str(tmp_path))


def test_near_a_missing_path_lies_what_looks_like_it(tmp_path: Path) -> None:
    (tmp_path / "steploop.toml").touch()
    assert names_near(tmp_path / "stepploop.toml", os.path.isfile) == [tmp_path / "steploop.toml"]
    assert names_near(tmp_path / "stepploop.toml", os.path.isdir) == []
    assert names_near(tmp_path / "zzz", os.path.isfile) == []


def test_near_a_path_that_goes_wrong_early_lies_the_same_path_with_one_name_changed(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    missing = tmp_path / "template" / "chat.jinja"
    assert names_near(missing, os.path.isfile) == []
    (tmp_path / "templates" / "chat.jinja").touch()
    assert names_near(missing, os.path.isfile) == [tmp_path / "templates" / "chat.jinja"]


def test_a_path_may_go_wrong_in_several_names_and_be_cut_short(tmp_path: Path) -> None:
    wanted = tmp_path / "models" / "Qwen3-0.6B"
    wanted.mkdir(parents=True)
    for missing in ("models/qwen3", "modls/Qwen3-0.6", "MODELS/qwen"):
        assert names_near(tmp_path / missing, os.path.isdir) == [wanted]


def test_of_a_few_names_the_nearest_is_proposed() -> None:
    with pytest.raises(BadValueError, match=r"one of debug, info, warning, error$") as caught:
        choice_of("debug", "info", "warning", "error")("lound")
    assert caught.value.proposal == "info"
    with pytest.raises(BadValueError) as caught:
        choice_of("debug", "info", "warning", "error")("xyz")
    assert caught.value.proposal is None


def test_a_word_that_stands_for_a_name_is_taken_for_it_and_nothing_like_it() -> None:
    with pytest.raises(BadValueError, match=r"one of auto, cpu, cuda; did you mean cuda\?$") as caught:
        choice_of("auto", "cpu", "cuda", gpu="cuda")("gpu")
    assert caught.value.proposal == "cuda"


@pytest.mark.parametrize(("parse", "is_directory"), [(existing_file, True), (existing_directory, False)])
def test_what_is_proposed_is_of_the_kind_asked_for(
    parse: Callable[[str], Path], is_directory: bool, tmp_path: Path
) -> None:
    near = tmp_path / "models"
    near.mkdir() if is_directory else near.touch()
    with pytest.raises(BadValueError) as caught:
        parse(str(tmp_path / "model"))
    assert caught.value.proposal is None


@pytest.mark.parametrize(("name", "other"), [("nope", "opt"), ("nope", "home"), ("abc", "abcdefgh")])
def test_names_with_little_in_common_are_not_near(name: str, other: str, tmp_path: Path) -> None:
    (tmp_path / other).mkdir()
    assert names_near(tmp_path / name, os.path.isdir) == []


def test_a_home_that_nobody_has_is_told() -> None:
    for parse in (model_source, existing_directory, file_value):
        with pytest.raises(BadValueError, match="there is no home directory ~nobody-here"):
            parse("~nobody-here/model")
