"""Opening files of a model folder and the like: regular ones only.

Opening a FIFO waits for a writer that may never come, and a device has no end; neither is opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(file: Path) -> BufferedReader:
    """The file, for reading. Raises OSError, also when it is a folder, a FIFO, a socket or a device."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(file))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(file: Path, *, max_bytes: int) -> bytes:
    """Its content. Raises OSError as `open_regular`, and for a file above the limit."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"{size} bytes, over the limit of {max_bytes}", str(file))
        return stream.read(max_bytes)
