"""What a group and its clients say to each other: requests in, tokens, block events and leases out."""
