"""What the HTTP API accepts and refuses: bodies, fields, keys, errors."""
