"""Tensor parallelism: one model on several devices of this machine, a process for each."""
