"""An evaluator on known losses: sums, figures, positions; and the evaluator that each run gets."""

import dataclasses
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.data.dataset import DataConfig
from lm.errors import ConfigError
from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.evaluator import make_evaluator
from lm.evaluation.masked import MaskedEvaluator
from lm.evaluation.perplexity import Evaluator, make_scoring_program, summarize
from lm.evaluation.plan import EvaluationPlan, ScoredText, TaskPlan, TextPlan, plan_evaluation, settle_evaluation
from lm.evaluation.windows import EvaluationWindows
from lm.model import ModelConfig
from lm.model.functions import Scored
from lm.pod.mesh import MeshConfig, make_mesh
from lm.tasks import TaskStore
from lm.tasks.associative_recall import AssociativeRecall
from lm.tasks.induction_heads import InductionHeads
from lm.training.config import TrainConfig

N, EOD = 45, 99
OF_A_TEXT = {'bytes', 'words', 'documents', 'word_perplexity', 'bits_per_byte'}


def at(context_length: int) -> TrainConfig:
    return TrainConfig(context_length=context_length, tokens_per_step=context_length)


TRAIN = at(16)


class Store:
    """A store whose token i is i + 1: two documents with 30 words and 120 bytes in all."""

    info = {'tokenizer': {'sha256': 'the tokenizer'}}  # noqa: RUF012

    def tokens(self, split):
        assert split in ('validation', 'test')
        return N

    def read(self, split, start, stop):
        return np.arange(start + 1, stop + 1)

    def read_many(self, split, starts, length):
        return np.stack([self.read(split, s, s + length) for s in starts])

    def bytes(self, split):
        return 120

    def words(self, split):
        return 30

    def documents(self, split):
        return 2

    def copied_share(self, split):
        return None

    def tokenizer(self):
        return types.SimpleNamespace(eod_id=EOD, piece='<{}>'.format)


def score_targets(weights, tokens_BxL, targets_BxL, documents, accuracy):
    """Returns a loss that differs by target, by position and by the token before."""
    position_L = jnp.arange(tokens_BxL.shape[1])
    return Scored(weights * (targets_BxL + position_L / 16 + tokens_BxL / 64).astype(jnp.float32))


FUNCTIONS = types.SimpleNamespace(score_targets=score_targets, config=ModelConfig())


def evaluator(window='disjoint', batch_size=2, context=8, devices=1, first_tokens=None) -> Evaluator:
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    config = EvaluateConfig(window=window, batch_size=batch_size)
    windows = EvaluationWindows.create(N, context, window, first_tokens)
    text = ScoredText(Store(), 'test', windows)
    settings = settle_evaluation(config, DataConfig(path='x'), at(context), FUNCTIONS.config)
    plan = TextPlan(text.store, settings, None, {'': text}, {})
    return Evaluator(make_scoring_program(FUNCTIONS, mesh), mesh, text, plan)


def expected(context, stride, n=N) -> tuple[np.ndarray, np.ndarray]:
    """Computes nats and tokens at each position, token by token."""
    nats, tokens = np.zeros(context), np.zeros(context, int)
    for i in range(n):  # the token i + 1
        window = 0 if i < context else math.ceil((i - context + 1) / stride)
        position = i - window * stride
        nats[position] += 0.5 * (i + 1 + position / 16 + (i if i else EOD) / 64)
        tokens[position] += 1
    return nats, tokens


@pytest.mark.parametrize(
    ('window', 'batch_size', 'devices'),
    [('disjoint', 2, 1), ('disjoint', 100, 1), ('disjoint', 1, 1), ('sliding:3', 4, 1), ('sliding:3', 4, 2)],
)
def test_figures_count_each_token_once(window, batch_size, devices):
    result = evaluator(window, batch_size, devices=devices)(jnp.float32(0.5), 70)
    nats, tokens = expected(8, 8 if window == 'disjoint' else 3)
    total = nats.sum()
    assert result['sum_nats'] == pytest.approx(total, rel=1e-6)
    assert (result['tokens'], result['bytes'], result['words'], result['documents']) == (N, 120, 30, 2)
    assert result['loss'] == pytest.approx(total / N, rel=1e-6)
    assert result['perplexity'] == pytest.approx(math.exp(total / N), rel=1e-4)
    assert result['word_perplexity'] == pytest.approx(math.exp(total / 30), rel=1e-4)
    assert result['bits_per_byte'] == pytest.approx(total / math.log(2) / 120, rel=1e-6)
    assert (result['split'], result['context_length'], result['window'], result['step']) == ('test', 8, window, 70)
    assert result['tokenizer_sha256'] == 'the tokenizer'
    bins = [b for b in ((0, 1), (1, 2), (2, 4), (4, 8)) if tokens[slice(*b)].sum()]
    assert [(b['start'], b['end'], b['tokens']) for b in result['loss_by_position']] == [
        (a, b, tokens[a:b].sum()) for a, b in bins
    ]
    for found, (a, b) in zip(result['loss_by_position'], bins, strict=True):
        assert found['loss'] == pytest.approx(nats[a:b].sum() / tokens[a:b].sum(), rel=1e-6)


@pytest.mark.parametrize('window', ['disjoint', 'sliding:3'])
def test_the_first_tokens_are_scored_as_in_the_whole_split(window):
    whole = evaluator(window)(jnp.float32(0.5), 70)
    stride = 8 if window == 'disjoint' else 3
    for first in (8, 21, 22, N, N + 1):
        result = evaluator(window, first_tokens=first)(jnp.float32(0.5), 70)
        scored = min(first, N)
        assert result['tokens'] == scored
        assert result['sum_nats'] == pytest.approx(expected(8, stride, scored)[0].sum(), rel=1e-6)
        assert result.keys() == whole.keys() - (OF_A_TEXT if first < N else set())


def test_the_last_range_of_positions_ends_with_the_context():
    nats, tokens = np.arange(11.0), np.array([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
    found = summarize(nats, tokens, Store(), 'test')['loss_by_position']
    assert found == [
        {'start': 0, 'end': 1, 'tokens': 1, 'loss': 0.0},
        {'start': 1, 'end': 2, 'tokens': 1, 'loss': 1.0},
        {'start': 2, 'end': 4, 'tokens': 2, 'loss': 2.5},
        {'start': 8, 'end': 11, 'tokens': 3, 'loss': 9.0},  # no token is scored at positions 4 to 7
    ]


def test_batches_fill_the_devices():
    assert evaluator(batch_size=1, devices=1).batch_size == 1
    assert evaluator(batch_size=3, devices=2).batch_size == 4
    assert evaluator(batch_size=8, devices=8).batch_size == 8


def test_the_evaluator_stops_on_request():
    asked = []

    def should_stop():
        asked.append(True)
        return len(asked) == 2

    assert evaluator()(jnp.float32(0.5), 70, should_stop) is None
    assert len(asked) == 2
    asked.clear()
    assert evaluator()(jnp.float32(0.5), 70, lambda: asked.append(True)) is not None
    assert len(asked) == 3  # asked after each of the batches: 6 windows, 2 per batch


def test_a_result_is_described_in_one_line():
    result = {'loss': 1.25, 'perplexity': 3.49034, 'word_perplexity': 7.5, 'bits_per_byte': 0.75}
    line = 'loss 1.2500  perplexity 3.490  per word 7.500  bits per byte 0.7500'
    assert evaluator().describe(result) == line


def test_impossible_windows_are_refused():
    assert len(EvaluationWindows.create(32, 32, 'disjoint')) == 1
    assert len(EvaluationWindows.create(33, 32, 'disjoint')) == 2
    assert EvaluationWindows.create(33, 32, 'Disjoint'.lower()).stride == 32  # spelled as in a file
    assert EvaluationWindows.create(64, 32, 'sliding:32').stride == 32
    with pytest.raises(ConfigError, match=r"evaluate\.window = 'sliding:²': must be 'disjoint' or 'sliding:STRIDE'"):
        EvaluateConfig(window='sliding:²')
    with pytest.raises(ConfigError, match=r"evaluate\.window = 'sliding:33': the stride must be at most .* 32"):
        EvaluationWindows.create(64, 32, 'sliding:33')
    with pytest.raises(ConfigError, match=r'evaluate\.context_length = 33: the split has only 32 tokens'):
        EvaluationWindows.create(32, 33, 'disjoint')


def plan(config, data, train, first_tokens=None, model=None) -> EvaluationPlan:
    """Plans the evaluation of the store, or of a task."""
    store = TaskStore(data.task, train.context_length) if data.task else Store()
    return plan_evaluation(settle_evaluation(config, data, train, model or FUNCTIONS.config, first_tokens), store)


def test_each_run_gets_its_evaluator():
    mesh, text, task = (
        make_mesh(MeshConfig(), jax.devices()[:1]),
        DataConfig(path='x'),
        DataConfig(task=InductionHeads()),
    )
    made = make_evaluator(plan(EvaluateConfig(), text, TRAIN), FUNCTIONS, mesh)
    with pytest.raises(ConfigError, match=r'model.learned_positions = 15: fewer than the 16 tokens of the context'):
        plan(EvaluateConfig(), text, TRAIN, model=ModelConfig(learned_positions=15))
    assert (type(made), made.split, made.windows.context_length) == (Evaluator, 'validation', 16)
    made = make_evaluator(plan(EvaluateConfig(), text, TRAIN, 20), FUNCTIONS, mesh)
    assert (made.windows.n_tokens, len(made.windows)) == (20, 2)
    assert made.measure == '20 tokens of validation, 16 every 16'
    config = EvaluateConfig(split='test', context_length=20, batch_size=3)
    made = make_evaluator(plan(config, task, TRAIN), FUNCTIONS, mesh)
    assert (type(made), made.split, made.context_length, made.batch_size) == (TaskEvaluator, 'test', 20, 3)
    assert made.measure == 'test, 20'
    other = EvaluateConfig(), DataConfig(path='x', eval_split='train')
    for given, split, length in (((config, text), 'test', 20), (other, 'train', 16)):
        found = settle_evaluation(*given, TRAIN, FUNCTIONS.config)
        assert (found.split, found.context_length) == (split, length)


def test_an_evaluation_is_checked_without_devices():
    text, task = DataConfig(path='x'), DataConfig(task=InductionHeads())
    plan(EvaluateConfig(), text, at(N))
    plan(EvaluateConfig(), task, at(64))
    with pytest.raises(ConfigError, match=f'context_length = {N + 1}: the split has only'):
        plan(EvaluateConfig(), text, at(N + 1))
    with pytest.raises(ConfigError, match='the stride must be at most the context, 8'):
        plan(EvaluateConfig(window='sliding:9', context_length=8), text, at(20))
    few = dataclasses.replace(at(16), eval_tokens=16)
    plan(EvaluateConfig(), text, few, 16)
    with pytest.raises(ConfigError, match=r'train.eval_tokens = 16: a window has 20 tokens'):
        plan(EvaluateConfig(context_length=20), text, few, 16)
    with pytest.raises(ConfigError, match=r'train.eval_tokens = 16: the examples of a task are its own'):
        plan(EvaluateConfig(), task, few, 16)
    with pytest.raises(ConfigError, match="'sliding:4': examples of a task are scored whole; set 'disjoint'"):
        plan(EvaluateConfig(window='sliding:4'), task, at(64))
    with pytest.raises(ConfigError, match=r'evaluate\.context_length = 1: @induction_heads\(\) needs at least'):
        plan(EvaluateConfig(context_length=1), task, at(64))


@pytest.fixture
def answering(monkeypatch):
    """Returns an evaluator of 5 examples with two answers each, 4 per batch. The rows of `right` say which answers the
    model gets right."""
    task = AssociativeRecall(vocab_size=8, n_pairs=2, eval_examples=5)
    right = np.array([[1, 1], [1, 0], [0, 0], [1, 1], [0, 1]], bool)
    examples = task.examples('validation', range(5), 12)
    scored = np.asarray(task.scored(examples))

    def model(tokens_BxL):
        """Returns log-probabilities: the target at a right answer, else another token."""
        table = np.full((5, 12, 8), 0.0)
        for n in range(5):
            answers = iter(right[n])
            for i in range(12):
                is_right = bool(next(answers)) if scored[n, i] else True
                table[n, i, examples[n, i + 1] if is_right else (examples[n, i + 1] + 1) % 8] = 3.0
        same_BxN = (tokens_BxL[:, None] == jnp.asarray(examples[None, :, :-1])).all(-1)
        return jnp.asarray(table)[same_BxN.argmax(1)]

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])

    def make(whole_answers=True, batch_size=4):
        object.__setattr__(task, 'whole_answers', whole_answers)
        config = types.SimpleNamespace(looks_ahead=False)
        functions = types.SimpleNamespace(config=config, merge=lambda weights: model)
        return TaskEvaluator(functions, mesh, TaskPlan(task, 'validation', 12, batch_size))

    return make


WEIGHTS = {'params': {}, 'buffers': {}}


@pytest.mark.parametrize('batch_size', [1, 3, 4, 8])
def test_examples_and_answers_are_counted_once(answering, batch_size):
    result = answering(batch_size=batch_size)(WEIGHTS, 3)
    assert (result['examples'], result['answers']) == (5, 10)
    assert result['accuracy'] == result['accuracy_per_example'] == 2 / 5
    assert result['accuracy_per_answer'] == 6 / 10
    log_sum = math.log(math.exp(3) + 7)
    assert result['sum_nats'] == pytest.approx(6 * (log_sum - 3) + 4 * log_sum, rel=1e-6)
    assert result['loss'] == pytest.approx(result['sum_nats'] / 10)
    assert result['perplexity'] == pytest.approx(math.exp(result['sum_nats'] / 10))
    assert (result['task'], result['split'], result['context_length'], result['step']) == (
        *('associative_recall', 'validation', 12, 3),
    )


def test_the_task_decides_what_counts(answering):
    whole = answering(True)
    assert whole.describe(whole(WEIGHTS, 3)).startswith('accuracy 40.00 % of 5 examples, 60.00 % of 10 answers  loss ')
    # With one answer per example, the accuracy is listed once.
    figures = whole(WEIGHTS, 3) | {'answers': 5, 'accuracy_per_answer': 0.4}
    assert whole.describe(figures).startswith('accuracy 40.00 % of 5 examples  loss ')
    single = answering(False)
    assert single.describe(single(WEIGHTS, 3)).startswith('accuracy 60.00 % of 10 answers  loss ')


def test_scoring_a_task_stops_on_request(answering):
    asked = []
    assert answering(batch_size=2)(WEIGHTS, 3, lambda: asked.append(True) or len(asked) == 2) is None
    assert len(asked) == 2


class Refusal(Exception):
    """Keeps what an evaluator tells of figures that are not finite."""

    def __init__(self, inputs_L, what, documents=None):
        self.inputs_L, self.what = np.asarray(inputs_L).tolist(), what


def refuse(*told):
    raise Refusal(*told)


def test_the_first_window_that_is_not_finite_is_told():
    factors = np.ones((2, 8), np.float32)
    factors[1, 2] = np.nan
    reports, refuses = evaluator(), evaluator()
    refuses.refuse = refuse
    assert math.isnan(reports(factors, 3)['perplexity'])
    with pytest.raises(Refusal) as error:
        refuses(factors, 3)
    assert (error.value.inputs_L, error.value.what) == ([*range(8, 16)], "the loss of 'test'")


def test_the_first_example_that_is_not_finite_is_told(answering):
    found = answering()
    score, found.refuse = found._score, refuse
    rows = np.array([1, 1, np.inf, np.nan])
    found._score = lambda *given: [part * factor for part, factor in zip(score(*given), (rows, 1, 1), strict=True)]
    with pytest.raises(Refusal) as error:
        found(WEIGHTS, 3)
    assert error.value.inputs_L == found.task.examples('validation', range(5), 12)[2, :-1].tolist()


def test_the_inputs_of_hidden_tokens_are_told():
    found = object.__new__(MaskedEvaluator)
    hiding = types.SimpleNamespace(hide=lambda tokens, numbers: (tokens + numbers[:, None], None))
    found.text = types.SimpleNamespace(hiding=hiding)
    np.testing.assert_array_equal(found.inputs(np.zeros((2, 3), int), 5), [[5] * 3, [6] * 3])
