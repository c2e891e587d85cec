"""Our DATA framer with h2's client as the peer: what it receives is what was sent, and the windows agree."""

from tests.server.http2_pair import STEP_NAMES, Pair, take_step

_INITIAL_WINDOWS = (0, 1, 1_000, 65_535, 100_000)
_FRAME_SIZES = (16_384, 20_000, 2**24 - 1)
_TABLE_SIZES = (0, 100, 4_096, 2**32 - 1)
_CHOICES = {"initial window": _INITIAL_WINDOWS, "frame size": _FRAME_SIZES, "table size": _TABLE_SIZES}
_LIMITS = (1, 20_000, 2**30)
_MAX_STEPS = 64


def check(data: bytes) -> None:
    """The first byte chooses the limit of a write; each step is a byte of what, one of whom, and two of how much."""
    pair = Pair()
    limit_bytes = _LIMITS[data[0] % len(_LIMITS)] if data else _LIMITS[0]
    for start in range(1, min(len(data), 4 * _MAX_STEPS), 4):
        what, whom, high, low = data[start : start + 4].ljust(4, b"\0")
        name = STEP_NAMES[what % len(STEP_NAMES)]
        amount = (high << 8 | low) or 1
        if name in _CHOICES:
            first = _CHOICES[name][whom % len(_CHOICES[name])]
        else:
            first = amount if name == "window" else whom % 8
        take_step(pair, name, first, amount)
        pair.exchange(limit_bytes)
        pair.check()
    pair.finish()
