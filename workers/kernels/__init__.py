"""Paged attention and friends, each beside its torch reference."""
