"""Upstreams: the HTTP client towards them, their health, and which of them takes a request."""
