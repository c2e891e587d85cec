"""Measurements of the server and its parts, each a command (`python -m bench.NAME`), and their results."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # read by torch once: idle compute threads sleep, as the server has it

import gpu  # noqa: F401  # sets what libraries read of the environment, before a bench imports torch
