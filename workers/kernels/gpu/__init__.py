"""Operators of the decoder in Triton, for GPUs. `kernels` has the class; nothing outside imports this room
before a CUDA device is chosen, so a machine without a GPU needs no Triton.

What holds for every kernel here (`flash_attention` has none: it calls another package's, where asked to):

- A row has the same bits whatever else is in the batch: tiles along a reduced axis are set by the shape of
  the model alone, their results are added in a fixed order, nothing is tuned by measuring.
- It waits for nothing and reads no shape back from the device: a CUDA graph can hold it.
- A row whose slot is -1, or that no sequence owns, is padding: nothing is written to the pool for it, and its
  results mean nothing.
- Sums are in float32, offsets into the pool in 64 bits.
"""
