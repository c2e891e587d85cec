"""Bytes to requests and back: HTTP/1.1 and HTTP/2, their connections and streams. Thread: loop."""
