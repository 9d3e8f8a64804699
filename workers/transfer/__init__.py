"""KV blocks from the pool of one group into that of another: what fits, who reads what, and how."""
