"""Requests on their way to groups and tokens on their way back, over sockets."""
