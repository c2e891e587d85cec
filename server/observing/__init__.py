"""Observability of requests: stage clocks, metrics, logs, SLOs and traces. Thread: loop."""
