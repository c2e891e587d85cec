"""What operators are told, under /admin. JSON of our own: no other server's tools read it. Thread: loop."""

import msgspec

from core.types import EngineSnapshot, EngineStats
from server.wire import sse

CACHE_CLEARED = sse.json_line({"status": "cleared"})


def engine_reply(snapshot: EngineSnapshot, stats: EngineStats) -> bytes:
    """The engine as it is, field by field as in core/types.py, and what it has counted since its start."""
    return msgspec.json.encode(msgspec.structs.asdict(snapshot) | {"counters": stats}) + b"\n"


def drain_reply(grace_s: float, num_in_progress: int) -> bytes:
    return sse.json_line({"status": "draining", "grace_s": grace_s, "num_in_progress": num_in_progress})
