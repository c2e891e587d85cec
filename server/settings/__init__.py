"""What the operator can set: a table for each purpose. server/config.py puts them together."""
