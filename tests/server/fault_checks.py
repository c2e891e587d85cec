"""What must hold after a life of a simulated server: each request has one end, and all who count tokens agree."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from core.detokenizer import Detokenizer
from core.plan import SequenceStart
from core.sequence import sequence_seed
from core.simulation import continuation
from core.types import Request, Submit, Usage
from server.gate.quota import PeriodPool
from server.ledger.store import LedgerRow, RowState
from tests.server.drawn_calls import CACHED_DISCOUNT, TENANTS
from tests.server.inline_ledger import rows
from tests.server.recording_peers import Call
from tests.server.simulated_server import EOS_ID, TOKENIZER, SimulatedServer


@dataclass(slots=True)
class Tally:
    """What has happened in some histories, so that a test can tell that they were eventful."""

    num_requests: int = 0  # for completions
    num_asked: int = 0  # of all kinds
    num_steps: int = 0
    num_preemptions: int = 0
    num_restored_blocks: int = 0  # from host memory
    events: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.num_requests += other.num_requests
        self.num_asked += other.num_asked
        self.num_steps += other.num_steps
        self.num_preemptions += other.num_preemptions
        self.num_restored_blocks += other.num_restored_blocks
        self.events += other.events
        self.statuses += other.statuses


class LifeChecks:
    """Of one server, when all is quiet, and of all that were asked of it.

    Args:
        written_before: what the ledger had when it started.
    """

    def __init__(
        self, server: SimulatedServer, calls: list[Call], written_before: dict[str, LedgerRow], tally: Tally
    ) -> None:
        self._server = server
        self._calls = calls
        self._written_before = written_before
        self._tally = tally

    def check_calls(self) -> None:
        tokens = self._delivered_tokens()
        requests = {m.request.request_id: m.request for m in self._server.posted if isinstance(m, Submit)}
        for request in requests.values():
            self._check_tokens(request, tokens)
        for call in self._calls:
            answer = call.answer
            if call.is_slow and not call.has_left and (answer is None or not answer.is_complete):
                self._tally.events["stalled"] += 1
            if answer is None:
                assert call.has_left or call.is_slow or self._server.is_broken, f"no answer to {call}"
                continue
            self._tally.statuses[answer.status] += 1
            call.check_one_end(self._server.is_broken)
            if call.is_whole and answer.status == 200 and call.path == "/v1/completions":
                request = requests[answer.headers["x-request-id"]]
                self._check_text(call, request, tokens)

    def _delivered_tokens(self) -> dict[tuple[str, int], list[int]]:
        found: dict[tuple[str, int], list[int]] = {}
        for delivery in self._server.delivered:
            for place in zip(delivery.request_ids, delivery.indexes, delivery.token_ids, strict=True):
                found.setdefault(place[:2], []).append(place[2])
        return found

    def _check_tokens(self, request: Request, tokens: dict[tuple[str, int], list[int]]) -> None:
        """Whatever became of it: its tokens are those that it would have drawn alone."""
        sampling = request.sampling
        assert sampling.seed is not None
        for index in range(request.num_sequences):
            drawn = tokens.get((request.request_id, index), [])
            if drawn:
                start = SequenceStart(
                    slot=0,
                    token_ids=request.prompt_ids,
                    num_prompt_tokens=len(request.prompt_ids),
                    sampling=sampling,
                    seed=sequence_seed(sampling.seed, index),
                    stop_ids=() if sampling.ignore_eos else (EOS_ID,),
                )
                alone = continuation(start, self._server.limits)[: len(drawn)]
                assert drawn == alone, f"{drawn} instead of {alone} of sequence {index} of {request}"

    def _check_text(self, call: Call, request: Request, tokens: dict[tuple[str, int], list[int]]) -> None:
        """The client has read what was drawn, up to its stop string."""
        assert call.answer is not None
        num_kept = 0
        for index in range(request.num_sequences):
            detokenizer = Detokenizer(TOKENIZER.table, request.sampling.stop, continues_text=True)
            ids = tokens.get((request.request_id, index), [])
            text = "".join(map(detokenizer.push_token, ids)) + detokenizer.finish()
            assert call.answer.text(index) == text
            num_kept += detokenizer.num_tokens_kept
            reason = call.answer.finish_reason(index)
            assert reason in ("stop", "length")
            if reason == "stop" and not detokenizer.is_stopped:
                num_kept += 1  # an ending id has no text
        assert call.answer.usage["completion_tokens"] == num_kept
        assert call.answer.usage["prompt_tokens"] == len(request.prompt_ids)

    def check_counters(self) -> None:
        """Engine, metrics and quotas have counted the same tokens."""
        server = self._server
        usages = self.usages()
        metrics = server.metrics
        assert metrics.num_generation_tokens == sum(u.num_completion_tokens for u in usages.values())
        assert metrics.num_prompt_tokens == sum(u.num_prompt_tokens for u in usages.values())
        owners = {m.request.request_id: m.request.tenant for m in server.posted if isinstance(m, Submit)}
        now = server.gate.quotas._clock()
        for name in TENANTS:
            billed = [_cost(usage) for request_id, usage in usages.items() if owners[request_id] == name]
            account = server.gate.quotas._accounts.get((name, None))
            used = 0
            if account is not None:
                (pool,) = (pool for pool in account.tokens if isinstance(pool, PeriodPool))
                before = sum(row.counted_tokens for row in self._written_before.values() if row.tenant == name)
                used = pool.capacity - pool.available(now) - before
            assert used == sum(billed), f"the quota of {name} has counted {used}, its answers {sum(billed)}"

    def check_ledger(self, ledger: Path, usages: dict[str, Usage]) -> None:
        """Each request is written down once, as it was billed; who did not come to the engine, for nothing.

        Args:
            usages: of this life, as the server has told them before it ended.
        """
        found = written(ledger)
        assert found.items() >= self._written_before.items()
        assert found.keys() >= usages.keys()
        for request_id in found.keys() - self._written_before.keys():
            row, usage = found[request_id], usages.get(request_id, Usage(0, 0, 0))
            assert row.state is RowState.SETTLED
            counts = row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.counted_tokens
            billed = usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens, _cost(usage)
            assert counts == billed, f"{row} instead of {usage}"

    def usages(self) -> dict[str, Usage]:
        """What each request was billed, by its terminal chunk."""
        chunks = (chunk for delivery in self._server.delivered for chunk in delivery.chunks)
        return {chunk.request_id: chunk.usage for chunk in chunks if chunk.usage is not None}


def _cost(usage: Usage) -> int:
    return usage.num_prompt_tokens + usage.num_completion_tokens - usage.num_cached_tokens * CACHED_DISCOUNT // 100


def written(ledger: Path | None) -> dict[str, LedgerRow]:
    """What is written down of each request."""
    return {} if ledger is None or not ledger.exists() else {row.request_id: row for row in rows(ledger)}
