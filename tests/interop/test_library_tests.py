"""The tests that `transformers` runs on each of its own classes, on the class of an export; needs PyTorch:
`scripts/test.sh -m interop`."""

import copy
import unittest

import library_tests
import numpy as np
import pytest
import shapes
from mechanisms_list import MECHANISMS

from lm.interop.formats import describe

pytestmark = pytest.mark.interop
torch = pytest.importorskip('torch', reason='needs PyTorch: scripts/test.sh -m interop')
transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')

EXCEPTIONS = {
    'test_generation_tester_mixin_inheritance': 'a release has no tests of generate; $TRANSFORMERS_TESTS names them',
}
"""Test → why it does not pass for any mechanism."""
OF_A_FORM: dict[str, dict[str, str]] = {}
"""Form → the same for its own tests."""
OF_THE_CLASS = {'settings', 'auto_map', 'architectures', 'model_type'}
"""Entries of config.json that are not options of `LmConfig`."""


class ExportTester:
    """The sizes and inputs of a test, as the library's tests ask for them."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, vocab_size, num_attention_heads = 32, 2, 97, 4

    def __init__(self, form: str):
        self.experiment = shapes.experiment(MECHANISMS[form], n_layers=2)

    def get_config(self):
        from lm.interop.modeling_lm import LmConfig

        described = describe(shapes.run_of(self.experiment, None))
        return LmConfig(**{name: x for name, x in described.items() if name not in OF_THE_CLASS}, pad_token_id=0)

    def prepare_config_and_inputs_for_common(self):
        shape = self.batch_size, self.seq_length
        ids = torch.tensor(np.random.default_rng(0).integers(1, self.vocab_size, shape))
        return self.get_config(), {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}


def make_case(mixin: type, form: str) -> type[unittest.TestCase]:
    """Returns the tests of a mechanism as a class."""
    from lm.interop.modeling_lm import LmForCausalLM

    def prepare(self, inputs, model_class, return_labels=False):
        inputs = copy.deepcopy(inputs)
        return inputs | ({'labels': torch.zeros_like(inputs['input_ids'])} if return_labels else {})

    members = {
        'all_model_classes': (LmForCausalLM,),
        'has_attentions': False,
        'setUp': lambda self: setattr(self, 'model_tester', ExportTester(form)),
        '_prepare_for_class': prepare,
    }
    return type('ExportedClass', (mixin, unittest.TestCase), members)


@pytest.fixture(scope='module')
def library(tmp_path_factory):
    return library_tests.load(tmp_path_factory.mktemp('transformers'))


@pytest.mark.parametrize('form', MECHANISMS)
def test_the_library_accepts_the_class_of_a_mechanism(form, library):
    case, failed, passed = make_case(library.ModelTesterMixin, form), {}, 0
    for name in (name for name in dir(case) if name.startswith('test_') and callable(getattr(case, name))):
        result = unittest.TestResult()
        case(name).run(result)
        wrong = [*result.errors, *result.failures]
        failed |= {name: wrong[0][1].strip().splitlines()[-1]} if wrong else {}
        passed += not wrong and not result.skipped
    allowed = EXCEPTIONS | OF_A_FORM.get(form, {})
    assert {name: why for name, why in failed.items() if name not in allowed} == {}
    assert passed >= 65
