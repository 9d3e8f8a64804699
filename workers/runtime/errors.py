"""What can be wrong with a group's config once machine and checkpoint are known."""

from __future__ import annotations


class RankConfigError(ValueError):
    """A config value that machine or checkpoint cannot meet. The message names field, value and limit."""


class PoolTooSmall(RankConfigError):
    """The pool cannot hold one request of the longest allowed context. The message says what would do."""
