"""Memory that processes of one machine share, in huge pages where the system has them: cpu/shared_map.h."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref

import torch

from workers.kernels.library import Library

_log = logging.getLogger(__name__)


def shared_bytes(library: Library, fd: int, num_bytes: int) -> torch.Tensor:
    """(num_bytes,) uint8, starting at a huge page: the first bytes of the file behind `fd`, in every process
    that maps them. The descriptor may be closed after; the mapping ends with the last tensor over it.

    The file must have that size, for good: what is behind its end cannot be read. Raises OSError.
    """
    assert num_bytes > 0, num_bytes
    address: int = library.map_shared(fd, num_bytes)
    if address < 0:
        raise OSError(-address, f"cannot map {num_bytes} bytes of shared memory: {os.strerror(-address)}")
    memory = (ctypes.c_char * num_bytes).from_address(address)
    # Not at exit: a thread that ends with the process may still be inside a step.
    weakref.finalize(memory, library.unmap_shared, address, num_bytes).atexit = False
    error: int = library.collapse_shared(address, num_bytes)
    if error:
        _log.info(
            "%d bytes of shared memory stay in small pages, which are slower: %s",
            num_bytes,
            os.strerror(error),
        )
    return torch.frombuffer(memory, dtype=torch.uint8)
