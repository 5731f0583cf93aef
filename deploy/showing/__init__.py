"""What `penstock up` shows of a run: the live screen, the log files, the ending."""
