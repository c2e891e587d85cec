"""Who may ask, how much, when, and what may be said. Thread: loop."""
