"""Measurements of the server and its parts; docs/ and the Makefile name the commands."""
