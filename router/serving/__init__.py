"""A request from its checked form to the last byte of its answer."""
