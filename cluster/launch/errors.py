"""What starting a cluster or an application can end in."""

from __future__ import annotations


class LaunchError(RuntimeError):
    """The cluster or the application did not come up; the message says what to change."""


class NotReadyInTime(LaunchError):
    """It may come up yet, or wait for room that there is not."""


class TakenAway(LaunchError):
    """It was there, and is no more: another command has ended it, or the cluster has crashed."""
