"""Execution of one rank: process group, paged KV pool, batches, model runner, sampler, executors."""
