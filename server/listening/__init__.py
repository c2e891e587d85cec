"""Listening sockets, the clients that may connect, and the proxies that speak for others. Thread: loop."""
