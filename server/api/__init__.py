"""Wire formats only: JSON to Request and back, one file per surface. No sockets, no engine."""
