"""One model on several devices of this machine: a process for each, which compute every step together."""
