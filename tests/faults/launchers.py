"""Starts `lm` with a fault inside: python launchers.py NAME ARGUMENT… -- train …

limit BYTES          no file may become longer, as on a full disk.
poison BATCH…        the losses of these batches are not finite.
record FILE          appends 'step checksum' of each batch that is read.
without MODULE…      these modules cannot be imported.
slow SECONDS         each step, and each batch of an evaluation, takes at least so long.
"""

import resource
import signal
import sys
import time
import zlib


def limit(size: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))


def without(*names: str) -> None:
    sys.modules.update(dict.fromkeys(names))


def slow(seconds: str) -> None:
    from lm.training.preemption import Preemption

    plain = Preemption.is_requested

    def requested(self, step=None):
        time.sleep(float(seconds))
        return plain(self, step)

    Preemption.is_requested = requested


def record(path: str) -> None:
    import numpy as np

    from lm.data.batches import Batches

    plain = Batches.__call__

    def read(self, step):
        batch = plain(self, step)
        with open(path, 'a') as file:
            file.write(f'{step} {zlib.crc32(np.asarray(batch).tobytes())}\n')
        return batch

    Batches.__call__ = read


def poison(*numbers: str) -> None:
    """Makes losses NaN if the windows contain the first window of a poisoned batch, known by its tokens."""
    import jax
    import jax.numpy as jnp

    from lm.data.batches import Batches
    from lm.training.step import TrainStep

    prepared, plain = Batches.__init__, TrainStep.weighted_loss
    bad = []

    def __init__(self, store, split, windows, *rest):
        prepared(self, store, split, windows, *rest)
        starts = [windows.starts(int(batch))[0] for batch in numbers]
        bad.append(jnp.asarray(store.read_many(split, starts, windows.context_length + 1)[:, :-1].astype('int32')))

    def weighted_loss(self, weights, tokens_BxL, *rest):
        is_bad = (tokens_BxL[:, None] == bad[0][None]).all(-1).any()
        return jax.tree.map(lambda x: x * jnp.where(is_bad, jnp.nan, 1.0), plain(self, weights, tokens_BxL, *rest))

    Batches.__init__, TrainStep.weighted_loss = __init__, weighted_loss


LAUNCHERS = {function.__name__: function for function in (limit, poison, record, without, slow)}


def main(program: list[str]) -> int:
    """Runs `lm` with the arguments after '--'. The arguments before, if there are any, name the launcher."""
    cut = program.index('--')
    if cut:
        LAUNCHERS[program[0]](*program[1:cut])
    import lm.cli

    sys.argv[:] = ['lm', *program[cut + 1 :]]
    return lm.cli.main(sys.argv[1:])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
