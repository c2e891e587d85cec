"""What the fuzzer has found of interest, tried again without it."""

from pathlib import Path

import pytest

from fuzz import run
from fuzz.run import TARGETS, load_check, load_inputs, save_inputs

EVERY_BYTE = bytes(range(256))


@pytest.mark.parametrize("target", TARGETS)
def test_target_holds_for_its_saved_inputs(target: str) -> None:
    check = load_check(target)
    inputs = load_inputs(target)
    assert len(inputs) > 10
    for data in inputs:
        check(data)


@pytest.mark.parametrize("target", TARGETS)
def test_target_holds_for_no_input_and_any_byte(target: str) -> None:
    check = load_check(target)
    for data in (b"", *(bytes([byte]) for byte in EVERY_BYTE), EVERY_BYTE, EVERY_BYTE * 64):
        check(data)


def test_saved_input_is_what_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "CORPUS", tmp_path)
    inputs = [b"", EVERY_BYTE, b"\\r\\n\r\n\x85\xa0", b"a"]
    save_inputs("any", inputs)
    assert load_inputs("any") == sorted(inputs, key=len)
