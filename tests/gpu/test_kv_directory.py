"""The files of blocks: which are there after what was written, moved, dropped, and found by the next process."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.kv_cache import BlockLabel
from core.simulation import SimulatedClock
from core.types import StoreState
from gpu.kv_store import LENGTH, MAGIC, RETRY_S, SUFFIX, KVDirectory

BLOCK_BYTES = 100


def label(serial: int, parent: int | None = None) -> BlockLabel:
    return BlockLabel(serial, (("tenant", "") if parent is None else parent, bytes([serial]) * 64))


def content(serial: int) -> bytes:
    return bytes([serial]) * BLOCK_BYTES


def signed(raw: bytes) -> bytes:
    return raw + hashlib.sha256(raw).digest()


def nested_lists(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@contextmanager
def opened(path: Path, limit_bytes: int | None = None) -> Iterator[KVDirectory]:
    directory = KVDirectory(path, limit_bytes, "f" * 64, BLOCK_BYTES)
    try:
        yield directory
    finally:
        directory.save({}, (), lambda slot: b"")


def wait_written(directory: KVDirectory) -> None:
    """Until all that is queued now was done."""
    is_done = threading.Event()
    directory._queue.put(is_done.set)
    is_done.wait()


def found(path: Path, num_slots: int = 10) -> set[bytes]:
    """What the next process finds."""
    contents: dict[int, bytes] = {}
    with opened(path) as directory:
        directory.load(num_slots, contents.__setitem__)
    return set(contents.values())


def num_files(path: Path) -> int:
    return len(list(path.glob(f"*{SUFFIX}")))


def test_block_that_moves_to_another_slot_keeps_its_file(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.put(0, label(1), content(1))
        directory.put(1, label(1), content(1))
        directory.put(0, label(2), content(2))
        directory.drop([2])
    assert num_files(tmp_path) == 2
    assert found(tmp_path) == {content(1), content(2)}


def test_block_that_moves_at_the_end_keeps_its_file_and_its_descendants(tmp_path: Path) -> None:
    """Written last first: the block comes to its new slot before another one comes to its old slot."""
    directory = KVDirectory(tmp_path, None, "f" * 64, BLOCK_BYTES)
    directory.put(0, label(1), content(1))
    directory.put(2, label(3, parent=1), content(3))
    at = {0: content(2), 1: content(1)}
    directory.save({0: label(2), 1: label(1)}, (0, 1), at.__getitem__)
    assert found(tmp_path) == {content(1), content(2), content(3)}


def test_block_that_moves_is_counted_once(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.put(0, label(1), content(1))
    size_bytes = next(tmp_path.glob(f"*{SUFFIX}")).stat().st_size
    with opened(tmp_path / "full", 2 * size_bytes) as directory:
        for slot in range(4):
            directory.put(slot, label(1), content(1))
        directory.put(0, label(2), content(2))
    assert num_files(tmp_path / "full") == 2


def size_of_a_file(path: Path) -> int:
    with opened(path) as directory:
        directory.put(0, label(1), content(1))
    return next(path.glob(f"*{SUFFIX}")).stat().st_size


def test_least_recently_used_file_gives_way_not_the_one_written_first(tmp_path: Path) -> None:
    limit_bytes = 2 * size_of_a_file(tmp_path / "one")
    with opened(tmp_path / "two", limit_bytes) as directory:
        directory.put(0, label(1), content(1))
        directory.put(1, label(2), content(2))
        directory.use([0])
        directory.put(2, label(3), content(3))
    assert found(tmp_path / "two") == {content(1), content(3)}


def test_at_the_end_what_was_used_last_has_room_first(tmp_path: Path) -> None:
    limit_bytes = 2 * size_of_a_file(tmp_path / "one")
    directory = KVDirectory(tmp_path / "two", limit_bytes, "f" * 64, BLOCK_BYTES)
    directory.put(0, label(1), content(1))
    directory.save({1: label(2), 2: label(3)}, (1, 0, 2), {1: content(2), 2: content(3)}.__getitem__)
    assert found(tmp_path / "two") == {content(1), content(3)}


@pytest.mark.parametrize(("used", "last"), [((0, 1), 2), ((1, 0), 1)])
def test_process_with_less_room_takes_what_was_used_last(used: tuple[int, int], last: int, tmp_path: Path) -> None:
    directory = KVDirectory(tmp_path, None, "f" * 64, BLOCK_BYTES)
    directory.save({0: label(1), 1: label(2)}, used, lambda slot: content(slot + 1))
    assert found(tmp_path, num_slots=1) == {content(last)}


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / f"directory{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    with opened(tmp_path) as directory:
        assert directory.load(4, lambda slot, raw: None) == []
        directory.put(0, label(1), content(1))
    assert found(tmp_path) == {content(1)}
    assert (tmp_path / f"directory{SUFFIX}").is_dir()


def test_dropped_files_are_gone_once_the_writer_has_come_to_it(tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        for slot in range(3):
            directory.put(slot, label(slot + 1), content(slot + 1))
        directory.drop([0, 2])
        wait_written(directory)
        assert num_files(tmp_path) == 1
    assert found(tmp_path) == {content(2)}


@contextmanager
def gone(path: Path) -> Iterator[None]:
    """Nothing can be written or deleted there: it is no directory for a while."""
    aside = path.rename(path.with_name("aside"))
    path.touch()
    yield
    path.unlink()
    aside.rename(path)


def test_disk_that_fails_is_tried_again_after_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "kv", SimulatedClock()
    directory = KVDirectory(path, None, "f" * 64, BLOCK_BYTES, clock)

    def put(serial: int) -> int:
        directory.put(serial, label(serial), content(serial))
        wait_written(directory)
        return directory.state.num_unwritten

    with caplog.at_level("INFO", "gpu.kv_store"):
        assert put(1) == 0
        with gone(path):
            assert put(2) == 1
        assert put(3) == 2
        clock.advance(RETRY_S - 1)
        assert put(4) == 3
        clock.advance(1)
        assert put(5) == 3
    assert num_files(path) == 2
    assert ["not written" in caplog.messages[0], "again" in caplog.messages[-1]] == [True, True]
    assert len(caplog.messages) == 2
    directory.save({}, (), content)
    assert found(path) == {content(serial) for serial in range(1, 6)}


def test_disk_that_still_fails_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "kv", SimulatedClock()
    directory = KVDirectory(path, None, "f" * 64, BLOCK_BYTES, clock)
    with gone(path):
        for serial in range(1, 4):
            directory.put(serial, label(serial), content(serial))
            wait_written(directory)
            clock.advance(RETRY_S)
    assert len(caplog.messages) == 1
    assert directory.state.num_unwritten == 3
    directory.drop([2])
    directory.put(3, label(4), content(4))
    directory.save({}, (), content)
    assert found(path) == {content(1), content(4)}


def test_file_that_cannot_be_deleted_is_counted_until_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as directory:
        directory.put(0, label(1), content(1))
        directory.put(1, label(2), content(2))
        wait_written(directory)
        file = min(tmp_path.glob(f"*{SUFFIX}"))
        file.unlink()
        file.mkdir()
        directory.drop([0, 1])
        directory.drop([])
        wait_written(directory)
        assert directory.state == StoreState(num_undeleted=1)
        assert [message for message in caplog.messages if "cannot be deleted" in message] == caplog.messages
        assert len(caplog.messages) == 1
        file.rmdir()
        file.touch()
        directory.drop([])
        wait_written(directory)
        assert directory.state == StoreState()
    assert num_files(tmp_path) == 0


HEADER = {"fingerprint": "f" * 64, "name": "strange", "parent": None, "domain": ["tenant", ""], "content": "00" * 64}


@pytest.mark.parametrize(
    "header",
    [
        HEADER | {"name": ["strange"]},
        HEADER | {"name": 1},
        HEADER | {"name": "../strange"},
        HEADER | {"fingerprint": {}},
        HEADER | {"parent": [1], "domain": None},
        HEADER | {"domain": ["tenant", 1]},
        HEADER | {"domain": None},
        HEADER | {"content": "00"},
        HEADER | {"more": 1},
        [],
        nested_lists(20_000),
    ],
    ids=lambda header: "nested" if isinstance(header, bytes) else None,
)
def test_file_whose_header_is_none_is_deleted_and_the_others_are_found(header: object, tmp_path: Path) -> None:
    with opened(tmp_path) as directory:
        directory.put(0, label(1), content(1))
    strange = tmp_path / f"strange{SUFFIX}"
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    strange.write_bytes(signed(MAGIC + LENGTH.pack(len(head)) + head + content(2)))
    for file in tmp_path.glob(f"*{SUFFIX}"):
        os.utime(file, (1, 1))
    assert found(tmp_path) == {content(1)}
    assert not strange.exists()


def test_start_says_what_was_read_and_each_reason_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as directory:
        for slot in range(6):
            directory.put(slot, label(slot + 1), content(slot + 1))
    for file in sorted(tmp_path.glob(f"*{SUFFIX}"))[:2]:
        file.write_bytes(b"torn")
    *_, flipped = sorted(tmp_path.glob(f"*{SUFFIX}"))
    flipped.write_bytes(flipped.read_bytes()[:-1])
    with caplog.at_level("INFO", "gpu.kv_store"):
        assert len(found(tmp_path)) == 3
    torn, digest, summary = [record.getMessage() for record in caplog.records]
    assert torn.endswith(f"{SUFFIX} and 1 more are not used: it is of another format")
    assert digest == f"{flipped} is not used: its content has another digest than it claims"
    assert summary == f"3 blocks read from {tmp_path}, 3 files deleted there"


def test_files_of_another_model_go_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as directory:
        directory.put(0, label(1), content(1))
    with caplog.at_level("WARNING", "gpu.kv_store"):
        directory = KVDirectory(tmp_path, None, "another", BLOCK_BYTES)
        assert directory.load(4, lambda slot, raw: None) == []
        directory.save({}, (), lambda slot: b"")
    (record,) = caplog.records
    assert "of another model" in record.getMessage()
