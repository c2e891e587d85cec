"""Beam searches of a scheduler: forks the sequences of each, ends them, and tells the answers. Thread: engine.

core/beams.py decides which beams go on. All beams of a request compute a step, come back, and are chosen among; where
some of them must wait, all do.
"""

from collections.abc import Callable, Iterable

from msgspec import structs

from core.beams import BeamSearch
from core.plan import RunnerLimits
from core.sequence import Sequence, SequenceGroup, SequenceState
from core.sequence_states import SequenceStates
from core.types import BANNED, FinishReason, Request, SamplingParams


class Searches:
    """
    Args:
        max_length: of a lone sequence.
        stop_ids_of: of a request's sampling.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        states: SequenceStates,
        max_length: int,
        stop_ids_of: Callable[[SamplingParams], tuple[int, ...]],
    ) -> None:
        self._limits, self._states, self._max_length, self._stop_ids_of = limits, states, max_length, stop_ids_of
        self.groups: dict[str, SequenceGroup] = {}  # by request; some may have ended

    def max_length_of(self, request: Request) -> int:
        """At which a lone request's sequences end: its beams must all fit, beside the blocks of their prompt."""
        if request.beams is None:
            return self._max_length
        size = self._limits.block_size
        num_shared = len(request.prompt_ids) // size
        num_each = (self._limits.num_blocks - num_shared) // request.num_sequences
        num_each = min(num_each, self._states.most_own_blocks(request.num_sequences))
        return min(self._max_length, (num_shared + num_each) * size)

    def search_of(self, request: Request) -> BeamSearch:
        sampling, max_tokens = request.sampling, self.max_length_of(request) - len(request.prompt_ids)
        assert request.beams is not None, "it asks for them"
        return BeamSearch(
            request.beams,
            stop_ids=set(self._stop_ids_of(sampling)),
            forbidden={token_id for token_id, bias in sampling.logit_bias if bias == BANNED},
            min_tokens=sampling.min_tokens,
            max_tokens=min(sampling.max_tokens, max_tokens),
            num_shown=sampling.num_logprobs or 0,
        )

    def begin(self, group: SequenceGroup) -> None:
        request, sampling = group.request, group.request.sampling
        group.search = self.search_of(request)
        num_top = max(group.search.num_top, group.search.num_shown)
        for sequence in group.sequences:
            sequence.search = group.search
            sequence.sampling = structs.replace(sampling, temperature=0.0, min_tokens=0, num_logprobs=num_top)
        self.groups[request.request_id] = group

    def gather(self) -> list[Sequence]:
        """Where some beams of a request wait, let the others wait with them. Returns those preempted for that."""
        preempted: list[Sequence] = []
        for request_id, group in list(self.groups.items()):
            if request_id not in self._states.groups:
                del self.groups[request_id]
                continue
            members = [sequence for sequence in group.sequences if sequence.index not in group.unforked]
            are_apart = {sequence.state for sequence in members} == {SequenceState.RUNNING, SequenceState.WAITING}
            if are_apart and not any(sequence.num_in_flight for sequence in members):
                preempted += [s for s in members if s.state is SequenceState.RUNNING]
                self._states.gather(group)
        return preempted

    def advance(self, sequences: Iterable[Sequence]) -> None:
        """After a step of these."""
        for request_id in {sequence.request_id for sequence in sequences if sequence.search is not None}:
            if request_id in self._states.groups:
                self._advance(self._states.groups[request_id])

    def _advance(self, group: SequenceGroup) -> None:
        """Once all beams of a request have come back: let the chosen continuations go on, each in a sequence.

        Beams that have waited together share the prompt again once their leader has it.
        """
        search, states, leader = group.search, self._states, group.leader
        assert search is not None, "it has beams"
        assert leader is not None, "a request has a sequence"
        if group.unforked and search.has_begun and leader.num_computed_tokens >= leader.num_prompt_tokens:
            states.fork_siblings(group)
        if not search.is_ready:
            return
        parents = [group.sequences[index] for index in search.beams]
        steps = search.advance()
        if not steps:
            self._end(group)
            return
        group.unforked = {}
        beams: list[Sequence] = []
        going_on = [parents[parent] for parent, _ in steps]
        spare = [sequence for sequence in group.sequences if sequence not in going_on]
        for parent in going_on:
            beam = parent
            if beam in beams:  # one child stays in its parent's sequence
                beam = spare.pop()
                states.branch(parent, beam)
            beams.append(beam)
        for beam, (_, token_id) in zip(beams, steps, strict=True):
            beam.token_ids.append(token_id)
        search.beams = [beam.index for beam in beams]

    def _end(self, group: SequenceGroup) -> None:
        """Tell the answers of a search, and end its sequences."""
        search, sampling = group.search, group.request.sampling
        assert search is not None, "it has beams"
        group.unforked = {}
        for sequence, answer in zip(group.sequences, search.answers, strict=True):
            sequence.num_computed_tokens = 0  # what it has computed are another's tokens
            sequence.token_ids[sequence.num_prompt_tokens :] = [one.token_id for one in answer.logprobs]
            stop = answer.logprobs[-1] if answer.reason is FinishReason.STOP else None
            shown = answer.logprobs if stop is None else answer.logprobs[:-1]
            has_logprobs = sampling.num_logprobs is not None
            if shown:
                self._states.outbox.add_notable(sequence, shown, has_logprobs)
            self._states.finish(sequence, answer.reason, stop_logprobs=stop if has_logprobs else None)
