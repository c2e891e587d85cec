"""Comparing servers: mixed loads against a small server, how peers are found, the tables, and the GGUF file."""
