"""One tensor-parallel engine group: engine, runtime, model, kernels. Knows nothing of routers or HTTP."""
