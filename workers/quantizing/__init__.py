"""A model's weights in few bits, written ahead of time, and what that costs in quality."""
