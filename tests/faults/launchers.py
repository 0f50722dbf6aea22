"""Starts `lm` with a fault inside: python launchers.py NAME ARGUMENT… -- train …

miscompute N         the checksums of a replay are wrong in one group of devices, after N of them.
spoil N              a bit of a parameter flips on one device, before the comparison of copies number N + 1.
limit BYTES          no file may become longer, as on a full disk.
poison BATCH…        the steps of these batches are not finite.
record FILE          appends 'step checksum' of each batch that is read.
without MODULE…      these modules cannot be imported.
hang PHASE           the replay, the evaluation or the save number 2 never ends, and the watchdog is impatient.
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
    from lm.pod.preemption import Preemption

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
    """Makes a weight NaN for the steps whose batches contain the first window of a poisoned batch.

    The window is known by its tokens. After the step the weight gets its value back. The program of the step is the
    usual one, because another program may differ in the last bits of all steps.
    """
    import jax
    import jax.numpy as jnp

    import lm.session.train

    prepared, plain = lm.session.train.make_plan, lm.session.train.give_fixed
    bad = []

    def make_plan(*arguments, **options):
        plan = prepared(*arguments, **options)
        starts = [plan.windows.starts(int(batch))[0] for batch in numbers]
        bad.append(plan.store.read_many(plan.split, starts, plan.windows.context_length + 1).astype('int32'))
        return plan

    @jax.jit
    def is_poisoned(batch):
        return (batch[:, :, None] == jnp.asarray(bad[0])).all(-1).any()

    def give_fixed(*arguments):
        advance = plain(*arguments)

        def poisoned(state, batch):
            if not is_poisoned(batch):
                return advance(state, batch)
            leaves, structure = jax.tree.flatten(state['params'])
            intact = leaves[0].copy()
            params = jax.tree.unflatten(structure, [leaves[0] * jnp.nan, *leaves[1:]])
            state, metrics = advance(state | {'params': params}, batch)
            leaves = jax.tree.leaves(state['params'])
            return state | {'params': jax.tree.unflatten(structure, [intact, *leaves[1:]])}, metrics

        return poisoned

    lm.session.train.make_plan, lm.session.train.give_fixed = make_plan, give_fixed


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


def hang(phase: str) -> None:
    import itertools
    import threading

    from lm.checkpoint.checkpointer import Checkpointer
    from lm.evaluation.perplexity import Evaluator
    from lm.pod import watchdog
    from lm.training.replay import Replay

    owner, name = {
        'evaluation': (Evaluator, 'sum_scores'),
        'checkpoint': (Checkpointer, 'save'),
        'replay': (Replay, 'check'),
    }[phase]
    plain, calls = getattr(owner, name), itertools.count()
    watchdog.PATIENCE = 1

    def stuck(*arguments, **options):
        if next(calls):
            threading.Event().wait()
        return plain(*arguments, **options)

    setattr(owner, name, stuck)


LAUNCHERS = {
    function.__name__: function for function in (hang, limit, miscompute, poison, record, spoil, without, slow)
}


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
