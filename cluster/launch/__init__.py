"""A Ray cluster on this machine, started and stopped to the last process, with its HAProxy."""
