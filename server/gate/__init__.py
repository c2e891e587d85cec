"""Admission control: who is calling, how much each may use, when, and with which text. Thread: loop."""
