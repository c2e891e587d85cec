"""What is measured and told of requests: clocks, metrics, logs, traces. Thread: loop."""
