"""The order of the data: a bijection per epoch, a pure function of (seed, step), the same for any number of hosts."""

import concurrent.futures
import contextlib
import threading

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from lm.data.batches import Batches, Windows, merge_ranges
from lm.data.permutation import Permutation
from lm.errors import ConfigError
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh


class ArrayStore:
    """A store whose token i is i: a batch then shows where its windows start."""

    def read(self, split, start, stop):
        return np.arange(start, stop, dtype=np.uint32)

    def read_many(self, split, starts, length):
        return (np.asarray(starts)[:, None] + np.arange(length)).astype(np.uint32)


@hypothesis.given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), stream=st.integers(0, 1000))
@hypothesis.settings(max_examples=60)
def test_permutation_is_a_bijection(n, seed, stream):
    image = Permutation(n, seed, stream)(np.arange(n))
    assert sorted(image) == list(range(n))


def test_permutation_depends_on_seed_and_stream_and_shuffles():
    n = 10_000
    images = [Permutation(n, seed, stream)(np.arange(n)) for seed, stream in ((0, 0), (1, 0), (0, 1))]
    for a in range(3):
        for b in range(a):
            assert (images[a] != images[b]).mean() > 0.99
        # The correlation of a random permutation with the identity is about 1/sqrt(n) = 0.01.
        assert abs(np.corrcoef(images[a], np.arange(n))[0, 1]) < 0.05
    assert (images[0] == Permutation(n, 0, 0)(np.arange(n))).all()


def test_permutation_handles_huge_domains_and_recorded_values():
    assert Permutation(10**15, 3)(np.array([0, 1, 10**15 - 1])).max() < 10**15
    # These values were recorded once. A change here changes the order of data in every run that users resume.
    assert Permutation(1000, 0)(np.arange(5)).tolist() == GOLDEN
    # Other kinds of sizes: a power of two, an odd number of bits, the smallest network.
    assert Permutation(1024, 0)(np.arange(5)).tolist() == GOLDEN_OF_A_POWER_OF_TWO
    assert Permutation(2000, 0)(np.arange(5)).tolist() == [1521, 710, 279, 189, 500]
    smallest = [Permutation(4, seed)(np.arange(4)).tolist() for seed in range(3)]
    assert smallest == [
        [2, 0, 3, 1],
        [3, 2, 1, 0],
        [3, 0, 2, 1],
    ]


GOLDEN_OF_A_POWER_OF_TWO = [414, 540, 67, 159, 765]
GOLDEN = [414, 540, 67, 159, 765]


def test_each_window_once_an_epoch():
    windows = Windows(n_tokens=1001, context_length=10, batch_size=7, seed=5)
    assert windows.count == 100
    starts = np.concatenate([windows.starts(step) for step in range(100)])
    for epoch in range(7):
        assert sorted(starts[epoch * 100 : (epoch + 1) * 100]) == [10 * i for i in range(100)]


@hypothesis.given(step=st.integers(0, 10**6), seed=st.integers(0, 2**31))
@hypothesis.settings(max_examples=40)
def test_steps_are_independent_of_history(step, seed):
    fresh = Windows(12_345, 16, 5, seed).starts(step)
    walked = Windows(12_345, 16, 5, seed)
    for earlier in range(max(0, step - 3), step):
        walked.starts(earlier)
    assert (walked.starts(step) == fresh).all()


def test_steps_may_be_read_in_any_order():
    """100 windows, 7 per step: the steps go back and forth across the ends of epochs."""
    windows = Windows(1001, 10, 7, seed=5)
    expected = {step: Windows(1001, 10, 7, seed=5).starts(step).tolist() for step in range(45)}
    for step in (44, 0, 30, 14, 15, 2, 29, 13, 43, 14):
        assert windows.starts(step).tolist() == expected[step]


def test_skipped_batches_are_never_seen_and_the_rest_keep_their_order():
    plain = Windows(10_001, 10, 4, seed=1)
    skipping = Windows(10_001, 10, 4, seed=1, skip=((3, 5), (8, 9)))
    expected = [b for b in range(20) if b not in (3, 4, 8)]
    for step, batch in enumerate(expected):
        assert (skipping.starts(step) == plain.starts(batch)).all()


RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 8)).map(lambda r: (r[0], sum(r))), max_size=5)


def named(ranges) -> set[int]:
    return {batch for first, end in ranges for batch in range(first, end)}


@hypothesis.given(ranges=RANGES)
@hypothesis.settings(max_examples=100)
def test_exactly_the_named_batches_are_left_out(ranges):
    """Ranges may overlap, touch and repeat."""
    windows = Windows(10_001, 10, 4, seed=1, skip=tuple(ranges))
    left = [b for b in range(200) if b not in named(ranges)]
    assert [windows.batch(step) for step in range(100)] == left[:100]


@hypothesis.given(data=st.data(), first=RANGES)
@hypothesis.settings(max_examples=150)
def test_ranges_that_change_on_resume_leave_out_exactly_the_batches_ahead(data, first):
    """A run resumes any number of times with other ranges. It leaves out a batch if it is named at that time, and reads
    each other batch once."""
    expected, seen, ranges, skipped, next_batch = [], [], first, None, 0
    for _ in range(data.draw(st.integers(1, 4))):
        windows = Windows(10_001, 10, 4, seed=1, skip=tuple(ranges))
        try:
            windows = windows.resume(len(seen), skipped)
        except ConfigError:
            behind = {b for b in named(ranges) if b < next_batch}
            assert behind & set(seen), 'refused, but nothing that was named had been seen'
            ranges = [r for r in ranges if r[0] >= next_batch]
            windows = Windows(10_001, 10, 4, seed=1, skip=tuple(ranges))
            windows = windows.resume(len(seen), skipped)
        else:
            assert not named(ranges) & set(seen), 'a range that is behind was taken without a word'
        steps = data.draw(st.integers(0, 30))
        expected += [b for b in range(next_batch, 1000) if b not in named(ranges)][:steps]
        seen += [windows.batch(step) for step in range(len(seen), len(seen) + steps)]
        assert seen == expected
        next_batch = seen[-1] + 1 if seen else 0
        skipped = windows.skipped_before(len(seen))
        assert named(skipped) == set(range(next_batch)) - set(seen)
        ranges = data.draw(RANGES)


@pytest.mark.parametrize('ranges', [((5, 3),), ((4, 4),), ((-2, 3),), ((1, 2), (-1, -1))])
def test_ranges_that_name_no_batches_are_refused(ranges):
    with pytest.raises(ConfigError, match=r'train\.skip_batches: \[.*\] names no batches; give pairs'):
        Windows(10_001, 10, 4, seed=1, skip=ranges)


def test_a_range_that_is_behind_is_refused():
    windows = Windows(10_001, 10, 4, seed=1, skip=((40, 50),))
    with pytest.raises(ConfigError, match=r'\[40, 50\] is behind: the run has seen all batches before 100 but'):
        windows.resume(100, [])


def test_context_longer_than_the_split_is_refused():
    with pytest.raises(ConfigError, match=r'train.context_length = 100: the split has only 100 tokens'):
        Windows(100, 100, 1, 0)


@pytest.mark.parametrize('microbatches', [1, 2])
def test_global_batches_do_not_depend_on_the_devices(microbatches):
    windows = Windows(10_001, 16, 16, seed=2)
    batches = {}
    for n in (1, 2, 8):
        sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:n]), axis=1)
        batch = Batches(ArrayStore(), 'train', windows, microbatches, sharding)(7)
        assert batch.shape == (microbatches, 16 // microbatches, 17)
        batches[n] = np.asarray(batch)
    assert (batches[1] == batches[2]).all()
    assert (batches[1] == batches[8]).all()
    assert (batches[1].reshape(16, 17)[:, 0] == windows.starts(7)).all()


def test_prefetch_yields_the_same_batches_in_order():
    sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:2]), axis=1)
    batches = Batches(ArrayStore(), 'train', Windows(10_001, 16, 4, seed=2), 1, sharding)
    for step, batch in enumerate(batches.prefetch(3, 12), start=3):
        assert (np.asarray(batch) == np.asarray(batches(step))).all()
    assert step == 11


class Inline(contextlib.nullcontext):
    """An executor that runs each call at once."""

    def __init__(self, max_workers, thread_name_prefix):
        super().__init__(self)

    def submit(self, function, *arguments):
        future = concurrent.futures.Future()
        future.set_result(function(*arguments))
        return future


def test_prefetch_reads_a_few_batches_ahead_and_none_that_nobody_takes(monkeypatch):
    monkeypatch.setattr(concurrent.futures, 'ThreadPoolExecutor', Inline)
    sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1]), axis=1)
    asked = []

    class Counting(Batches):
        def __call__(self, step):
            asked.append(step)
            return step

    batches = Counting(ArrayStore(), 'train', Windows(10_001, 16, 4, seed=2), 1, sharding)
    for step, batch in enumerate(batches.prefetch(3, 12), start=3):
        assert batch == step
        assert max(asked) == min(step + 2, 11)
    assert sorted(asked) == list(range(3, 12))
    assert list(batches.prefetch(4, 4)) == []


def test_a_run_that_ends_early_does_not_wait_for_later_batches():
    sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1]), axis=1)
    begun, gate = [], threading.Event()

    class Slow(Batches):
        def __call__(self, step):
            begun.append(step)
            assert step == 0 or gate.wait(60)
            return step

    iterator = Slow(ArrayStore(), 'train', Windows(10_001, 16, 4, seed=2), 1, sharding).prefetch(0, 10**6, depth=9)
    assert next(iterator) == 0
    threading.Timer(0.05, gate.set).start()
    iterator.close()
    assert set(begun) <= {0, 1, 2}  # the two threads had begun these


@pytest.mark.parametrize(
    ('ranges', 'merged'),
    [
        ([(3, 5), (5, 7)], [(3, 7)]),
        ([(3, 5), (6, 7)], [(3, 5), (6, 7)]),
        ([[6, 9], [0, 1], [2, 7]], [(0, 1), (2, 9)]),
        ([(0, 9), (2, 3)], [(0, 9)]),
        ([], []),
    ],
)
def test_ranges_are_merged(ranges, merged):
    assert merge_ranges(ranges) == merged


def test_the_ranges_left_out_before_a_step():
    windows = Windows(10_001, 10, 4, seed=1, skip=((0, 2), (5, 8)))
    assert [windows.skipped_before(step) for step in range(5)] == [
        *([], [(0, 2)], [(0, 2)], [(0, 2)], [(0, 2), (5, 8)])
    ]  # steps 0, 1, 2 and 3 see the batches 2, 3, 4 and 8


@pytest.mark.parametrize('range_', [(7, 9), (8, 20), (0, 3)])
def test_a_range_whose_batches_were_all_left_out_before_may_be_named_again(range_):
    """At step 4 the batches before 10 are in the past; 0 to 2 and 7 to 9 were left out."""
    windows = Windows(10_001, 10, 4, seed=1, skip=(range_,))
    windows = windows.resume(4, [(0, 3), (7, 10)])
    assert windows.batch(4) == (20 if range_ == (8, 20) else 10)


@pytest.mark.parametrize('range_', [(6, 9), (7, 11), (9, 10), (0, 4)])
def test_a_range_is_in_the_past_once_its_first_batch_was_read(range_):
    windows = Windows(10_001, 10, 4, seed=1, skip=(range_,))
    with pytest.raises(ConfigError, match=r'all batches before 10 but those it left out \(\[\[0, 3\], \[7, 9\]\]\)'):
        windows.resume(5, [(0, 3), (7, 9)])


def test_a_range_ahead_of_a_resume_is_left_out():
    windows = Windows(10_001, 10, 4, seed=1, skip=((10, 12),))
    windows = windows.resume(10, [])
    assert [windows.batch(step) for step in (9, 10)] == [9, 12]
