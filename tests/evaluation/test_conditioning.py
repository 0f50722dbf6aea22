"""The token before texts and windows: what a model sees of it in an evaluation, and what the evaluation states."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.data.dataset import DataConfig
from lm.errors import ConfigError
from lm.evaluation.conditioning import Conditioning
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.evaluator import make_evaluator
from lm.evaluation.perplexity import Evaluator
from lm.evaluation.plan import plan_evaluation, settle_evaluation
from lm.model import ModelConfig
from lm.model.functions import Scored
from lm.ops.documents import Documents, TextBegin
from lm.pod.mesh import MeshConfig, make_mesh
from lm.tasks.induction_heads import InductionHeads
from lm.training.config import TrainConfig
from lm.training.objectives import check_objective
from lm.training.objectives.masked import Masked

EOD, BEGIN, LENGTH = 99, 98, 8
TEXT = np.array([3, 4, EOD, 5, 6, 7, EOD, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, EOD, 18, 19, EOD])


class Store:
    """A split of four documents."""

    info = {'tokenizer': {'sha256': 'the tokenizer'}}  # noqa: RUF012
    vocab_size, path = 100, 'store'

    def tokens(self, split):
        return len(TEXT)

    def read(self, split, start, stop):
        return TEXT[start:stop]

    def read_many(self, split, starts, length):
        return np.stack([TEXT[s : s + length] for s in starts])

    def bytes(self, split):
        return 120

    words = documents = bytes

    def copied_share(self, split):
        return None

    def tokenizer(self):
        return types.SimpleNamespace(eod_id=EOD, piece='<{}>'.format)


def score_targets(weights, tokens_BxL, targets_BxL, documents, accuracy):
    """Returns losses that tell all inputs up to the target apart."""
    powers_L = 1.5 ** jnp.arange(tokens_BxL.shape[1])
    return Scored(weights * jnp.cumsum(tokens_BxL * powers_L, axis=1) + targets_BxL)


FUNCTIONS = types.SimpleNamespace(score_targets=score_targets, config=ModelConfig())


def evaluator(window='disjoint', begin_id=BEGIN, begin_windows=None, of_evaluation=None, **data) -> Evaluator:
    config = EvaluateConfig(window=window, batch_size=2, begin_windows=of_evaluation)
    section = DataConfig(path='x', begin_id=begin_id, begin_windows=begin_windows, **data)
    train = TrainConfig(context_length=LENGTH, tokens_per_step=LENGTH)
    plan = plan_evaluation(settle_evaluation(config, section, train, FUNCTIONS.config), Store())
    made = make_evaluator(plan, FUNCTIONS, make_mesh(MeshConfig(), jax.devices()[:1]))
    assert isinstance(made, Evaluator)
    return made


def compute_nats(stride, begin, begins_windows) -> float:
    """Computes the loss token by token; `begin` stands for each end-of-document token that the model sees."""
    stream, total = [EOD, *TEXT.tolist()], 0.0
    seen = [begin if token == EOD else token for token in stream]
    for i in range(1, len(stream)):
        window = max(0, -(-(i - LENGTH) // stride)) * stride
        inputs = seen[window:i]
        if begins_windows:
            inputs = [begin, *inputs[1:]]
        total += 0.01 * sum(token * 1.5**at for at, token in enumerate(inputs)) + stream[i]
    return total


@pytest.mark.parametrize(('window', 'stride'), [('disjoint', LENGTH), ('sliding:3', 3)])
@pytest.mark.parametrize(('begin_id', 'begin_windows', 'before_windows'), [
    (BEGIN, None, 'begin'),
    (BEGIN, False, 'previous token'),
    (None, None, 'previous token'),
    (EOD, None, 'previous token'),
    (None, True, 'end of document'),
])  # fmt: skip
def test_a_model_sees_its_token_before_texts_and_windows(window, stride, begin_id, begin_windows, before_windows):
    begin = EOD if begin_id is None else begin_id
    expected = compute_nats(stride, begin, before_windows != 'previous token')
    for settings in ({'begin_windows': begin_windows}, {'of_evaluation': begin_windows}):
        result = evaluator(window, begin_id, **settings)(jnp.float32(0.01), 70)
        assert result['tokens'] == len(TEXT)
        assert result['sum_nats'] == pytest.approx(expected, rel=1e-5)
        sees = '5 tokens of the window before' if stride == 3 else 'the token before the window'
        assert result['conditioning'] == {
            'before_texts': 'begin' if begin == BEGIN else 'end of document',
            'before_windows': before_windows,
            'first_token_sees': sees,
            'token_id': begin,
            'token': f'<{begin}>',
        }


def test_without_a_token_of_its_own_a_model_sees_the_tokens_as_they_are():
    """Neither the program nor the name of the loss changes."""
    assert evaluator(begin_id=None).plan.begin is evaluator(begin_id=EOD).plan.begin is None
    assert evaluator(begin_id=None).measure == '21 tokens of validation, 8 every 8'
    assert len({evaluator(begin_id=None).measure, evaluator().measure, evaluator(begin_windows=False).measure}) == 3


def test_documents_begin_with_the_token_before_a_text():
    data = DataConfig(path='x', mask_documents=True, begin_id=BEGIN)
    assert data.documents(Store()) == Documents(BEGIN)
    assert DataConfig(path='x', mask_documents=True).documents(Store()) == Documents(EOD)


def test_data_that_have_the_token_themselves_do_not_get_it_twice():
    tokens = jnp.array([[5, EOD, BEGIN, 6, EOD, 7], [BEGIN, 6, EOD, 7, 8, 9], [EOD, BEGIN, 7, EOD, 8, 9]])
    for windows, first in ((True, [BEGIN, BEGIN, EOD]), (False, [5, BEGIN, EOD])):
        found = np.asarray(TextBegin(BEGIN, EOD, windows).make_inputs(tokens))
        np.testing.assert_array_equal(found[:, 0], first)
        np.testing.assert_array_equal(found[:, 1:], [[EOD, BEGIN, 6, BEGIN], [6, BEGIN, 7, 8], [BEGIN, 7, BEGIN, 8]])


def test_earlier_evaluations_have_the_conditioning_that_all_had():
    made = evaluator(begin_id=None)
    for record in ({'window': 'disjoint', 'context_length': 8}, {}):
        assert Conditioning.read(record) == made.conditioning
    sliding = evaluator('sliding:3', begin_id=None)
    assert Conditioning.read({'window': 'sliding:3', 'context_length': 8}) == sliding.conditioning != made.conditioning
    result = evaluator('sliding:3')(jnp.float32(0.01), 70)
    assert Conditioning.read(result) == evaluator('sliding:3').conditioning


def test_settings_without_a_text_are_refused():
    with pytest.raises(ConfigError, match=r'data\.begin_id = 3: the examples of a task are no documents; delete this'):
        DataConfig(task=InductionHeads(), begin_id=3)
    config, train = EvaluateConfig(begin_windows=True), TrainConfig(context_length=16, tokens_per_step=16)
    with pytest.raises(ConfigError, match=r'evaluate\.begin_windows = True: the examples of a task'):
        settle_evaluation(config, DataConfig(task=InductionHeads()), train, ModelConfig())
    with pytest.raises(ConfigError, match=r'data\.begin_id = 3: model\.causal = False, and the token before a text'):
        check_objective(Masked(), DataConfig(path='x', begin_id=3), ModelConfig(causal=False))
