"""Decode steps as CUDA graphs, and the memory that steps of a GPU need beside the KV pool.

A graph fixes addresses and shapes. So there is one for each padded number of rows and bound of the longest
context (`buckets`), and all read the same tensors, which every step fills anew (`static_batch`). `decoder`
records and replays them in terms of `device`, the one file that calls CUDA; tests emulate it.
"""
