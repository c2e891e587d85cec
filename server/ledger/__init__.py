"""The durable record of what requests used. Threads: loop, and the ledger's own."""
