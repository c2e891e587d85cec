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
from gpu import kv_store
from gpu.kv_store import LENGTH, MAGIC, RETRY_S, SUFFIX, KVDirectory

BLOCK_BYTES = 100


def label(serial: int, parent: int | None = None) -> BlockLabel:
    return BlockLabel(serial, (("tenant", "") if parent is None else parent, bytes([serial]) * 64))


def content(serial: int) -> bytes:
    return bytes([serial]) * BLOCK_BYTES


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


def put(directory: KVDirectory, *pairs: tuple[int, int]) -> None:
    """(slot, serial of the block)"""
    for slot, serial in pairs:
        directory.put(slot, label(serial), content(serial))


def run(directory: KVDirectory, work: str) -> None:
    """Each word is a slot and its block's serial, or an operation and its slots."""
    for word in work.split():
        name, *numbers = word.split(":")
        if name in ("use", "drop"):
            getattr(directory, name)([int(number) for number in numbers])
        else:
            put(directory, (int(name), int(numbers[0])))


@pytest.mark.parametrize(
    ("work", "saved", "used", "most_files", "survivors"),
    [
        ("0:1 1:1 0:2 drop:2", {}, (), None, {1, 2}),  # a block that moves to another slot keeps its file
        ("0:1 1:1 2:1 3:1 0:2", {}, (), 2, {1, 2}),  # and is counted once
        # At the end it comes to its new slot before another block comes to its old one.
        ("0:1 2:3", {0: 2, 1: 1}, (0, 1), None, {1, 2, 3}),
        ("0:1 1:2 use:0 2:3", {}, (), 2, {1, 3}),  # the least recently used gives way, not the first written
        ("0:1", {1: 2, 2: 3}, (1, 0, 2), 2, {1, 3}),  # also of what is written at the end
        ("0:1 1:2 2:3 drop:0:2", {}, (), None, {2}),
        ("0:1 0:2", {}, (), None, {2}),
    ],
)
def test_each_slots_block_has_a_file_and_the_last_used_have_room(
    work: str, saved: dict[int, int], used: tuple[int, ...], most_files: int | None, survivors: set[int], tmp_path: Path
) -> None:
    with opened(tmp_path / "one") as directory:
        put(directory, (0, 1))
    (file,) = (tmp_path / "one").glob(f"*{SUFFIX}")
    limit_bytes = None if most_files is None else most_files * file.stat().st_size
    path = tmp_path / "tested"
    directory = KVDirectory(path, limit_bytes, "f" * 64, BLOCK_BYTES)
    run(directory, work)
    directory.save(
        {slot: label(serial) for slot, serial in saved.items()}, used, lambda slot: content(saved.get(slot, 0))
    )
    assert num_files(path) == len(survivors)
    assert found(path) == {content(serial) for serial in survivors}


@pytest.mark.parametrize(("used", "last"), [((0, 1), 2), ((1, 0), 1)])
def test_process_with_less_room_takes_what_was_used_last(used: tuple[int, int], last: int, tmp_path: Path) -> None:
    directory = KVDirectory(tmp_path, None, "f" * 64, BLOCK_BYTES)
    directory.save({0: label(1), 1: label(2)}, used, lambda slot: content(slot + 1))
    assert found(tmp_path, num_slots=1) == {content(last)}


def test_what_was_used_last_is_written_first_where_time_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kv_store, "QUEUE_BYTES", BLOCK_BYTES)
        patch.setattr(kv_store, "SAVE_S", 0.0)
        directory = KVDirectory(tmp_path, None, "f" * 64, BLOCK_BYTES)
        is_slow = threading.Event()
        directory._queue.put(is_slow.wait)
        directory.save({slot: label(slot) for slot in range(3)}, (0, 2, 1), content)
    is_slow.set()
    directory._writer.join()
    os.close(directory._lock)
    assert found(tmp_path) == {content(1)}


def test_dropped_files_are_gone_while_the_process_runs(tmp_path: Path) -> None:
    """A process that is killed then leaves nothing of them."""
    with opened(tmp_path) as directory:
        put(directory, (0, 1), (1, 2), (2, 3))
        directory.drop([0, 2])
        wait_written(directory)
        assert num_files(tmp_path) == 1


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

    def num_unwritten(serial: int) -> int:
        put(directory, (serial, serial))
        wait_written(directory)
        return directory.state.num_unwritten

    with caplog.at_level("INFO", "gpu.kv_store"):
        assert num_unwritten(1) == 0
        with gone(path):
            assert num_unwritten(2) == 1
        assert num_unwritten(3) == 2
        clock.advance(RETRY_S - 1)
        assert num_unwritten(4) == 3
        clock.advance(1)
        assert num_unwritten(5) == 3
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
            put(directory, (serial, serial))
            wait_written(directory)
            clock.advance(RETRY_S)
    assert len(caplog.messages) == 1
    assert directory.state.num_unwritten == 3
    directory.drop([2])
    put(directory, (3, 4))
    directory.save({}, (), content)
    assert found(path) == {content(1), content(4)}


def test_file_that_cannot_be_deleted_is_counted_until_it_can(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as directory:
        put(directory, (0, 1), (1, 2))
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


def signed(header: object) -> bytes:
    """A file with this header, or its bytes."""
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw = MAGIC + LENGTH.pack(len(head)) + head + content(2)
    return raw + hashlib.sha256(raw).digest()


def flipped(raw: bytes, place: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place:][1:]


WHOLE = signed(HEADER)
DIGEST = "its content has another digest than it claims"
HEADLESS = "its header cannot be read"


def test_the_file_that_is_damaged_below_is_whole(tmp_path: Path) -> None:
    (tmp_path / f"strange{SUFFIX}").write_bytes(WHOLE)
    assert found(tmp_path) == {content(2)}


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"not ours", "it is of another format"),
        (b"", "it is of another format"),
        (WHOLE[:-1], DIGEST),
        (WHOLE + b"x", DIGEST),
        (flipped(WHOLE, -50), DIGEST),
        (flipped(WHOLE, -1), DIGEST),
        (flipped(WHOLE, len(MAGIC)), HEADLESS),
        (signed(HEADER | {"name": ["strange"]}), HEADLESS),
        (signed(HEADER | {"name": 1}), HEADLESS),
        (signed(HEADER | {"name": "../strange"}), "it has another name than it claims"),
        (signed(HEADER | {"fingerprint": {}}), HEADLESS),
        (signed(HEADER | {"fingerprint": "another"}), "it is of another model, dtype or quantisation"),
        (signed(HEADER | {"parent": [1], "domain": None}), HEADLESS),
        (signed(HEADER | {"parent": "other"}), HEADLESS),
        (signed(HEADER | {"parent": "gone", "domain": None}), None),
        (signed(HEADER | {"domain": ["tenant", 1]}), HEADLESS),
        (signed(HEADER | {"domain": None}), HEADLESS),
        (signed(HEADER | {"content": "00"}), HEADLESS),
        (signed(HEADER | {"more": 1}), HEADLESS),
        (signed({"name": "strange"}), HEADLESS),
        (signed([]), HEADLESS),
        (signed(b"[" * 20_000 + b"]" * 20_000), HEADLESS),
    ],
)
def test_a_damaged_file_is_deleted_with_its_reason_and_the_others_are_found(
    raw: bytes, why: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as directory:
        put(directory, (0, 1))
    strange = tmp_path / f"strange{SUFFIX}"
    strange.write_bytes(raw)
    for file in tmp_path.glob(f"*{SUFFIX}"):
        os.utime(file, (1, 1))
    assert found(tmp_path) == {content(1)}
    assert not strange.exists()
    assert caplog.messages == ([] if why is None else [f"{strange} is not used: {why}"])


def test_what_is_no_regular_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / f"directory{SUFFIX}").mkdir()
    (tmp_path / "elsewhere").write_bytes(WHOLE)
    (tmp_path / f"strange{SUFFIX}").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    with opened(tmp_path) as directory:
        assert directory.load(4, lambda slot, raw: None) == []
        put(directory, (0, 1))
    assert found(tmp_path) == {content(1)}
    assert [(tmp_path / f"{name}{SUFFIX}").exists() for name in ("directory", "strange", "pipe")] == [
        True,
        False,
        False,
    ]


def test_start_says_what_was_read_and_each_reason_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as directory:
        put(directory, *((slot, slot + 1) for slot in range(6)))
    *_, torn, also_torn, changed = sorted(tmp_path.glob(f"*{SUFFIX}"))
    torn.write_bytes(b"torn")
    also_torn.write_bytes(b"torn")
    changed.write_bytes(changed.read_bytes()[:-1])
    with caplog.at_level("INFO", "gpu.kv_store"):
        assert len(found(tmp_path)) == 3
    assert sorted(caplog.messages) == sorted(
        [
            f"{torn} and 1 more are not used: it is of another format",
            f"{changed} is not used: {DIGEST}",
            f"3 blocks read from {tmp_path}, 3 files deleted there",
        ]
    )


def test_a_files_digest_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept, read = tmp_path / "weights", tmp_path / "digests.json", []

    def digest(content: bytes | None = None) -> str:
        if content is not None:
            file.write_bytes(content)
        return kv_store._digest_of(file, kept)

    monkeypatch.setattr(kv_store, "SETTLED_S", 1e9)
    first = digest(b"one")
    assert not kept.exists(), "it has changed just now"
    monkeypatch.setattr(kv_store, "SETTLED_S", -1e9)
    plain = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: read.append(file) or plain(*arguments))
    assert [digest(), digest()] == [first, first]
    assert len(read) == 1
    assert digest(b"two") == hashlib.sha256(b"two").hexdigest()
    kept.write_text(kept.read_text().replace(digest()[:8], "not hex!"))
    assert digest() == hashlib.sha256(b"two").hexdigest()
