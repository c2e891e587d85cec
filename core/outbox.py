"""What the sequences have to tell the loop, gathered until the next delivery. Thread: engine."""

from core.sequence import Sequence
from core.types import EngineMark, EngineStats, StepDelivery, TokenChunk, TokenLogprobs


class Outbox:
    """News for the loop, until the next delivery."""

    def __init__(self) -> None:
        self._told: EngineStats | None = None
        self._request_ids: list[str] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self.chunks: list[TokenChunk] = []
        self.marks: list[EngineMark] = []

    def add_tokens(self, sequences: list[Sequence], token_ids: list[int]) -> None:
        """One token of each, without logprobs."""
        self._request_ids += [sequence.request_id for sequence in sequences]
        self._indexes += [sequence.index for sequence in sequences]
        self._token_ids += token_ids

    def add_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if logprobs is None:
            self.add_tokens([sequence], [token_id])
        else:
            self.chunks.append(
                TokenChunk(
                    request_id=sequence.request_id, index=sequence.index, token_ids=(token_id,), logprobs=(logprobs,)
                )
            )

    def add_prompt_logprobs(self, sequence: Sequence, logprobs: list[TokenLogprobs]) -> None:
        """The next of its request's prompt."""
        self.chunks.append(
            TokenChunk(request_id=sequence.request_id, index=sequence.index, prompt_logprobs=tuple(logprobs))
        )

    def has_news(self, stats: EngineStats) -> bool:
        """Whether anything is to be told that no step is needed for: an end, or a change of what the stats count."""
        return bool(self.chunks) or stats != self._told

    def take(self, stats: EngineStats) -> StepDelivery:
        self._told = stats
        delivery = StepDelivery(self._request_ids, self._indexes, self._token_ids, self.chunks, stats, self.marks)
        self._request_ids, self._indexes, self._token_ids, self.chunks, self.marks = [], [], [], [], []
        return delivery
