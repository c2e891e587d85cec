"""Inputs that nobody thought of, for whatever reads a peer's bytes.

One module for each target: `check` takes any bytes, and raises if the code under test breaks what the module promises.
`python -m fuzz` lets libFuzzer (atheris) look for such bytes; corpus/ holds what reached new code, tests/test_fuzz.py
tries it all again.
"""
