"""The upstreams of one model: their connections, their health, and which of them takes the next request. Thread: loop.

A request takes a `Slot` at an upstream and gives it back when its answer is over. Each upstream has `max_requests` at
most, one of our own twice what it runs at once; the others wait here, by class, then by how many their tenants have in
progress, then by arrival.

A request goes where least has to be computed before its first token: the tokens of its prompt whose leading blocks have
not gone there, and what waits there already, over the upstream's weight. None gets more than LOAD_BOUND times its part
of all requests (consistent hashing with bounded loads, arXiv:1608.01350, with known prefixes in place of hashes).

Of several versions a tenant always gets the same while it is up: the highest of the weighted rendezvous hashes of
tenant and version (draft-ietf-bess-weighted-hrw), so that one that leaves moves its own tenants alone.

Health is asked for once a second: NUM_FAILURES in a row put an upstream out, NUM_SUCCESSES bring it in, with a part of
its weight that grows over SLOW_START_S. One at which nobody listens, or that loads or ends, is out at once, until its
next good probe; one that has too much to do rests while others of its version are there. Outcomes of requests eject:
NUM_BAD_OUTCOMES in a row, for EJECTION_S, doubled each time, never so many that fewer than half of the pool is left.

A request without an answer waits here again, for another upstream: what was refused, once, within a budget, RETRY_SHARE
of all requests; what was lost with a connection, once; what was never begun, MAX_MOVES times.
"""

import asyncio
import logging
import math
import ssl
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from typing import NamedTuple

import msgspec

from core.errors import ErrorKind, ServiceError, StartupError
from server.upstream.connection import H1, H2, Address, Connection, address_of, connect
from server.upstream.exchange import AnswerHead, Fields, Outgoing, UpstreamFault, WholeAnswer
from server.upstream.http2 import Http2
from server.upstream.settings import ModelSettings, UpstreamSettings
from server.wire.tls import no_password

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROBE_S = 1.0  # for its answer, once it is connected: one that hangs is out after NUM_FAILURES of them
PROBE_BYTES = 64 * 1024
NUM_FAILURES, NUM_SUCCESSES = 3, 2
MAX_CAUSES = 8  # that are told of one that is out: one that hangs has two in turn
TELL_EVERY_S = 10.0  # that no upstream takes requests
HUNG_S = 10.0  # of one of our own: its loop waits for nothing
SLOW_START_S = 10.0
LEAST_WEIGHT = 0.1  # of an upstream's own, when it has just come in
NUM_BAD_OUTCOMES = 5
EJECTION_S, MOST_EJECTION_S = 1.0, 60.0
MAX_CONNECTIONS = 4  # over HTTP/2, to one upstream
STREAMS_PER_CONNECTION = 64  # before another is opened
IDLE_S = 30.0  # after which an HTTP/1.1 connection is closed: before most servers do
LOAD_BOUND = 1.25
ACTIVE_TOKENS = 64  # of a prompt, that an answer in progress delays it like
BLOCK_BYTES = 256  # of text, by which leading blocks are known
BLOCK_TOKENS = 64  # likewise, of tokens
MAX_BLOCKS = 1024  # of one prompt: beyond 256 KiB, only the rest is the same for all
MAX_KNOWN = 50_000  # 5 MB of blocks that an upstream is taken to have: it evicts the oldest, too
JSON: Fields = ((b"content-type", b"application/json"),)
PROTOCOLS = {"auto": (H2, H1), "h2": (H2,), "h1": (H1,)}
RETRY_SHARE, MAX_RETRIES = 0.1, 64  # of requests that were refused, and at once
MAX_MOVES = 8  # of one request
NOT_OPEN = ("loading", "draining")  # codes of a server of ours that has just begun, or ends


@dataclass(slots=True, eq=False)
class Upstream:
    """One server."""

    settings: UpstreamSettings
    address: Address
    num_active: int = 0  # requests that hold a slot
    num_waiting_tokens: int = 0  # of prompts that have gone there and have no first token
    is_healthy: bool = False  # as probes have it
    most_requests: float = math.inf  # in progress there, as it tells itself
    num_requests: int = 0
    num_failures: int = 0  # of requests
    has_been_asked: bool = False  # for its health
    why_out: str = "it has not answered yet"
    rests_until_s: float = 0.0  # others are asked before it
    connections: list[Connection] = field(default_factory=list)
    _known: dict[int, None] = field(default_factory=dict)  # leading blocks that have gone there, the oldest first
    _num_probed: int = 0  # alike, in a row: above 0 well, below it not
    _in_since_s: float = 0.0
    _num_bad: int = 0  # outcomes in a row
    _ejected_until_s: float = 0.0
    _ejection_s: float = EJECTION_S
    _opening: asyncio.Task[Connection] | None = None
    _room: asyncio.Future[None] | None = None  # of a connection
    _told: set[str] = field(default_factory=set)  # causes, since it is out

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def place(self) -> str:
        """In metrics, after its model's name."""
        return self.url

    @property
    def is_up(self) -> bool:
        """In metrics."""
        return self.is_healthy

    @property
    def num_connections(self) -> int:
        return sum(not one.is_closed for one in self.connections)

    @property
    def shown(self) -> str:
        """In logs: where it is, and its version."""
        return self.url if self.settings.version is None else f"{self.url}#{self.settings.version}"

    def is_in(self, now_s: float) -> bool:
        return self.is_healthy and now_s >= self._ejected_until_s

    def takes_requests(self, now_s: float) -> bool:
        """A weight of 0 drains it."""
        return self.settings.weight > 0 and self.is_in(now_s)

    def weight(self, now_s: float) -> float:
        part = min(1.0, max(LEAST_WEIGHT, (now_s - self._in_since_s) / SLOW_START_S))
        return self.settings.weight * part

    # Prompts.

    def num_new_tokens(self, prompt: "LeadingBlocks") -> int:
        """That it would have to compute of the prompt. If a block is known, so are those before it."""
        return max(0, prompt.num_tokens - self.num_known(prompt) * prompt.tokens_per_block)

    def num_known(self, prompt: "LeadingBlocks") -> int:
        blocks, known = prompt.hashes, self._known
        return bisect_left(range(len(blocks)), True, key=lambda i: blocks[i] not in known)

    def learn(self, prompt: "LeadingBlocks") -> None:
        known = self._known
        for block in reversed(prompt.hashes):  # a prompt's end is forgotten before its beginning
            known.pop(block, None)
            known[block] = None
        while len(known) > MAX_KNOWN:
            del known[next(iter(known))]

    def forget(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._known.pop(block, None)

    # Connections.

    def free_connection(self) -> Connection | None:
        """One that has room for a request; None: another is to be opened."""
        self.connections = [one for one in self.connections if not one.is_closed]
        with_room = (one for one in self.connections if one.http.room)
        best = min(with_room, key=lambda one: one.http.num_open, default=None)
        is_full = best is not None and best.http.is_multiplexed and best.http.num_open >= STREAMS_PER_CONNECTION
        return None if is_full and self._num_sending < MAX_CONNECTIONS else best

    @property
    def _num_sending(self) -> int:
        """Connections that requests can be sent on."""
        return sum(not one.http.is_closing for one in self.connections)

    @property
    def most_streams(self) -> float:
        """That its connections take at once, as far as it has told."""
        known = [one.http.max_streams for one in self.connections if isinstance(one.http, Http2)]
        return MAX_CONNECTIONS * min(known, default=math.inf)

    async def connection(self, num_more: int = 0) -> Connection:
        """As free_connection, or a new one; where HTTP/2 has all that it may have: one of these, once it has room.

        Args:
            num_more: connections that there may be beyond MAX_CONNECTIONS.

        Raises:
            UpstreamFault: it cannot be connected to, or accepts no requests.
        """
        num_opened = 0
        while num_opened <= MAX_CONNECTIONS + num_more:
            if (free := self.free_connection()) is not None:
                return free
            if self._num_sending >= MAX_CONNECTIONS + num_more and self.most_streams < math.inf:
                if not any(one.http.num_open for one in self.connections):
                    break
                self._room = self._room or asyncio.get_running_loop().create_future()
                await asyncio.shield(self._room)
                num_opened = 0
                continue
            num_opened += 1
            if H2 in self.address.protocols:  # the first may be shared
                if self._opening is None:
                    self._opening = asyncio.create_task(self._open())
                    self._opening.add_done_callback(self._note_opened)
                connection = await asyncio.shield(self._opening)
            else:
                connection = await self._open()
            if connection.http.room:
                return connection
        raise UpstreamFault("its connections accept no requests", is_untouched=True)

    def note_room(self) -> None:
        """A stream may have ended: whoever waits for room looks again."""
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    async def _open(self) -> Connection:
        connection = await connect(self.address, self.address.protocols[0])
        if not connection.http.is_multiplexed and self.address.protocols == (H2,):
            connection.abort()
            raise UpstreamFault("it does not speak HTTP/2", is_untouched=True)
        self.connections.append(connection)
        if not connection.http.is_multiplexed and self.address.tls is None and H2 in self.address.protocols:
            self.address = self.address._replace(protocols=(H1,))  # asked once
        return connection

    def _note_opened(self, task: asyncio.Task[Connection]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # whoever awaits it is told

    def close_idle(self, now_s: float, silence_s: float) -> None:
        """And those that are lost, of which nobody tells: its health is not answered, and nothing else has come."""
        for one in self.connections:
            is_idle = now_s - one.heard_s > IDLE_S and not one.http.is_multiplexed
            if not one.http.num_open and (is_idle or one.http.is_closing):
                one.close()
            elif not self.is_healthy and now_s - one.heard_s > silence_s:
                one.abort()

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        for one in self.connections:
            one.abort()

    # Outcomes.

    def note_probe(self, why: str | None, now_s: float) -> None:
        """why: it failed; None: it is well."""
        is_first, self.has_been_asked = not self.has_been_asked, True
        if why is None:
            self._num_probed = max(1, self._num_probed + 1)
            if not self.is_healthy and (is_first or self._num_probed >= NUM_SUCCESSES):
                self.is_healthy, self.why_out = True, ""
                self._told.clear()
                self._in_since_s = now_s - (SLOW_START_S if is_first else 0.0)
                logger.info("the upstream %s is available", self.shown)
            return
        self._num_probed = min(-1, self._num_probed - 1)
        if not self.is_healthy or self._num_probed <= -NUM_FAILURES:
            self._be_out(why)

    def note_not_open(self, why: str) -> None:
        """A request has found that it takes none now."""
        if self.is_healthy:
            self._be_out(why)
            self._num_probed = NUM_SUCCESSES - 1

    def _be_out(self, why: str) -> None:
        if why not in self._told and len(self._told) < MAX_CAUSES:
            self._told.add(why)
            logger.warning("the upstream %s is unavailable: %s", self.url, why)
        self.is_healthy, self.why_out = False, why
        for one in self.connections:
            if not one.http.num_open:
                one.abort()

    def note_outcome(self, is_good: bool, now_s: float, may_eject: bool) -> None:
        """Of a request."""
        self.num_failures += not is_good
        self._num_bad = 0 if is_good else self._num_bad + 1
        if is_good:
            self._ejection_s = max(EJECTION_S, self._ejection_s / 2)
        elif self._num_bad >= NUM_BAD_OUTCOMES and may_eject:
            self._num_bad, self._ejected_until_s = 0, now_s + self._ejection_s
            logger.warning("the upstream %s is ejected for %g s: its requests fail", self.url, self._ejection_s)
            self._ejection_s = min(MOST_EJECTION_S, 2 * self._ejection_s)


class LeadingBlocks(NamedTuple):
    """A prompt, as upstreams may have its beginning cached."""

    num_tokens: int  # of all of it, estimated
    tokens_per_block: int = 0  # likewise
    hashes: tuple[int, ...] = ()  # of its blocks, each chained over those before it


def leading_token_blocks(domain: str, prompts: Sequence[Sequence[int]]) -> LeadingBlocks:
    """As leading_blocks, of prompts whose ids are known; all but the first count for their length alone."""
    return LeadingBlocks(sum(map(len, prompts)), BLOCK_TOKENS, _chained(domain, tuple(prompts[0]), BLOCK_TOKENS))


def leading_blocks(domain: str, texts: Sequence[str], num_tokens: int) -> LeadingBlocks:
    """
    Args:
        domain: in which prompts share what is cached.
        texts: of the prompt, in order.
    """
    num_chars, hashes = sum(map(len, texts)), _chained(domain, "\0".join(texts), BLOCK_BYTES)
    return LeadingBlocks(num_tokens, max(1, num_tokens * BLOCK_BYTES // max(1, num_chars)), hashes)


def _chained(domain: str, what: str | tuple[int, ...], size: int) -> tuple[int, ...]:
    starts = range(0, min(len(what), MAX_BLOCKS * size) - size + 1, size)
    hashes = accumulate(starts, lambda chained, i: hash((chained, what[i : i + size])), initial=hash(domain))
    return tuple(hashes)[1:]  # siphash; for this process alone


@dataclass(slots=True, eq=False)
class Slot:
    """A request's place at an upstream, until `leave`."""

    pool: "Pool"
    prompt: LeadingBlocks  # for the choice
    priority: int  # of its class; higher goes first
    tenant: str  # that it counts for
    granted: asyncio.Future[Upstream]  # its exception is a ServiceError
    upstream: Upstream | None = None
    num_waiting_tokens: int = 0  # that it counts for at its upstream
    num_known: int = 0  # of its blocks, before it came there
    failed: Upstream | None = None  # that has not answered it: another is to

    def note_begun(self) -> None:
        """Its first token has come."""
        if self.upstream is not None:
            self.upstream.num_waiting_tokens -= self.num_waiting_tokens
            self.num_waiting_tokens = 0

    def leave(self) -> None:
        """The answer is over, or nobody wants it. Idempotent."""
        self.granted.cancel()
        self.pool.release(self)


class Access(NamedTuple):
    """What a model's upstreams are asked with."""

    fields: Fields = ()  # the key
    tls: ssl.SSLContext | None = None  # None: no upstream has TLS


class Pool:
    """A model's upstreams."""

    def __init__(self, settings: ModelSettings, loop: asyncio.AbstractEventLoop, access: Access) -> None:
        self.settings = settings
        self._loop = loop
        self._protocols = PROTOCOLS[settings.protocol]
        self._waiting: list[Slot] = []  # in order of arrival
        self._num_active: dict[str, int] = {}  # by tenant
        self._retries = float(MAX_RETRIES)
        self.num_retries = 0
        self._watches: dict[Upstream, asyncio.Task[None]] | None = None  # once it has started
        self._is_leaving = False
        self._told_s = -math.inf  # that none takes requests
        self.upstreams: tuple[Upstream, ...] = ()
        self.take(settings, access)

    def can_take(self, settings: ModelSettings) -> bool:
        """It has other upstreams at most."""
        fields = (one for one in settings.__struct_fields__ if one != "upstreams")
        is_alike = all(getattr(settings, one) == getattr(self.settings, one) for one in fields)
        return is_alike and settings.has_tls == self.settings.has_tls

    def take(self, settings: ModelSettings, access: Access) -> None:
        """Take the upstreams of an entry that `can_take`, and the access to them for new connections.

        An upstream that is gone ends with its requests.
        """
        self._fields, tls = access
        known = {one.url: one for one in self.upstreams}
        self.settings = settings
        self.upstreams = tuple(known.get(one.url) or self._upstream(one, tls) for one in settings.upstreams)
        for one, at in zip(self.upstreams, settings.upstreams, strict=True):
            one.settings = at
            one.address = one.address._replace(tls=one.address.tls and tls)
        self._regions = list(dict.fromkeys(one.region for one in settings.upstreams))
        self._version_weights: dict[str | None, int] = {}
        for at in settings.upstreams:
            self._version_weights[at.version] = self._version_weights.get(at.version, 0) + at.weight
        if self._watches is not None:
            self.start()

    def _upstream(self, settings: UpstreamSettings, tls: ssl.SSLContext | None) -> Upstream:
        is_tls = settings.url.startswith("https:")
        return Upstream(settings, address_of(settings.url, tls if is_tls else None, self._protocols))

    @property
    def num_running(self) -> int:
        return sum(self._num_active.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_out(self) -> bool:
        """No upstream takes requests; of a model that is started on demand, one will."""
        now_s = self._loop.time()
        return self.settings.path is None and not any(one.takes_requests(now_s) for one in self.upstreams)

    @property
    def silence_tells(self) -> bool:
        """A stream whose head does not come is one of a server that hangs: our own send comments."""
        return self.settings.trusted

    def error_of(self, fault: UpstreamFault) -> ServiceError:
        """For a client whose request an upstream has failed, perhaps in the middle of its answer."""
        message = f"The server behind this one failed: {fault}. Try again."
        return ServiceError(ErrorKind.UPSTREAM, message, "upstream_error")

    # Health.

    @property
    def _hung_s(self) -> float:
        """Of nothing from an upstream whose health is not answered either."""
        return min(HUNG_S, self.settings.silence_s) if self.settings.trusted else self.settings.silence_s

    def start(self) -> None:
        """Ask for the health of those that are not asked yet."""
        self._watches = watches = {} if self._watches is None else self._watches
        for one in self.upstreams:
            if one not in watches:
                watches[one] = asyncio.create_task(self._watch(one))

    def leave(self) -> None:
        """The list no longer has the model: what is in progress or waits goes on, and then its connections end."""
        self._is_leaving = True

    @property
    def has_left(self) -> bool:
        return self._is_leaving and not self._watches

    async def close(self) -> None:
        tasks = list((self._watches or {}).values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self.upstreams:
            one.close()

    def keep(self, keep_alive_s: float) -> None:
        """How long a model that is started on demand stays after a request; others are always there."""

    async def wait_probed(self) -> None:
        """Each upstream has been asked once."""
        while not all(one.has_been_asked for one in self.upstreams):
            await asyncio.sleep(0.01)

    def _is_needed(self, upstream: Upstream) -> bool:
        is_listed = upstream in self.upstreams and not self._is_leaving
        return is_listed or upstream.num_active > 0 or bool(self._waiting)

    async def _watch(self, upstream: Upstream) -> None:
        try:
            while self._is_needed(upstream):
                begun_s = self._loop.time()
                why_out = await self._probe(upstream)
                if why_out is None and not upstream.is_healthy and self.settings.trusted:
                    await self._read_size(upstream)
                upstream.note_probe(why_out, self._loop.time())
                upstream.close_idle(self._loop.time(), self._hung_s)
                upstream.note_room()
                self._grant()
                await asyncio.sleep(max(0.0, begun_s + PROBE_EVERY_S - self._loop.time()))
        finally:
            upstream.close()
            if self._watches is not None:
                self._watches.pop(upstream, None)

    async def _probe(self, upstream: Upstream) -> str | None:
        """Why it is not well; None: it is."""
        path = self.settings.health
        try:
            await upstream.connection(num_more=1)  # within its own limit
            async with asyncio.timeout(PROBE_S):
                head, _ = await self.ask(upstream, path, PROBE_BYTES)
        except TimeoutError:
            return f"GET {path} was not answered within {PROBE_S:g} s"
        except UpstreamFault as fault:
            return str(fault)
        except Exception:  # a bug of ours must not end the watch
            logger.exception("the upstream %s cannot be probed", upstream.url)
            return "it cannot be probed"
        if head.status == 404:
            return f'GET {path} has the status 404: name its health check, such as health = "/health"'
        return None if head.status == 200 else f"GET {path} has the status {head.status}"

    async def _read_size(self, upstream: Upstream) -> None:
        """A server of our own gets what it runs at once, and as much again, which takes the places that come free."""
        try:
            async with asyncio.timeout(PROBE_S):
                head, body = await self.ask(upstream, "/v1/loads", PROBE_BYTES)
            if head.status == 200:
                (load,) = msgspec.json.decode(body)["loads"]
                upstream.most_requests = 2 * int(load["max_running_requests"]) or math.inf
        except Exception as error:  # whatever it says, and bugs of ours, must not end the watch
            logger.info("the upstream %s does not report its capacity: %r", upstream.shown, error)

    def addressed(self, outgoing: Outgoing, upstream: Upstream) -> Outgoing:
        path = upstream.address.prefix.encode() + outgoing.path
        return outgoing._replace(path=path, fields=(*self._fields, *outgoing.fields))

    async def ask(
        self, upstream: Upstream, path: str, most_bytes: int, json: bytes | None = None, fields: Fields = ()
    ) -> tuple[AnswerHead, bytes]:
        """The whole answer to a GET, or to a POST of JSON. Raises UpstreamFault."""
        connection = await upstream.connection(num_more=1)
        fields = (*JSON, *fields) if json else fields
        outgoing = Outgoing(b"GET" if json is None else b"POST", path.encode(), fields, json or b"")
        answer = WholeAnswer(most_bytes)
        exchange = connection.http.send(self.addressed(outgoing, upstream), answer)
        try:
            return await answer.done
        finally:
            exchange.cancel()

    # Slots.

    def take_slot(self, prompt: LeadingBlocks, priority: int, tenant: str) -> Slot:
        """A slot that is granted when there is room; refused while no upstream takes requests."""
        slot = Slot(self, prompt, priority, tenant, self._loop.create_future())
        self._waiting.append(slot)
        self._retries = min(MAX_RETRIES, self._retries + RETRY_SHARE)
        self._grant()
        return slot

    def release(self, slot: Slot) -> None:
        if slot in self._waiting:
            self._waiting.remove(slot)
        if slot.upstream is not None:
            self._exit(slot)
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            now_s = self._loop.time()
            if not any(one.is_in(now_s) for one in self.upstreams):
                if not all(one.has_been_asked for one in self.upstreams):  # they come with a new list: soon
                    return
                waiting, self._waiting = self._waiting, []
                for slot in waiting:
                    if not slot.granted.done():
                        slot.granted.set_exception(self._nobody())
                        slot.granted.exception()
                return
            upstream, left = None, self._waiting
            while upstream is None:
                slot = max(left, key=lambda one: (one.priority, -self._num_active.get(one.tenant, 0)))
                upstream = self._choose(slot, now_s)
                if upstream is None:  # its version has no room: another's turn
                    full = slot.failed, self.version_of(slot.tenant, now_s, slot.failed)
                    left = [one for one in left if (one.failed, self.version_of(one.tenant, now_s, one.failed)) != full]
                    if not left:
                        return
            self._waiting.remove(slot)
            if not slot.granted.cancelled():
                self._enter(slot, upstream)
                slot.granted.set_result(upstream)

    def _enter(self, slot: Slot, upstream: Upstream) -> None:
        slot.upstream = upstream
        slot.num_waiting_tokens = upstream.num_new_tokens(slot.prompt)
        slot.num_known = upstream.num_known(slot.prompt)
        upstream.num_waiting_tokens += slot.num_waiting_tokens
        upstream.learn(slot.prompt)
        upstream.num_active += 1
        upstream.num_requests += 1
        self._num_active[slot.tenant] = self._num_active.get(slot.tenant, 0) + 1

    def _exit(self, slot: Slot) -> None:
        slot.note_begun()
        upstream, slot.upstream = slot.upstream, None
        assert upstream is not None
        upstream.num_active -= 1
        upstream.note_room()
        self._num_active[slot.tenant] -= 1
        if not self._num_active[slot.tenant]:
            del self._num_active[slot.tenant]

    def version_of(self, tenant: str, now_s: float, without: Upstream | None = None) -> str | None:
        """That answers the tenant's requests now."""
        weights = self._version_weights
        if len(weights) == 1:
            return next(iter(weights))
        up = {one.settings.version for one in self.upstreams if one.takes_requests(now_s) and one is not without}

        def score(version: str | None) -> float:
            digest = sha256(f"{tenant}\0{version}".encode()).digest()
            return -weights[version] / math.log((int.from_bytes(digest[:8], "big") + 1) / (2**64 + 1))

        return max(up, key=score, default=None)

    def _choose(self, slot: Slot, now_s: float) -> Upstream | None:
        """Where the request's first token comes soonest, in the first region that has room; None: none has."""
        others = [one for one in self.upstreams if one is not slot.failed and one.takes_requests(now_s)]
        if not others and slot.failed is not None:  # there is none left but the one that has failed it
            slot.failed = None
            return self._choose(slot, now_s)
        version = self.version_of(slot.tenant, now_s, slot.failed)
        others = [one for one in others if one.settings.version == version]
        rested = [one for one in others if now_s >= one.rests_until_s] or others
        most = self.settings.max_requests
        free = [one for one in rested if one.num_active < min(most, one.most_requests, one.most_streams)]
        if len(free) <= 1:
            return free[0] if free else None
        region = min((one.settings.region for one in free), key=self._regions.index)
        near = [one for one in free if one.settings.region == region]
        return min(near, key=self._cost_of(slot, near, now_s))

    def _cost_of(
        self, slot: Slot, free: Sequence[Upstream], now_s: float
    ) -> Callable[[Upstream], tuple[bool, float, float]]:
        num_all = 1 + sum(one.num_active for one in free)
        all_weights = sum(one.weight(now_s) for one in free)

        def cost_of(one: Upstream) -> tuple[bool, float, float]:
            weight = one.weight(now_s)
            is_beyond = one.num_active + 1 > math.ceil(LOAD_BOUND * num_all * weight / all_weights)
            num_active_tokens = ACTIVE_TOKENS * (one.num_active + 1)
            num_tokens = one.num_new_tokens(slot.prompt) + one.num_waiting_tokens + num_active_tokens
            return is_beyond, num_tokens / weight, one.num_requests / weight

        return cost_of

    def move(self, slot: Slot, takes_same: bool, is_refused: bool = False) -> bool:
        """Let a request that has not been answered wait for another upstream, before what has come since.

        Args:
            takes_same: where there is no other, the same one: its connection was lost, or it refused a stream.
            is_refused: within the budget.

        Returns: False: there is none, or no budget.
        """
        failed, now_s = slot.upstream, self._loop.time()
        assert failed is not None
        if is_refused and self._retries < 1:
            return False
        if not any(one.takes_requests(now_s) and (takes_same or one is not failed) for one in self.upstreams):
            return False
        self._retries -= is_refused
        self.num_retries += 1
        self._exit(slot)
        failed.forget(slot.prompt.hashes[slot.num_known :])
        slot.failed, slot.granted = failed, self._loop.create_future()
        self._waiting.insert(0, slot)
        self._grant()
        return True

    def note_outcome(self, upstream: Upstream, is_good: bool) -> None:
        """How an upstream has answered a request."""
        now_s = self._loop.time()
        num_out = sum(not one.is_in(now_s) for one in self.upstreams)
        may_eject = upstream.is_in(now_s) and 2 * (num_out + 1) <= len(self.upstreams)
        upstream.note_outcome(is_good, now_s, may_eject)

    def note_not_open(self, upstream: Upstream, why: str) -> None:
        """An upstream takes no requests now: it is out until its health is told, if that is asked for."""
        if upstream in (self._watches or ()):
            upstream.note_not_open(why)

    def note_overload(self, upstream: Upstream, error: ServiceError) -> None:
        """An upstream has refused a request, for now."""
        if error.code in NOT_OPEN:
            self.note_not_open(upstream, error.message)
        elif error.code != "deadline_unattainable":  # the request's own
            upstream.rests_until_s = self._loop.time() + (error.retry_after_s or 0.0)

    def _nobody(self) -> ServiceError:
        names = "; ".join(f"{one.url}: {one.why_out or 'it is ejected'}" for one in self.upstreams)
        if (now_s := self._loop.time()) >= self._told_s + TELL_EVERY_S:
            self._told_s = now_s
            logger.warning("no upstream of %s is available: %s", self.settings.name, names)
        message = f"No server is available for this model. Try again in {PROBE_EVERY_S:g} s."
        return ServiceError(ErrorKind.UNAVAILABLE, message, "no_upstream", retry_after_s=PROBE_EVERY_S)


def access_to(model: ModelSettings) -> Access:
    """By the files as they are now. Raises StartupError: one cannot be used."""
    key = model.api_key()
    fields = () if key is None else ((b"authorization", b"Bearer " + key.encode()),)
    if not model.has_tls:
        return Access(fields)
    try:
        context = ssl.create_default_context(cafile=model.tls_ca)
        if model.tls_cert is not None:
            context.load_cert_chain(model.tls_cert, model.tls_key, no_password)
    except (OSError, ValueError) as error:
        cause = f"the TLS files of the model {model.name} cannot be used: {getattr(error, 'strerror', None) or error}"
        raise StartupError(cause, "check tls_ca, tls_cert and tls_key") from error
    context.set_alpn_protocols([one.decode() for one in PROTOCOLS[model.protocol]])
    return Access(fields, context)
