"""Series of Ray and Ray Serve 2.60 that the pages show beside ours, with the labels that queries use.

They are there when Prometheus scrapes Ray's agents; those of GPUs when a machine has one.
"""

from __future__ import annotations

from typing import Final

NODE_CPU: Final = "ray_node_cpu_utilization"  # percent of the node
NODE_MEMORY: Final = "ray_node_mem_used"  # bytes
NODE_MEMORY_TOTAL: Final = "ray_node_mem_total"
GPU_USE: Final = "ray_node_gpus_utilization"  # percent
GPU_MEMORY: Final = "ray_node_gram_used"  # MiB
GPU_POWER: Final = "ray_node_gpu_power_milliwatts"
REPLICAS: Final = "ray_serve_deployment_replica_healthy"

RAY_LABELS: Final[dict[str, frozenset[str]]] = {
    NODE_CPU: frozenset({"instance"}),
    NODE_MEMORY: frozenset({"instance"}),
    NODE_MEMORY_TOTAL: frozenset({"instance"}),
    GPU_USE: frozenset({"instance", "GpuIndex"}),
    GPU_MEMORY: frozenset({"instance", "GpuIndex"}),
    GPU_POWER: frozenset({"instance", "GpuIndex"}),
    REPLICAS: frozenset({"application", "deployment"}),
}
