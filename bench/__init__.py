"""Measurements: each against a peer or a limit in the same run. Results are committed under bench/results/."""
