"""Faults of network, server, disk and processes in one run, and what became of the run."""
