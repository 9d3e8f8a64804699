"""A cluster that runs: where it is, what was deployed on it, and what Serve and its groups say."""
