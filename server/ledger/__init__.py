"""What requests used, kept durably. Threads: loop, and the ledger's own."""
