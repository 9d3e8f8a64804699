"""Tests on a real local Ray cluster, through HTTP."""
