"""Which streams of an HTTP/2 connection get rid of what they have to send, and since when one has not. Thread: loop."""

from collections import OrderedDict
from collections.abc import Callable, Sequence


class Http2Progress:
    """The streams that the peer's windows, or other streams, held back.

    Args:
        stall_s: how long a stream may take to get rid of enough_bytes.
        num_unsent, num_partly_sent: bytes of a stream.

    Attributes:
        since: streams -> since when they have to get rid of what is enough, oldest first, and num_partly_sent then.
    """

    def __init__(
        self,
        stall_s: float,
        enough_bytes: float,
        num_unsent: Callable[[int], int],
        num_partly_sent: Callable[[int], int],
    ) -> None:
        self._stall_s = stall_s
        self._enough_bytes = enough_bytes
        self._num_unsent = num_unsent
        self._num_partly_sent = num_partly_sent
        self.since: OrderedDict[int, tuple[float, int]] = OrderedDict()

    @property
    def first_due(self) -> tuple[float, int]:
        """When a stream has stalled, and which. There is one."""
        stream_id, (since, _) = next(iter(self.since.items()))
        return since + self._stall_s, stream_id

    def watch(self, sent: Sequence[int], held: Sequence[int], now: float) -> None:
        """Some streams have sent what they could, and others nothing."""
        for stream_id in sent:
            if not self._num_unsent(stream_id):
                self.since.pop(stream_id, None)
                continue
            num_sent = self._num_partly_sent(stream_id)
            _, num_before = self.since.setdefault(stream_id, (now, num_sent))
            if num_sent - num_before >= self._enough_bytes:
                self.since[stream_id] = (now, num_sent)
                self.since.move_to_end(stream_id)
        for stream_id in held:
            self.since.setdefault(stream_id, (now, self._num_partly_sent(stream_id)))

    def forget(self, stream_id: int) -> None:
        self.since.pop(stream_id, None)

    def let_stand(self, pause_s: float) -> None:
        """The transport took nothing for so long: that is on no stream's account."""
        self.since = OrderedDict((key, (since + pause_s, num)) for key, (since, num) in self.since.items())
