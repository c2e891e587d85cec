"""Random clients that leave: `python -m tests.server.cancel_storm 1000000`, against the whole server in virtual time.

Requests come over HTTP/1.1 and HTTP/2, more of them than the engine runs at once; some readers are slow, some windows
shut. They are called off in every way and at every moment: before the request is whole, while it waits, in its
prefill, within a step, between steps, while it is paused, just when it has ended. After each round nothing may be left.
"""

import argparse
import asyncio
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hpack import Encoder, NeverIndexedHeaderTuple

from core.plan import RunnerLimits
from core.simulation import CostModel, SimulatedRunner
from core.types import Cancel, FinishReason, Pause
from server.gate.tenants import LOCAL_NAME
from server.wire.http2_frames import DATA, GOAWAY, HEADER_BYTES, HEADERS, PREFACE, RST_STREAM, SETTINGS
from server.wire.limits import ConnectionLimits, FrameLimits, Http2Limits, Rate
from tests.server.raw_http2 import frame
from tests.server.simulated_server import TOKENIZER, SimulatedServer, completion, request

NUM_OPEN = 24  # requests, for eight slots
NUM_CONNECTIONS = 12
CANCELS_PER_ROUND = 1000
LIMITS = RunnerLimits(96, 4, 8, 16, 120, TOKENIZER.vocab_size)  # with preemptions
COST = CostModel(fixed_s=0.01, token_s=0.0)
NO_LIMIT = Rate(10**9, 10**9)
CONNECTION_LIMITS = ConnectionLimits(
    unsent_bytes=2048,  # soon passed by who does not read
    http2=Http2Limits(frames=FrameLimits(resets=NO_LIMIT, settings=NO_LIMIT, num_overhead_frames=10**9)),
)
HEAD = Encoder().encode(  # the same bytes on every connection: nothing is put into its table
    [
        NeverIndexedHeaderTuple(name, value)
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", b"a"),
            (b":path", b"/v1/completions"),
        )
    ]
)
END_STREAM, END_HEADERS = 0x1, 0x4
WINDOW_SETTING = 4
PROMPT_LENGTHS = (1, 1, 5, 20, 60)
STOPS = (None, None, None, "e", "t")


class Peer:
    """One connection of a client. `num_open`: of its requests, those that nobody has ended, as far as it knows."""

    def __init__(self, server: SimulatedServer, reads: bool) -> None:
        self.transport = server.connect(reads)

    @property
    def num_open(self) -> int:
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        return self.transport.is_lost or self.transport.is_closing()

    def ask(self, body: bytes, num_bytes: int | None) -> None:
        """Send a request, or the first bytes of it."""
        raise NotImplementedError

    def ways_to_leave(self) -> dict[str, Callable[[], None]]:
        return {"end of connection": self.transport.feed_eof, "TCP reset": self.transport.reset}


class Http1Peer(Peer):
    def __init__(self, server: SimulatedServer, reads: bool) -> None:
        super().__init__(server, reads)
        self._is_asked = False

    @property
    def num_open(self) -> int:
        received = self.transport.received
        if self._is_asked and received.endswith((b"\r\n0\r\n\r\n", b"}")):  # a stream's end, or a document's
            received.clear()
            self._is_asked = False
        return int(self._is_asked)

    def ask(self, body: bytes, num_bytes: int | None) -> None:
        self._is_asked = True
        self.transport.feed(request("POST", "/v1/completions", body)[:num_bytes])


class Http2Peer(Peer):
    """Speaks in prepared frames: an h2 of its own would cost as much as the server."""

    def __init__(self, server: SimulatedServer, reads: bool, window: int) -> None:
        super().__init__(server, reads)
        self.streams: set[int] = set()
        self._next_stream_id = 1
        self._is_told_to_go = False
        settings = WINDOW_SETTING.to_bytes(2, "big") + window.to_bytes(4, "big")
        more_window = (2**31 - 65_536).to_bytes(4, "big")
        self.transport.feed(PREFACE + frame(SETTINGS, settings) + frame(8, more_window))

    @property
    def num_open(self) -> int:
        self._read()
        return len(self.streams)

    @property
    def is_over(self) -> bool:
        return super().is_over or self._is_told_to_go

    def ask(self, body: bytes, num_bytes: int | None) -> None:
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        self.streams.add(stream_id)
        if num_bytes is None:
            data = frame(HEADERS, HEAD, END_HEADERS, stream_id) + frame(DATA, body, END_STREAM, stream_id)
        else:  # whole frames: others of the connection are to follow
            data = frame(HEADERS, HEAD, END_HEADERS, stream_id) + frame(DATA, body[:num_bytes], 0, stream_id)
        self.transport.feed(data)

    def ways_to_leave(self) -> dict[str, Callable[[], None]]:
        goaway = frame(GOAWAY, bytes(4) + (2).to_bytes(4, "big"))
        return super().ways_to_leave() | {"GOAWAY": lambda: self.transport.feed(goaway)}

    def reset_stream(self, stream_id: int) -> None:
        self.streams.discard(stream_id)
        self.transport.feed(frame(RST_STREAM, (8).to_bytes(4, "big"), 0, stream_id))

    def _read(self) -> None:
        """Forget the streams that have ended."""
        received = self.transport.received
        while len(received) >= HEADER_BYTES:
            end = HEADER_BYTES + int.from_bytes(received[:3], "big")
            if len(received) < end:
                return
            kind, flags, stream_id = received[3], received[4], int.from_bytes(received[5:9], "big")
            if kind == GOAWAY:
                self._is_told_to_go = True
            elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
                self.streams.discard(stream_id)
            del received[:end]


class CancelStorm:
    """Rounds of it, each with a server that has served all rounds before.

    Attributes:
        called_off: how often each way has ended a request that was open.
        num_pauses: readers that were too slow for their stream, in all rounds that are over.
    """

    def __init__(self, seed: int) -> None:
        self.server = SimulatedServer(
            limits=LIMITS, cost=COST, runner=SimulatedRunner, connection_limits=CONNECTION_LIMITS, max_requests=1000
        )
        self.called_off: Counter[str] = Counter()
        self.num_pauses = 0
        self._random = random.Random(seed)
        self._peers: list[Peer] = []

    @property
    def num_called_off(self) -> int:
        return sum(self.called_off.values())

    def run_round(self, num_cancels: int = CANCELS_PER_ROUND) -> None:
        """Call off so many or a few more, let everybody go, and check that nothing is left."""
        target = self.num_called_off + num_cancels
        while self.num_called_off < target:
            self._let_come()
            for _ in range(self._random.randrange(6)):
                self.server.loop.call_later(self._random.random() * COST.fixed_s, self._call_off_one)
            if not self.server.step():
                self.server.run_for(COST.fixed_s)
        self._let_stall()
        for peer in self._peers:
            self.called_off["all at the end"] += peer.num_open
            peer.transport.reset()
        self._peers.clear()
        self.server.run()
        self._check_nothing_is_left()

    def _let_come(self) -> None:
        self._peers = [peer for peer in self._peers if not peer.is_over]
        while len(self._peers) < NUM_CONNECTIONS:
            self._peers.append(self._new_peer())
        free = [peer for peer in self._peers if isinstance(peer, Http2Peer) or not peer.num_open]
        for _ in range(NUM_OPEN - sum(peer.num_open for peer in self._peers)):
            if free:
                peer = self._random.choice(free)
                self._ask(peer)
                if isinstance(peer, Http1Peer):
                    free.remove(peer)

    def _new_peer(self) -> Peer:
        reads = self._random.random() < 0.9
        if self._random.random() < 0.5:
            return Http1Peer(self.server, reads)
        return Http2Peer(self.server, reads, self._random.choice((2**30, 2**30, 2**30, 3000, 0)))

    def _ask(self, peer: Peer) -> None:
        pick = self._random.choice
        fields: dict[str, Any] = {"prompt": [5] * pick(PROMPT_LENGTHS), "max_tokens": self._random.randint(1, 60)}
        fields |= {"n": pick((1, 1, 1, 2, 3)), "stream": pick((True, True, False)), "stop": pick(STOPS)}
        body = completion(**fields).partition(b"\r\n\r\n")[2]
        is_cut = self._random.random() < 0.1
        peer.ask(body, self._random.randrange(1, len(body)) if is_cut else None)
        if is_cut and isinstance(peer, Http1Peer):  # the rest never comes: it can only leave
            self.server.loop.call_later(self._random.random(), self._leave, peer)

    # Ways to call off

    def _call_off_one(self) -> None:
        open_peers = [peer for peer in self._peers if not peer.is_over and peer.num_open]
        if not open_peers:
            return
        peer = self._random.choice(open_peers)
        chance = self._random.random()
        if chance < 0.2 and self.server.generations.active:
            self._delete(self._random.choice(list(self.server.generations.active)))
        elif isinstance(peer, Http2Peer) and chance < 0.9:
            peer.reset_stream(self._random.choice(sorted(peer.streams)))
            self.called_off["RST_STREAM"] += 1
        else:
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        if not peer.is_over:
            name, leave = self._random.choice(list(peer.ways_to_leave().items()))
            self.called_off[name] += peer.num_open
            leave()

    def _delete(self, request_id: str) -> None:
        """As the route does, without a connection for it."""
        self.called_off["DELETE"] += 1
        self.server.generations.cancel(request_id, LOCAL_NAME)

    def _let_stall(self) -> None:
        """Who does not read by now will not: time passes until the server has cut them off."""
        before = self.server.metrics.num_disconnects
        self.server.run_for(CONNECTION_LIMITS.stall_s + 1)
        self.called_off["stall"] += self.server.metrics.num_disconnects - before

    # What must hold

    def _check_nothing_is_left(self) -> None:
        server = self.server
        server.check_idle()
        assert server.network.is_quiet(), "a connection, a handler or a timer is left over"
        assert not asyncio.all_tasks(server.loop)
        stopped = sum(isinstance(m, Cancel) and m.reason is FinishReason.STOP for m in server.posted)
        self.called_off["stop string"] += stopped
        self.num_pauses += sum(isinstance(message, Pause) for message in server.posted)
        server.forget_history()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.cancel_storm", description=__doc__)
    parser.add_argument("num_cancels", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    storm = CancelStorm(arguments.seed)
    start_s = time.monotonic()
    peaks_kb = []
    while storm.num_called_off < arguments.num_cancels:
        storm.run_round()
        peaks_kb.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if len(peaks_kb) % 10 == 0:
            print(f"{storm.num_called_off} called off, {time.monotonic() - start_s:.0f} s", flush=True)
    for way, count in storm.called_off.most_common():
        print(f"{count:9} {way}")
    num_steps = storm.server.stats.num_steps
    print(f"{storm.num_called_off:9} in {len(peaks_kb)} rounds, {num_steps} steps and {storm.num_pauses} pauses")
    first, last = peaks_kb[len(peaks_kb) // 10] >> 10, peaks_kb[-1] >> 10
    print(f"nothing is left; peak memory {first} MiB after the first tenth, {last} MiB at the end")
    storm.server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
