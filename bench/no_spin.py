"""Idle compute threads sleep instead of spinning, as the server has it: imported before torch, which reads it once."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")
