"""The event-loop side: sockets, HTTP, wire formats, the life of a request. It never sees torch."""

__version__ = "0.1.0"
