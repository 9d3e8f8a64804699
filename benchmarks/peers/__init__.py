"""Other engines as subjects of the benchmark, each in an environment and a process of its own."""
