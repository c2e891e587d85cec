"""One request on its way through the app. Thread: loop."""

from collections.abc import Callable
from dataclasses import dataclass

from server.gate.identity import Caller
from server.gate.quota import Ticket
from server.observing.accounting import Account
from server.observing.timing import Stage, answer_headers
from server.wire.messages import Headers
from server.wire.stream import JSON_TYPE, HttpStream


@dataclass(slots=True, kw_only=True)
class Exchange(Account):
    """A request, what is known of it so far, and its answer.

    Args:
        clock: monotonic, in seconds.
        argument: what the route's pattern left open, decoded.
    """

    stream: HttpStream
    clock: Callable[[], float]
    ticket: Ticket | None = None
    argument: str = ""

    @property
    def known_caller(self) -> Caller:
        """For handlers of routes that ask for a right."""
        assert self.caller is not None, "whoever comes to such a route has been identified"
        return self.caller

    @property
    def known_ticket(self) -> Ticket:
        """For handlers of routes that are counted."""
        assert self.ticket is not None, "whoever comes to such a route has been let in"
        return self.ticket

    def send(self, body: bytes, status: int = 200, headers: Headers = (), media_type: bytes = JSON_TYPE) -> None:
        """Answer with a document that no generation is told in."""
        self.timings.enter(Stage.LAST_FLUSH, self.clock())
        self.stream.send_document(status, body, (*answer_headers(self.timings), *headers), media_type)
        self.stream.call_once_written(self.timings.finish)
