"""Files and batches of requests that nobody waits for."""
