"""Files, local ones and those in buckets."""

import contextlib
import os

from etils import epath


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes a small file: a reader, or a crash, finds the old text or the new. Object stores do so by themselves."""
    if '://' in str(path):
        path.write_text(text)
        return
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'w', encoding='utf-8') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
