"""Where clients come in: sockets, who may come, and who they really are. Thread: loop."""
