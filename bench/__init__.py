"""Measurements of the server and its parts, each a command (`python -m bench.NAME`), and their results."""

import gpu  # noqa: F401  # it sets what torch reads of the environment once: a bench computes as a server does
