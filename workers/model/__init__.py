"""The decoder: what a checkpoint says, what a rank holds of it, how a step runs."""
