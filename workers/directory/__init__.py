"""Which groups exist and what every process counts: kept by one named actor, off the request path."""
