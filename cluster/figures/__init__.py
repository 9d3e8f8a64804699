"""What planning, simulation, benchmarks and autoscaling share: the cost of a step, request traces,
percentiles, and the machine that figures are of."""
