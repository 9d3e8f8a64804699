"""Policy of a worker group, pure Python: requests, block pool, scheduler, the engine and its loop."""
