"""Mixtures of token stores: exact shares, a pure function of (seed, step), the same for any number of hosts."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import tiny

from lm.data.batches import Batches
from lm.data.dataset import DataConfig
from lm.data.mixture import MixedWindows, Mixture
from lm.data.shares import MAX_PERIOD, Shares, to_whole_numbers
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.sentencepiece import SentencePiece, train
from lm.errors import ConfigError, MismatchError
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh

WEIGHTS = {'books': 0.5, 'web': 0.3, 'code': 0.2}
TOKENS = {'books': 1001, 'web': 40_001, 'code': 12_345}
L, B = 10, 8


class Numbers:
    """A store of one split whose token i is first + i: a window then shows its store and its place."""

    splits = ('train',)
    vocab_size = 2**31
    info = {'tokenizer': {'sha256': 'a' * 64}, 'dtype': 'uint32'}  # noqa: RUF012

    def __init__(self, name: str):
        self.path, self.fingerprint = name, name
        self.first = sum(list(TOKENS.values())[: list(TOKENS).index(name)])

    def tokens(self, split):
        return TOKENS[self.path]

    def read_many(self, split, starts, length):
        assert all(0 <= s <= self.tokens(split) - length for s in starts)
        return (np.asarray(starts)[:, None] + np.arange(length) + self.first).astype(np.uint32)


@pytest.fixture
def mixture():
    return Mixture({name: Numbers(name) for name in WEIGHTS}, list(WEIGHTS.values()))


def windows(mixture, skip=(), seed=3) -> MixedWindows:
    return MixedWindows(mixture, 'train', L, B, seed, skip)


def sources_of(starts) -> np.ndarray:
    return np.searchsorted(np.cumsum(list(TOKENS.values())), starts, side='right')


@hypothesis.given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
@hypothesis.settings(max_examples=80)
def test_any_consecutive_examples_have_the_shares_to_less_than_two(weights):
    shares = Shares(weights)
    source, number = shares(np.arange(3 * shares.period))
    counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    share = shares.counts / shares.period
    np.testing.assert_allclose(share, np.array(weights) / sum(weights))
    error = np.concatenate([[0 * share], counts - np.arange(1, len(source) + 1)[:, None] * share])
    assert abs(error).max() < 1
    assert (error.max(0) - error.min(0)).max() < 2  # the greatest difference between any two places
    for i in range(len(weights)):
        assert (number[source == i] == np.arange(counts[-1, i])).all()
    for n in (0, 1, shares.period, 3 * shares.period):
        assert (shares.taken(n) == (counts[n - 1] if n else 0)).all()


def test_shares_are_exact_decimals():
    assert to_whole_numbers([0.7, 0.3]) == [7, 3]
    assert to_whole_numbers([2, 4, 1.0]) == [2, 4, 1]
    fine = to_whole_numbers([0.123456789, 1, 1e-9])
    assert sum(fine) == MAX_PERIOD
    assert fine[2] == 1
    assert fine[0] / MAX_PERIOD == pytest.approx(0.123456789 / 1.123456789, abs=2 / MAX_PERIOD)


def test_the_order_of_sources_is_recorded():
    """A change here changes the data that every run on a mixture reads after a resume."""
    assert Shares([0.5, 0.3, 0.2])(np.arange(10))[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


def test_shares_over_a_thousand_steps_and_epochs_of_each_source(mixture):
    made = windows(mixture)
    starts = np.concatenate([made.starts(step) for step in range(1000)])
    source = sources_of(starts)
    assert (source == np.concatenate([made.sources(step) for step in range(1000)])).all()
    assert np.bincount(source).tolist() == [4000, 2400, 1600]
    firsts = np.cumsum([0, *TOKENS.values()])
    for i, tokens in enumerate(TOKENS.values()):
        own, count = starts[source == i] - firsts[i], (tokens - 1) // L
        for epoch in (own[k : k + count] for k in range(0, len(own), count)):
            assert len(set(epoch.tolist())) == len(epoch)  # no window comes twice in an epoch
            assert set(epoch % L) == {0}
            assert len(epoch) < count or sorted(epoch) == [L * k for k in range(count)]
    assert made.epochs(1000) == {'books': 40.0, 'web': 2400 / 4000, 'code': 1600 / 1234}
    assert made.describe(1000, 'x') == '40 epochs of books (50 %), 0.6 epochs of web (30 %), 1.3 epochs of code (20 %)'
    two = [starts[source == 0][k * 100 : (k + 1) * 100] for k in range(2)]
    assert (two[0] != two[1]).any()  # each epoch has its own order


@hypothesis.given(step=st.integers(0, 10**9))
@hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))
def test_a_step_does_not_depend_on_earlier_steps(mixture, step):
    walked = windows(mixture)
    for earlier in range(max(0, step - 3), step):
        walked.starts(earlier)
    assert (walked.starts(step) == windows(mixture).starts(step)).all()


def test_batches_are_left_out_before_and_after_a_resume(mixture):
    plain, skipping = windows(mixture), windows(mixture, skip=((3, 5), (8, 9)))
    kept = [b for b in range(63) if b not in (3, 4, 8)]
    for step, batch in enumerate(kept):
        assert (skipping.starts(step) == plain.starts(batch)).all()
        assert (skipping.sources(step) == plain.sources(batch)).all()
    resumed = windows(mixture, skip=((3, 5), (8, 9), (70, 80)))
    resumed.resume(50, skipping.skipped_before(50))
    assert all((resumed.starts(step) == skipping.starts(step)).all() for step in range(50, 67))
    assert (resumed.starts(67) == plain.starts(80)).all()
    counts = np.bincount(np.concatenate([resumed.sources(step) for step in range(1000)]))
    np.testing.assert_allclose(counts, [4000, 2400, 1600], atol=2 * 3)  # less than 2 for each gap, and at the end


@pytest.mark.parametrize('microbatches', [1, 2])
def test_global_batches_do_not_depend_on_the_devices(mixture, microbatches):
    made, found = windows(mixture), {}
    for n in (1, 2, 4):
        sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:n]), axis=1)
        batches = Batches(mixture, 'train', made, microbatches, sharding)
        found[n] = np.stack([np.asarray(batches(step)).reshape(B, L + 1) for step in (0, 7, 12_345)])
    assert (found[1] == found[2]).all()
    assert (found[1] == found[4]).all()
    assert (found[1][1, :, 0] == made.starts(7)).all()
    assert (sources_of(found[1][2, :, 0]) == made.sources(12_345)).all()
    assert (found[1] == found[1][..., :1] + np.arange(L + 1)).all()


def test_losses_by_source(mixture):
    made = windows(mixture)
    losses = np.arange(8.0).reshape(2, 4)
    told = made.by_source(0, losses)
    assert made.sources(0).tolist() == [0, 1, 0, 2, 0, 1, 0, 1]
    assert told['loss/books'] == np.mean([0, 2, 4, 6])
    assert told['loss/web'] == np.mean([1, 5, 7])
    assert told['loss/code'] == 3
    assert told['epochs/books'] == 4 / 100
    # If only some targets count, all of these have the same weight. A window without any has no weight.
    told = made.by_source(0, losses, np.array([[3, 2, 0, 0], [1, 0, 0, 6]]))
    assert told['loss/books'] == np.mean([0, 0, 0, 4])
    assert told['loss/web'] == np.mean([1] * 2 + [7] * 6)
    assert 'loss/code' not in told
    rare = MixedWindows(Mixture(mixture.stores, [1, 1e-3, 1]), 'train', L, B, 0)
    absent = [step for step in range(20) if 'loss/web' not in rare.by_source(step, losses)]
    assert absent  # a source without a window in a step has no loss there
    assert all(1 not in rare.sources(step) for step in absent)


@pytest.fixture(scope='module')
def stores(tokens, tmp_path_factory):
    """Returns a folder with two stores of the tokenizer of `tokens`, and one store of another tokenizer."""
    folder = tmp_path_factory.mktemp('stores')
    tokenizer = TokenStore.open(str(tokens)).tokenizer()
    text = (tokens.parent / 'text' / 'train' / 'typing.txt').read_text()
    tiny.write_store(folder / 'typing', {'train': [text], 'validation': [text[:3000]]}, tokenizer)
    tiny.write_store(folder / 'short', {'train': [text[:9000]], 'test': [text[:3000]]}, tokenizer)
    other = SentencePiece(train(TokenizerConfig(vocab_size=399), [text]))
    tiny.write_store(folder / 'other', {'train': [text]}, other)
    return folder


def test_stores_are_opened_by_name(stores, tokens):
    data = DataConfig(path=str(stores), mixture={'typing': 0.7, str(tokens): 0.2, 'short/': 0.1})
    assert data.mixture == (('typing', 0.7), (str(tokens), 0.2), ('short/', 0.1))
    mixture = data.open(32)
    assert list(mixture.stores) == ['typing', 'tokens', 'short']
    own = [TokenStore.open(str(p)) for p in (stores / 'typing', tokens, stores / 'short')]
    assert mixture.tokens('train') == sum(store.tokens('train') for store in own)
    assert mixture.bytes('validation') == own[0].bytes('validation') + own[1].bytes('validation')
    assert list(mixture.parts('validation')) == ['typing', 'tokens']
    n = own[0].tokens('train')
    read = mixture.read_many('train', [5, n + 7, n - 9, n + own[1].tokens('train')], 9)
    expected = own[0].read('train', 5, 14), own[1].read('train', 7, 16), own[0].read('train', n - 9, n)
    assert (read == np.stack([*expected, own[2].read('train', 0, 9)])).all()
    assert mixture.fingerprints['tokenizer'] == own[0].fingerprints['tokenizer']
    swapped = dataclasses.replace(data, mixture=data.mixture[::-1]).open(32)
    assert mixture.fingerprints['data'] != swapped.fingerprints['data'] != own[0].fingerprints['data']


def test_stores_that_do_not_fit_are_refused_by_name(stores):
    def opened(path='', **mixture):
        return DataConfig(path=path or str(stores), mixture=mixture).open(32)

    with pytest.raises(MismatchError, match=r'data.mixture: the tokenizer of .*other is \w+…, the one of .*typing is'):
        opened(typing=1, other=1)
    ends = {name: Numbers(name) for name in ('books', 'web')}
    ends['web'].info = {'tokenizer': {'sha256': 'a' * 64, 'eod_id': 2}}
    with pytest.raises(MismatchError, match=r'documents of web end by token 2, documents of books by None; prepare'):
        Mixture(ends, [1, 1])
    with pytest.raises(MismatchError, match=r'nowhere.: no finished token store'):
        opened(typing=1, nowhere=1)
    with pytest.raises(ConfigError, match=r"data.mixture = .*: the weight of 'typing' must be a positive number"):
        opened(typing=0)
    with pytest.raises(ConfigError, match=r'data.mixture = 0.7: must be a list, each item \(a string, a float\)'):
        DataConfig(mixture=0.7)
    with pytest.raises(ConfigError, match=r"by different last parts of their paths, not 'a' twice"):
        DataConfig(mixture={'x/a': 1, 'y/a/': 1})
    with pytest.raises(ConfigError, match=r"the split has only \d+ tokens.*\(source 'short' of data.mixture\)"):
        MixedWindows(opened(typing=1, short=1), 'train', 8000, 2, 0)
    with pytest.raises(ConfigError, match=r"split 'test': .*typing has train, validation; choose"):
        MixedWindows(opened(typing=1, short=1), 'test', 8, 2, 0)
