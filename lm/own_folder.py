"""A folder of this user in a place where others can write too, such as /dev/shm or /tmp.

Anyone may foretell its name, and put a link, a pipe or a folder of their own there before. So the folder is opened
once, without following links, and its files are reached through its descriptor alone.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def own_folder(path: os.PathLike | str) -> Iterator[int]:
    """Opens a folder that this user alone can read and write, and gives its descriptor.

    Raises OSError for a link, and for a folder that is missing, of another user or open to others.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise PermissionError(f'{os.fspath(path)} is not a folder that this user alone can write')
        yield descriptor
    finally:
        os.close(descriptor)


def open_own_file(name: str, folder: int, flags: int = os.O_RDONLY) -> BinaryIO:
    """Opens a plain file of this user in an open folder, without a buffer; `flags` may create it.

    Raises OSError for a link, a pipe, a device, and a file of another user. It never waits for the other end of a pipe.
    """
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=folder)
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(f'{name} is not a plain file of this user')
    return open(descriptor, 'r+b' if flags & os.O_RDWR else 'rb', buffering=0)
