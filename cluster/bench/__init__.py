"""Measuring: this machine and engine (programs of their own, with torch), and running servers (HTTP only)."""
