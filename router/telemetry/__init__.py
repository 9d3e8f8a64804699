"""What a router counts, and the one page of it for all replicas."""
