"""Associative recall as Zoology publishes it: equal tokens, its segments, answers that are not in the input."""

import jax
import numpy as np
import pytest
from tiny import train_step

from lm.attention.softmax import Softmax
from lm.errors import ConfigError
from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.plan import TaskPlan
from lm.experiment import load
from lm.model import ModelConfig
from lm.pod.mesh import MeshConfig, make_mesh
from lm.tasks.multiquery_recall import MultiqueryRecall, lay_out
from lm.training.optimizer import OptimizerConfig

TINY = MultiqueryRecall(
    vocab_size=32, train_segments=((8, 1, 2), (12, 2, 1)), eval_segments=((8, 2), (16, 3)), eval_examples=10
)

# What `multiquery_ar` of github.com/HazyResearch/zoology at d88d6f5 returns for a vocabulary of 32, 3 examples of 20
# tokens and 3 pairs, power 0.3 and seed 5 (numpy's), and the random tokens that PyTorch drew for it (its seed was 7).
INPUTS = [
    [6, 27, 2, 26, 8, 16, 2, 7, 6, 25, 14, 23, 8, 25, 8, 10, 26, 8, 7, 6],
    [11, 30, 4, 20, 12, 24, 11, 23, 12, 6, 19, 28, 4, 31, 5, 24, 24, 23, 11, 16],
    [15, 20, 12, 17, 13, 26, 12, 6, 4, 14, 15, 23, 3, 3, 8, 19, 13, 1, 0, 16],
]
LABELS = [
    [-100, -100, -100, -100, -100, -100, 26, -100, 27, -100, -100, -100, -100, -100, 16, -100, -100, -100, -100, -100],
    [-100, -100, -100, -100, -100, -100, -100, -100, 24, -100, -100, -100, 20, -100, -100, -100, -100, -100, 30, -100],
    [-100, -100, -100, -100, -100, -100, 17, -100, -100, -100, 20, -100, -100, -100, -100, -100, 26, -100, -100, -100],
]
RANDOM = [
    [15, 4, 25, 22, 3, 19, 23, 7, 28, 25, 14, 23, 8, 25, 14, 10, 26, 8, 7, 6],
    [4, 16, 31, 7, 12, 0, 11, 23, 26, 6, 19, 28, 12, 31, 5, 24, 24, 23, 21, 16],
    [27, 29, 0, 2, 24, 9, 14, 6, 4, 14, 9, 23, 3, 3, 8, 19, 16, 1, 0, 16],
]


def test_the_examples_equal_the_published_ones_token_for_token():
    numpy, slots = np.random.RandomState(5), np.arange(1, 8)
    power = 0.3 * slots ** (0.3 - 1)
    keys, values = ([numpy.choice(np.arange(*r), 3, replace=False) for _ in range(3)] for r in ((1, 16), (16, 32)))
    keys, values = np.array(keys), np.array(values)
    slot = np.array([numpy.choice(7, 3, replace=False, p=power / power.sum()) for _ in range(3)])
    inputs, answers = lay_out(20, keys, values, slot, np.array(RANDOM))
    assert inputs.tolist() == INPUTS
    assert np.where(answers < 0, -100, answers).tolist() == LABELS


def test_every_segment_has_examples():
    task = MultiqueryRecall()
    packed = task.examples('train', range(90), 256)
    inputs, answers, scored = map(np.asarray, task.unpack(packed))
    turn = [(64, 4)] * 5 + [(128, 8), (256, 16), (256, 32), (256, 64)]
    places = []
    for i, (row, answer, counts) in enumerate(zip(inputs, answers, scored, strict=True)):
        length, pairs = turn[i % 9]
        keys, values = row[0 : 2 * pairs : 2], row[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert (keys > 0).all()
        assert (keys < 4096).all()
        assert (values >= 4096).all()
        asked = np.flatnonzero(counts)
        assert len(asked) == pairs
        assert not (asked % 2).any()
        assert asked[0] >= 2 * pairs
        assert asked[-1] < length
        assert dict(zip(row[asked], answer[asked], strict=True)) == dict(zip(keys, values, strict=True))
        assert not row[length:].any()
        others = np.setdiff1d(np.arange(2 * pairs, length), asked)
        places += row[others].tolist()
    assert abs(np.mean(places) - 4095.5) < 100  # uniform over the vocabulary: the standard error is about 23


def test_examples_are_pure_and_splits_differ():
    whole = TINY.examples('train', range(30), 16)
    np.testing.assert_array_equal(TINY.examples('train', [7, 2], 16), whole[[7, 2]])
    np.testing.assert_array_equal(TINY.examples('train', [7, 2], 12), whole[[7, 2], :13])
    assert (TINY.examples('validation', range(30), 16) != whole).any()
    slots = MultiqueryRecall(vocab_size=128, train_segments=((64, 4, 1),), eval_segments=((64, 4),)).examples(
        'train', range(500), 64
    )
    asked = np.nonzero(slots[:, 1:] >= 128)[1]
    counts = np.bincount((asked - 8) // 2, minlength=28)
    assert counts[0] > 1.5 * counts[4] > 1.5 * counts[-1] > 0


def test_loss_and_accuracy_are_of_the_answers_at_the_questions():
    model = ModelConfig(vocab_size=32, n_layers=1, d_model=32, n_heads=2, head_dim=16, attention=Softmax())
    step = train_step(model, OptimizerConfig(warmup_steps=1), 10, unpack=TINY.unpack)
    state = jax.jit(step.init)(0)
    state['params'] = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(x.size), x.shape), state['params'])

    def by_hand(split, rows, length):
        """Returns (nats, right) of the answers."""
        inputs, answers, scored = map(np.asarray, TINY.unpack(TINY.examples(split, rows, length)))
        logits = np.asarray(jax.jit(lambda s: step.functions.merge(s)(inputs))(state), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nats = -np.take_along_axis(log_p, answers[..., None], -1)[..., 0]
        return nats[scored], (logits.argmax(-1) == answers)[scored]

    _, metrics = jax.jit(step.train)(state, TINY.examples('train', range(8), 12)[None])
    assert float(metrics['loss']) == pytest.approx(by_hand('train', range(8), 12)[0].mean(), rel=1e-5)
    evaluator = TaskEvaluator(step.functions, make_mesh(MeshConfig()), TaskPlan(TINY, 'validation', 12, 8))
    result = evaluator({name: state[name] for name in ('params', 'buffers')}, 3)
    short, long = by_hand('validation', range(0, 10, 2), 8), by_hand('validation', range(1, 10, 2), 16)
    assert result['accuracy_by_slice'] == {'2 pairs in 8': short[1].mean(), '3 pairs in 16': long[1].mean()}
    assert (result['examples'], result['answers']) == (10, 25)
    assert result['accuracy'] == np.concatenate([short[1], long[1]]).mean()
    assert result['loss'] == pytest.approx(np.concatenate([short[0], long[0]]).mean(), rel=1e-5)
    assert '3 pairs in 16: ' in evaluator.describe(result)


def test_fewer_examples_than_segments_leave_no_slice_empty():
    task = MultiqueryRecall(eval_examples=2)
    slices = task.slices('validation', 64)
    assert {name: part.index_N.tolist() for name, part in slices.items()} == {
        '4 pairs in 64': [0],
        '8 pairs in 64': [1],
    }


def test_impossible_tasks_are_refused():
    with pytest.raises(ConfigError, match=r'train.context_length = 8: .* has segments of 12 tokens in train'):
        TINY.examples('train', range(3), 8)
    with pytest.raises(ConfigError, match=r'multiquery_recall.train_segments = .* at least four times its pairs'):
        MultiqueryRecall(train_segments=((64, 17, 1),))
    with pytest.raises(ConfigError, match=r'multiquery_recall.vocab_size = 512: half of it must be more than 256'):
        MultiqueryRecall(vocab_size=512)


def test_the_shipped_configuration_equals_the_published_one():
    experiment = load(['configs/papers/llops/tables_4_5_recall/multiquery_recall.gin'])
    task = experiment.data.task
    assert task == MultiqueryRecall()
    assert (task.count('train'), task.count('test')) == (100_000 + 4 * 20_000, 7 * 1000)
    assert experiment.train.batch_size == 256
    assert experiment.train.steps == 32 * 180_000 // 256
    assert experiment.train.context_length == task.shortest_context() == 256
