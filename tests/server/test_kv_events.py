"""KV events, as a subscriber of vLLM's reads them."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from core.errors import StartupError
from core.kv_cache import BlockChange
from server.listening.sockets import TcpAddress
from server.observing import kv_events
from server.observing.kv_events import (
    ALL_TOLD,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KeptBatches,
    KVCacheEvent,
    KVEventBatch,
    events_of,
    kv_events_at,
)
from tests.server.running_server import ask, closing, load_with, serving
from tests.server.simulated_server import completion, request

zmq = pytest.importorskip("zmq", reason="needs pyzmq")
ANYWHERE = TcpAddress("127.0.0.1", 0)


def content(*ids: int) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


def test_neighbours_are_one_event() -> None:
    changes = [
        BlockChange(0),
        BlockChange(1, None, content(5, 6)),
        BlockChange(2, 1, content(7, 8)),
        BlockChange(3, 1, content(9, 9)),
        BlockChange(2),
        BlockChange(3),
    ]
    assert events_of(changes) == [
        AllBlocksCleared(),
        BlockStored([1, 2], None, [5, 6, 7, 8], 2),
        BlockStored([3], 1, [9, 9], 2),
        BlockRemoved([2, 3]),
    ]


def test_adapters_and_salts_are_keys_of_their_blocks_as_vllm_tells_them() -> None:
    """The salts of a chain's first block alone: the hashes of the others are of it."""
    of = ("tenant:acme\0digest", "pepper")
    changes = [
        BlockChange(1, None, content(5), of),
        BlockChange(2, 1, content(6), of),
        BlockChange(3, None, content(5), ("tenant:local", "")),
        BlockChange(4, None, content(5), ("tenant:local2", "")),
        BlockChange(5, None, content(5), ("domain:all", "")),
    ]
    stored = [one for one in events_of(changes, {"digest": "sql"}) if isinstance(one, BlockStored)]
    assert [(one.block_hashes, one.lora_name, one.extra_keys) for one in stored] == [
        ([1, 2], "sql", [("sql", "tenant:acme", "pepper"), ("sql",)]),
        ([3], None, None),
        ([4], None, [("tenant:local2",)]),
        ([5], None, [("domain:all",)]),
    ]


@pytest.mark.parametrize(("size", "num_kept"), [(1, 10), (40, 2), (101, 1)])
def test_the_last_batches_are_kept(size: int, num_kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "NUM_KEPT", 10)
    monkeypatch.setattr(kv_events, "KEPT_BYTES", 100)
    kept = KeptBatches()
    for _ in range(50):
        kept.keep(bytes(size))
    assert [int.from_bytes(number, "big") for number, _ in kept.batches] == list(range(50 - num_kept, 50))


@pytest.mark.parametrize(("address", "has_engine"), [(None, True), (ANYWHERE, False)])
def test_settings_that_say_nothing_are_refused(address: TcpAddress | None, has_engine: bool) -> None:
    with pytest.raises(StartupError, match="--kv-events"):
        kv_events_at(address, ANYWHERE, has_engine)


class Subscriber:
    def __init__(self, published: str, replay: str) -> None:
        self._context = zmq.Context()
        self._published, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for one in (self._published, self._replay):
            one.setsockopt(zmq.RCVTIMEO, 30_000)
        self._published.subscribe(b"")
        self._published.connect(published)
        self._replay.connect(replay)

    def next(self) -> tuple[int, list[KVCacheEvent]]:
        topic, number, batch = self._published.recv_multipart()
        assert topic == b""
        return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch, type=KVEventBatch).events

    def since(self, number: int) -> Iterator[tuple[int, list[KVCacheEvent]]]:
        self._replay.send_multipart((b"", number.to_bytes(8, "big")))
        while True:
            _, told, batch = self._replay.recv_multipart()
            if told == ALL_TOLD:
                return
            yield int.from_bytes(told, "big"), msgspec.msgpack.decode(batch, type=KVEventBatch).events

    def close(self) -> None:
        self._context.destroy(0)


async def test_a_subscriber_knows_what_is_cached_and_can_ask_for_what_it_missed() -> None:
    prompt = "a prompt of some blocks, each of sixteen tokens"
    async with serving(load_with(), kv_events=ANYWHERE, kv_events_replay=ANYWHERE) as running:
        published = running.server._kv_events
        assert published is not None
        subscriber = Subscriber(*published.endpoints)
        try:
            (first,) = await asyncio.to_thread(lambda: list(subscriber.since(0)))
            assert first == (0, [AllBlocksCleared()])
            numbers: list[int] = []
            known: dict[int, list[int]] = {}
            while not known:  # a subscription takes a moment, and what is published meanwhile is lost
                body = {"prompt": f"{len(numbers)} {prompt}", "max_tokens": 1}
                assert (await ask(running.server, closing(completion(**body)))).status == 200
                number, events = await asyncio.to_thread(subscriber.next)
                numbers.append(number)
                for event in events:
                    assert isinstance(event, BlockStored)
                    assert (event.block_size, event.medium) == (16, "GPU")
                    for i, block in enumerate(event.block_hashes):
                        known[block] = event.token_ids[16 * i : 16 * i + 16]
            assert all(len(ids) == 16 for ids in known.values())
            assert (await ask(running.server, closing(request("POST", "/admin/cache/clear", {})))).status == 200
            number, events = await asyncio.to_thread(subscriber.next)
            assert (number, events) == (numbers[-1] + 1, [AllBlocksCleared()])
            assert await asyncio.to_thread(lambda: list(subscriber.since(number))) == [(number, events)]
            everything = await asyncio.to_thread(lambda: list(subscriber.since(0)))
            assert [one for one, _ in everything] == list(range(number + 1))
        finally:
            subscriber.close()
