"""Starts `lm` with a fault inside: python launchers.py NAME ARGUMENT… -- train …

miscompute N         the checksums of a replay are wrong in one group of devices, after N of them.
spoil N              a bit of a parameter flips on one device, before the comparison of copies number N + 1.
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

    import lm.session.train
    from lm.training.step import TrainStep

    prepared, plain = lm.session.train.make_plan, TrainStep.weighted_loss
    bad = []

    def make_plan(*arguments, **options):
        plan = prepared(*arguments, **options)
        starts = [plan.windows.starts(int(batch))[0] for batch in numbers]
        windows = plan.store.read_many(plan.split, starts, plan.windows.context_length + 1)
        bad.append(jnp.asarray(windows[:, :-1].astype('int32')))
        return plan

    def weighted_loss(self, weights, tokens_BxL, *rest):
        is_bad = (tokens_BxL[:, None] == bad[0][None]).all(-1).any()
        return jax.tree.map(lambda x: x * jnp.where(is_bad, jnp.nan, 1.0), plain(self, weights, tokens_BxL, *rest))

    lm.session.train.make_plan, TrainStep.weighted_loss = make_plan, weighted_loss


def miscompute(number: str) -> None:
    """A single group is wrong in every second replay, for it is compared with itself alone."""
    import itertools

    from lm.training.replay import Replay

    plain, calls = Replay.compute, itertools.count()

    def compute(self, *arguments):
        sums, call = plain(self, *arguments).copy(), next(calls)
        if call >= int(number) and (len(sums) > 1 or call % 2):
            sums[-1, -1] ^= 1
        return sums

    Replay.compute = compute


def spoil(number: str) -> None:
    import itertools

    import jax
    import numpy as np

    import lm.session.train

    plain, calls = lm.session.train.compare_copies, itertools.count()

    def flip(x):
        parts = [np.array(shard.data) for shard in x.addressable_shards]
        if jax.process_index() == 0:
            parts[0].view(np.uint8).ravel()[1] ^= 16
        placed = [jax.device_put(part, s.device) for part, s in zip(parts, x.addressable_shards, strict=True)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)

    def compare(state):
        if next(calls) >= int(number):
            state = state | {'params': jax.tree.map(flip, state['params'])}
        return plain(state)

    lm.session.train.compare_copies = compare


LAUNCHERS = {function.__name__: function for function in (limit, miscompute, poison, record, spoil, without, slow)}


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
