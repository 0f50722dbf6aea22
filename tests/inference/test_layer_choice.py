"""The choice of layers that keep their attention: repeated passages, and the effect of a swap."""

import types
from argparse import ArgumentParser as Parser

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import lm
from lm.attention.hedgehog import Hedgehog
from lm.attention.softmax import Softmax
from lm.commands.distill import add_flags
from lm.data.mixture import Mixture
from lm.data.tokenizers.amino_acids import AminoAcids, AminoAcidsConfig
from lm.errors import ConfigError
from lm.experiment import load
from lm.inference.layer_choice import (
    CUE,
    PASSAGE,
    RANKINGS,
    LayerEffect,
    lay_windows,
    plant_passages,
    rank_layers,
    read_planted,
    write_pattern,
)
from lm.model import ModelConfig
from lm.model.distillation import score_swapped
from lm.model.functions import ModelFunctions, over_windows

SIZES = {'vocab_size': 64, 'n_layers': 3, 'd_model': 32, 'n_heads': 2, 'head_dim': 16}


def test_a_passage_stands_twice_and_its_second_copy_counts():
    tokens_BxL = np.arange(2 * 129).reshape(2, 129)
    plain_BxL, planted_BxL, told_BxL = plant_passages(tokens_BxL)
    assert (plain_BxL == tokens_BxL).all()
    changed_BxL = planted_BxL != tokens_BxL
    assert not changed_BxL[:, :64].any()
    assert (told_BxL <= changed_BxL).all()
    assert told_BxL.sum() == 2 * 2 * (PASSAGE - CUE)
    for row in range(2):
        place = int(np.argmax(changed_BxL[row]))
        passage = planted_BxL[row, place : place + PASSAGE]
        assert list(passage) == list(tokens_BxL[row, passage[0] - 129 * row :][:PASSAGE])
    assert (plant_passages(tokens_BxL).planted == planted_BxL).all()


def test_no_more_text_is_read_than_evaluations_read(reference_run):
    def read(tokens):
        settings = ['train.context_length = 64', f'train.eval_tokens = {tokens}']
        return read_planted(lm.load(str(reference_run[0]), gin_params=settings)).planted

    assert read(200).shape == (3, 65)
    assert len(read(None)) > 3
    with pytest.raises(ConfigError, match=r'train\.eval_tokens = 63: a window has 64 tokens'):
        read(63)


def test_a_swap_of_no_layer_is_the_teacher_and_a_swap_of_one_changes_the_rest():
    student, teacher = (
        ModelFunctions(ModelConfig(**SIZES, attention=one), jnp.dtype('float32')) for one in (Hedgehog(), Softmax())
    )
    models = [(student, student.init(1)), (teacher, teacher.init(0))]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 17)), jnp.int32)

    def score(*swapped):
        def one(*arguments):
            return score_swapped(*arguments, swapped_N=jnp.asarray([i in swapped for i in range(3)]))

        return over_windows(one, models, None, tokens[:, :-1], tokens[:, 1:])

    plain = teacher.score_targets(models[1][1], tokens[:, :-1], tokens[:, 1:]).nats
    np.testing.assert_allclose(score(), plain, rtol=1e-6)
    assert all((jnp.abs(score(i) - plain) > 1e-5).any() for i in range(3))


def test_the_pattern_keeps_what_a_mechanism_names():
    ours = [
        'model.attention = @window_linear()',
        'window_linear.map = @performer()',
        'performer.n_features = 64',
        'window_linear.rotary_scaling = @yarn_rotary()',
        'yarn_rotary.factor = 8.0',
    ]
    common = ['model.n_layers = 4', 'model.vocab_size = 64', "data.path = 'd'"]
    student, teacher = (load([], common + lines) for lines in ([*ours, 'model.key_offset = 0.5'], []))
    runs = [types.SimpleNamespace(experiment=one) for one in (student, teacher)]
    lines = write_pattern(*runs, [1]).splitlines()
    back = load([], [*common, 'model.key_offset = 0.5', *lines]).model
    assert [back.layers[i] for i in (0, 2, 3)] == [student.model.layers[i] for i in (0, 2, 3)]
    assert back.resolve(back.layers[1]) == teacher.model.resolve(teacher.model.layers[1]), 'with the teacher’s options'
    assert not [line for line in lines if line.startswith(('model.', 'train.')) and 'attention' not in line]


def test_windows_cross_no_border_of_a_mixture(tmp_path):
    tokenizer = AminoAcids(AminoAcidsConfig().contents())
    paths = [tiny.write_store(tmp_path / name, {'validation': [name * 9]}, tokenizer) for name in ('AC', 'DE')]
    mixture = Mixture.open('', [(str(path), 0.5) for path in paths])
    starts = lay_windows(mixture, 'validation', 5)
    rows = mixture.read_many('validation', starts, 6)
    texts = [tokenizer.decode(row) for row in rows]
    assert len(texts) == 6
    assert all(set(text) <= set('AC') or set(text) <= set('DE') for text in texts)
    alone = lay_windows(next(iter(mixture.stores.values())), 'validation', 5)
    assert alone.tolist() == [0, 5, 10]


def test_layers_are_ranked_by_recall_per_loss_of_plain_text():
    effects = [LayerEffect(0, 0.1, 0.2), LayerEffect(1, 0.01, 0.1), LayerEffect(2, -0.5, 0.0)]
    assert [effect.layer for effect in rank_layers(effects)] == [1, 0, 2]
    assert effects[2].score == 0.0


def test_recall_alone_finds_the_layer_that_carries_both():
    effects = [LayerEffect(0, 0.005, 0.008), LayerEffect(1, 0.18, 0.25), LayerEffect(2, 0.008, 0.012)]
    assert [effect.layer for effect in rank_layers(effects)] == [0, 2, 1]
    assert [effect.layer for effect in rank_layers(effects, 'recall')] == [1, 2, 0]
    # The command names what the module knows; it imports the module only when it runs.
    flags = Parser(prog='lm distill')
    add_flags(flags)
    (choices,) = (one.choices for one in flags._actions if one.dest == 'rank_by')
    assert set(choices) == set(RANKINGS)
