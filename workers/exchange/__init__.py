"""How the ranks of a group read the KV blocks of other groups and lend their own."""
