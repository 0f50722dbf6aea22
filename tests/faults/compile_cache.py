"""JAX's cache of compiled programs, for tests: several processes share one, and none reads half an entry.

JAX writes an entry where others read it. Two processes that compile the same program at the same time then find an
"incomplete or truncated stream". Here an entry gets its name when it is whole, in the processes that call `share`. Each
worker of pytest has a folder of its own for the others, such as commands that begin as a user starts them.
"""

import functools
import os
import pathlib
import tempfile

ROOT, OWN = 'LM_TESTS_COMPILED', 'JAX_COMPILATION_CACHE_DIR'
"""The variables that name the folder of all workers, and the one of this worker and of the processes that it starts."""


def choose_folders(default: pathlib.Path) -> None:
    """Sets both variables. The first follows OWN where someone has set it, such as for a mutant; else `default`.

    The first process of pytest passes its variables to its workers.
    """
    root, own = os.environ.get(ROOT), os.environ.get(OWN)
    if root is None or (own and os.path.dirname(own) != root):
        root = own or str(default)
    os.environ[ROOT] = root
    os.environ[OWN] = os.path.join(root, os.environ.get('PYTEST_XDIST_WORKER', 'main'))


def find_shared() -> str:
    """Returns the folder that processes share: the one of all workers, unless OWN names another place by now."""
    root, own = os.environ.get(ROOT, ''), os.environ[OWN]
    return root if os.path.dirname(own) == root else own


def share() -> None:
    """Makes this process write entries whole."""
    try:
        from jax._src.lru_cache import LRUCache
    except ImportError:  # other versions of JAX write entries in their own way
        return
    if not hasattr(LRUCache.put, '__wrapped__'):
        LRUCache.put = _write_whole(LRUCache.put)


def _write_whole(put):
    @functools.wraps(put)
    def put_whole(self, key: str, value: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix='.new-', dir=self.path) as folder:
            put(type(self)(folder, max_size=-1), key, value)
            for path in pathlib.Path(folder).iterdir():
                os.replace(path, os.path.join(self.path, path.name))

    return put_whole
