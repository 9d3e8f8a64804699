"""Checkpoints whose linear weights are stored in few bits: what their files hold, and how it is read."""
