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
    'test_generation_tester_mixin_inheritance': 'the tests of generate are the next ones; a release has none',
}
"""Test → why it does not pass for any mechanism."""
LEFT_OUT = {
    'Model architecture does not support attentions': 'attention weights are not returned, and a row has one text',
    "LmForCausalLM doesn't support caching": 'a cache is called `cache` and has no form that the library knows',
    "Stateful models don't support assisted generation": 'a cache cannot go back to an earlier token',
    'This model does not support the static cache format': 'the same',
    "This model doesn't support compilation without graph breaks": 'the cache grows',
    'test is slow': 'it compares kinds of attention, of which there is one',
    'requires': 'it needs a package or a machine',
}
"""The beginning of the reason that the library gives for leaving out a test of generate → the reason here."""
PADS = 'test_left_padding_compatibility'
"""This test asks whether a class returns attention weights to learn whether it takes padding."""
OF_A_FORM: dict[str, dict[str, str]] = {}
"""Form → the same for its own tests."""
OF_THE_CLASS = {'settings', 'auto_map', 'architectures', 'model_type'}
"""Entries of config.json that are not options of `LmConfig`."""


class ExportTester:
    """The sizes and inputs of a test, as the library's tests ask for them."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, vocab_size, num_attention_heads = 32, 2, 97, 4

    def __init__(self, form: str, spread: float):
        self.experiment, self.spread = shapes.experiment(MECHANISMS[form], n_layers=2), spread

    def get_config(self):
        from lm.interop.modeling_lm import LmConfig

        described = describe(shapes.run_of(self.experiment, None))
        entries = {name: x for name, x in described.items() if name not in OF_THE_CLASS}
        return LmConfig(**entries | {'pad_token_id': 0, 'bos_token_id': 1, 'initializer_range': self.spread})

    def prepare_config_and_inputs_for_common(self):
        shape = self.batch_size, self.seq_length
        ids = torch.tensor(np.random.default_rng(0).integers(1, self.vocab_size, shape))
        return self.get_config(), {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}


def make_case(form: str, *mixins: type, spread: float = 0.02) -> type[unittest.TestCase]:
    """Returns the tests of a mechanism as a class; `spread` is the standard deviation of the weights."""
    from lm.interop.modeling_lm import LmForCausalLM

    def prepare(self, inputs, model_class, return_labels=False):
        inputs = copy.deepcopy(inputs)
        return inputs | ({'labels': torch.zeros_like(inputs['input_ids'])} if return_labels else {})

    members = {
        'all_model_classes': (LmForCausalLM,),
        'all_generative_model_classes': (LmForCausalLM,),
        'has_attentions': False,
        'setUp': lambda self: setattr(self, 'model_tester', ExportTester(form, spread)),
        '_prepare_for_class': prepare,
    }
    return type('ExportedClass', (*mixins, unittest.TestCase), members)


def run_tests(case: type[unittest.TestCase], mixin: type) -> tuple[dict[str, str], dict[str, str], int]:
    """Runs the tests that a class has from a mixin.

    Returns the last line of each that fails, the reason of each that is left out, and how many pass.
    """
    failed, skipped, passed = {}, {}, 0
    for name in (name for name in dir(mixin) if name.startswith('test_') and callable(getattr(mixin, name))):
        result, test = unittest.TestResult(), case(name)
        test.has_attentions = name == PADS
        torch.manual_seed(0)
        test.run(result)
        if wrong := [*result.errors, *result.failures]:
            failed[name] = wrong[0][1].strip().splitlines()[-1]
        elif result.skipped:
            skipped[name] = result.skipped[0][1]
        else:
            passed += 1
    return failed, skipped, passed


@pytest.fixture(scope='module')
def library(tmp_path_factory, pytestconfig):
    return library_tests.load(tmp_path_factory.mktemp('transformers'), pytestconfig)


@pytest.mark.parametrize('form', MECHANISMS)
def test_the_library_accepts_the_class_of_a_mechanism(form, library):
    failed, _, passed = run_tests(make_case(form, library.ModelTesterMixin), library.ModelTesterMixin)
    allowed = EXCEPTIONS | OF_A_FORM.get(form, {})
    assert {name: why for name, why in failed.items() if name not in allowed} == {}
    assert passed >= 65


@pytest.mark.parametrize('form', MECHANISMS)
def test_the_library_generates_with_the_class_of_a_mechanism(form, library):
    mixin = library.GenerationTesterMixin
    if not hasattr(mixin, PADS):
        pytest.skip('a release has no tests of generate: $TRANSFORMERS_TESTS names the folder of a checkout')
    # With smaller weights, the logits depend on the last token alone, as far as the library's tolerance goes.
    case = make_case(form, mixin, library.ModelTesterMixin, spread=0.2)
    failed, skipped, passed = run_tests(case, mixin)
    assert failed == {}
    assert {name: why for name, why in skipped.items() if not any(known in why for known in LEFT_OUT)} == {}
    assert passed >= 20
