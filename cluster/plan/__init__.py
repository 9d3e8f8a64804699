"""What fits on a machine and how fast it is: memory, limits, the cost of a step, proposals of deployments."""
