"""Which prompts are cached here, told to routers: vLLM's KV events over ZeroMQ (its distributed/kv_events.py).

Each message is a topic (empty), a number of 8 bytes, and a KVEventBatch in MessagePack: what can be found on the device
since the last. The first says that nothing can. Whoever misses some asks the other socket, a ROUTER, for all from a
number on, of those that are kept. Needs pyzmq, which the extra `kv-events` installs. Threads: `put` is the engine's,
the sockets have one of their own. A subscriber that is too slow loses messages, and holds nobody up.
"""

import contextlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Any

import msgspec

from core.errors import ExitCode, StartupError
from core.kv_cache import BlockChange
from server.gate.tenants import LOCAL
from server.listening.sockets import TcpAddress

logger = logging.getLogger(__name__)

NUM_KEPT, KEPT_BYTES = 10_000, 64 * 2**20  # of the last batches
LOOK_S = 0.1  # for those who ask for them
MOST_CHANGES = 1_000  # of one batch
CLOSE_S = 2.0
ALL_TOLD = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """One after another in a chain, which begins where the parent ends.

    Args:
        extra_keys: what else each block's hash is of: the adapter's name, and of a chain's first block the salts: the
            tenant's or its cache_domain's, and the request's own.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[KVCacheEvent]


def events_of(changes: Iterable[BlockChange], adapters: Mapping[str, str] = MappingProxyType({})) -> list[KVCacheEvent]:
    """Neighbours of one kind, and of one chain, are one event.

    Args:
        adapters: names by digest; of one that is gone the digest is told.
    """
    events: list[KVCacheEvent] = []
    for serial, parent, content, (domain, salt) in changes:
        last = events[-1] if events else None
        token_ids = memoryview(content).cast("i").tolist()
        if not serial:
            events.append(AllBlocksCleared())
        elif not token_ids and isinstance(last, BlockRemoved):
            last.block_hashes.append(serial)
        elif not token_ids:
            events.append(BlockRemoved([serial]))
        else:
            if not (isinstance(last, BlockStored) and last.block_hashes[-1] == parent):
                last = BlockStored([], parent, [], len(token_ids))
                events.append(last)
            shared_by, _, digest = domain.partition("\0")
            last.lora_name = adapters.get(digest, digest) or None
            salts = (shared_by if shared_by != LOCAL.cache_salt_domain else "", salt) if parent is None else ()
            keys = tuple(filter(None, (last.lora_name, *salts))) or None
            if keys is not None and last.extra_keys is None:
                last.extra_keys = [None] * len(last.block_hashes)
            if last.extra_keys is not None:
                last.extra_keys.append(keys)
            last.block_hashes.append(serial)
            last.token_ids += token_ids
    return events


class KeptBatches:
    """The last ones, with their numbers."""

    def __init__(self) -> None:
        self.batches: deque[tuple[bytes, bytes]] = deque()
        self._num_bytes = self._next = 0

    def keep(self, batch: bytes) -> tuple[bytes, bytes]:
        self.batches.append((self._next.to_bytes(8, "big"), batch))
        self._next += 1
        self._num_bytes += len(batch)
        while len(self.batches) > NUM_KEPT or (self._num_bytes > KEPT_BYTES and len(self.batches) > 1):
            self._num_bytes -= len(self.batches.popleft()[1])
        return self.batches[-1]


def kv_events_at(address: TcpAddress | None, replay: TcpAddress | None, has_engine: bool) -> "KvEvents | None":
    """What the settings ask for. Raises StartupError: they contradict each other; or see KvEvents."""
    if address is not None and has_engine:
        return KvEvents(address, replay)
    if address is not None or replay is not None:
        cause = "--kv-events-replay needs --kv-events" if has_engine else "--kv-events needs a model in this process"
        raise StartupError(cause, "give --kv-events and --model, or leave both out")
    return None


class KvEvents:
    """
    Attributes:
        endpoints: of the publisher, and of the other socket if there is one, as they are bound.
        adapters: returns the names of those that are served, by digest.
    """

    def __init__(self, address: TcpAddress, replay: TcpAddress | None) -> None:
        """Raises StartupError: pyzmq is not installed, or an address cannot be listened on."""
        try:
            import zmq
        except ImportError as error:
            cause = "--kv-events needs pyzmq, which is not installed"
            raise StartupError(cause, f"{sys.executable} -m pip install pyzmq", ExitCode.VERSION) from error
        self._context, self._zmq = zmq.Context(), zmq
        self._sockets = [self._bind(zmq.PUB, address)]
        self._sockets += [] if replay is None else [self._bind(zmq.ROUTER, replay)]
        self.endpoints = [one.getsockopt_string(zmq.LAST_ENDPOINT) for one in self._sockets]
        self._changes: SimpleQueue[BlockChange | None] = SimpleQueue()
        self.put = self._changes.put
        self._kept = KeptBatches()
        self.adapters: Callable[[], Mapping[str, str]] = dict
        self.put(BlockChange(0))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, address: TcpAddress) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.IPV6, ":" in address.host)
        try:
            socket.bind(f"tcp://{address}")
        except self._zmq.ZMQError as error:
            self._context.destroy(0)
            fix = "name an address of this machine and a free port: --kv-events, --kv-events-replay"
            raise StartupError(f"{address} cannot be listened on: {error}", fix, ExitCode.TRANSIENT) from error
        return socket

    def close(self) -> None:
        self._changes.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            changes: list[BlockChange | None] = []
            with contextlib.suppress(Empty):
                changes.append(self._changes.get(timeout=LOOK_S))
                while len(changes) < MOST_CHANGES:
                    changes.append(self._changes.get_nowait())
            is_open = None not in changes
            try:
                self._publish([one for one in changes if one is not None])
                for router in self._sockets[1:]:
                    self._replay(router)
            except Exception:  # of one batch or one who asks: the others are told
                logger.exception("KV events cannot be published")
        self._context.destroy(0)

    def _publish(self, changes: list[BlockChange]) -> None:
        if changes:
            batch = msgspec.msgpack.encode(KVEventBatch(time.time(), events_of(changes, self.adapters())))
            self._sockets[0].send_multipart((b"", *self._kept.keep(batch)))

    def _replay(self, router: Any) -> None:
        with contextlib.suppress(self._zmq.Again):
            while True:
                asked = router.recv_multipart(self._zmq.NOBLOCK)
                who, first = asked[0], asked[-1]
                for number, batch in self._kept.batches:
                    if number >= first and len(first) == len(number):
                        router.send_multipart((who, b"", number, batch))
                router.send_multipart((who, b"", ALL_TOLD, b""))
