"""Which group a request goes to: pure functions of an exact prefix index and live load."""
