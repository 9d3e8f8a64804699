"""The config tree: its types, how it is read, and which values it may have; every mistake at once."""
