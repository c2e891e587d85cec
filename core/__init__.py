"""The logic that decides: Python without I/O. It imports neither server nor gpu; time and randomness are arguments."""
