"""What the fuzzer has found of interest, tried again without it."""

from pathlib import Path

import pytest

from fuzz import corpus
from fuzz.run import TARGETS, load_check

EVERY_BYTE = bytes(range(256))


@pytest.mark.parametrize("target", TARGETS)
def test_target_holds_for_its_saved_inputs(target: str) -> None:
    check = load_check(target)
    inputs = corpus.load(target)
    assert len(inputs) > 10
    for data in inputs:
        check(data)


@pytest.mark.parametrize("target", TARGETS)
def test_target_holds_for_no_input_and_any_byte(target: str) -> None:
    check = load_check(target)
    for data in (b"", *(bytes([byte]) for byte in EVERY_BYTE), EVERY_BYTE, EVERY_BYTE * 64):
        check(data)


def test_saved_input_is_what_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(corpus, "DIRECTORY", tmp_path)
    inputs = [b"", EVERY_BYTE, b"\\r\\n\r\n\x85\xa0", b"a"]
    corpus.save("any", inputs)
    assert corpus.load("any") == sorted(inputs, key=len)
