"""How many groups a pool should have: a pure decision from what the groups report."""
