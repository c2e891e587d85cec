"""The loop that the benches in simulated time run on, for the tests of the server."""

from bench.virtual_loop import Deadlock, VirtualTimeLoop

__all__ = ["Deadlock", "VirtualTimeLoop"]
