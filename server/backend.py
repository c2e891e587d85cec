"""Whom a generation asks for tokens: the engine in this process, or upstreams (server/relay.py). Types only.

Both read a body (`PromptSource`), and take what comes of it (`TokenSource`) for a sink that they call (DeltaSink). The
gate's work, the ledger, deadlines and timing are the generation's, and the same for both.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from core.thoughts import ThoughtFollower
from core.types import Cost, Demand, FinishReason
from server.api.fields import GenerationCall
from server.api.models import ServedModel
from server.api.replies import ReplyContext, Surface
from server.engine_client import DeltaSink, LoopWork, SequenceProgress
from server.gate.admission import Admission
from server.gate.identity import Caller
from server.gate.tenants import Tenant
from server.gate.text_rules import Matcher
from server.observing.timing import StageMarks

CountTokens = Callable[[Surface, bytes], list[tuple[int, ...]]]  # a body's prompts as ids; raises ServiceError


class Handle(Protocol):
    """A submitted request: see RequestHandle."""

    sink: DeltaSink
    cost: Cost

    @property
    def request(self) -> Demand: ...

    @property
    def sequences(self) -> Sequence[SequenceProgress]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_thought_tokens(self) -> int: ...

    def cancel(self, reason: FinishReason) -> None: ...

    def finish(self, reason: FinishReason, now_s: float) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Prompts(Protocol):
    """A body that has been read: see Prepared."""

    @property
    def call(self) -> GenerationCall: ...

    @property
    def prompts(self) -> Sequence[Sequence[int]]: ...

    @property
    def table(self) -> Any: ...

    @property
    def continues_text(self) -> bool: ...

    @property
    def tells_tokens(self) -> bool:
        """The first token is known when it comes, not only with the whole answer."""


class PromptSource(Protocol):
    """Reads bodies: see PromptReader."""

    @property
    def cards(self) -> tuple[ServedModel, ...]: ...

    def prepare(self, surface: Surface, body: bytes, tenant: Tenant, marks: StageMarks) -> Prompts: ...

    def requests_of(self, prepared: Any, request_id: str, arrived_s: float, caller: Caller) -> Sequence[Demand]: ...

    def follow_thought(self, call: GenerationCall) -> ThoughtFollower | None: ...

    def reply_context(self, prepared: Any, request_id: str) -> ReplyContext: ...

    def surface_of(self, surface: Surface) -> Surface:
        """What writes the answer."""


class TokenSource(Protocol):
    """Takes requests: see EngineClient."""

    @property
    def work(self) -> LoopWork: ...

    def submit(
        self,
        request: Any,
        sink: DeltaSink,
        table: Any,
        continues_text: bool,
        first_choice: int = 0,
        forbidden: Sequence[Matcher] = (),
        follow: Callable[[], ThoughtFollower | None] = lambda: None,
    ) -> Handle: ...


class Backend(NamedTuple):
    """Who answers for a model.

    Args:
        admission: of its requests.
    """

    reader: PromptSource
    engine: TokenSource
    admission: Admission
