"""Hidden amino acids: figures against an independent computation, the empirical baseline, and a small training that
beats it."""

import dataclasses
import json
import math
import runpy

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from rich.console import Console
from tiny import train_step

from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.data.dataset import DataConfig
from lm.data.mixture import Mixture
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.proteins.fasta import Fasta
from lm.data.store import TokenStore
from lm.data.tokenizers.amino_acids import LETTERS, AminoAcids, AminoAcidsConfig
from lm.errors import ConfigError
from lm.evaluation.baseline import EmpiricalBaseline
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.evaluator import make_evaluator
from lm.evaluation.plan import open_sets, plan_evaluation, settle_evaluation
from lm.evaluation.scoring import Scorer
from lm.evaluation.sets import flatten_result
from lm.experiment import Experiment
from lm.inference.evaluation import print_result
from lm.inference.generation import generate
from lm.inference.loaded_run import open_run
from lm.model import ModelConfig
from lm.model.functions import select_weights
from lm.plan import validate
from lm.pod.mesh import MeshConfig, make_mesh
from lm.session.train import train
from lm.training.config import TrainConfig
from lm.training.objectives.masked import Masked
from lm.training.objectives.next_token import NextToken
from lm.training.optimizer import OptimizerConfig
from lm.training.rules.muon import Muon
from lm.training.schedules.constant import Constant

FAMILIES = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/table_2_proteins/protein_families.py'))
LENGTH = 48
MODEL = ModelConfig(vocab_size=28, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=Softmax(), causal=False)
TRAIN = TrainConfig(steps=60, tokens_per_step=8 * LENGTH, context_length=LENGTH, objective=Masked())
TOKENIZER = AminoAcids(AminoAcidsConfig().contents())


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    """Returns a store of made-up proteins."""
    folder = tmp_path_factory.mktemp('proteins')
    assert FAMILIES['main']([str(folder / 'a.fasta'), '--families', '3', '--sequences', '400', '--sharpness', '2']) == 0
    source = Fasta(path=str(folder / 'a.fasta'), validation_fraction=0.1)
    config = PrepareConfig(source=source, tokenizer=AminoAcidsConfig(), processes=1)
    prepare(config, str(folder / 'store'), Console(quiet=True))
    return str(folder / 'store')


def mesh_of(devices=1):
    return make_mesh(MeshConfig(), jax.devices()[:devices])


def state_of(model):
    step = train_step(model, OptimizerConfig(warmup_steps=1), 10)
    return step.functions, select_weights(jax.jit(step.init)(0))


def evaluated(path, model=MODEL, config=None, objective=None, devices=1, split='validation'):
    store = TokenStore.open(path)
    objective = objective or Masked()
    functions, state = state_of(model)
    told = dataclasses.replace(TRAIN, objective=objective)
    config = config or EvaluateConfig(split=split)
    settings = settle_evaluation(config, DataConfig(path=path), told, model)
    made = make_evaluator(plan_evaluation(settings, store), functions, mesh_of(devices))
    return made(state, 3), made


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def frequencies(store, special):
    """Returns the frequency of each token of the training split; special tokens do not count."""
    tokens = store.read('train', 0, store.tokens('train'))
    found = np.array([(tokens == i).sum() for i in range(28)], float)
    found[list(special)] = 0
    return found / found.sum()


def check_figures(result, nats, right, asked, store, special):
    share = frequencies(store, special)
    assert result['tokens'] == len(nats)
    assert result['sum_nats'] == pytest.approx(np.sum(nats), rel=1e-5)
    assert result['perplexity'] == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    assert result['accuracy'] == pytest.approx(np.mean(right))
    assert result['baseline_perplexity'] == pytest.approx(math.exp(-np.log(share[asked]).mean()), rel=1e-9)
    assert result['baseline_accuracy'] == pytest.approx((np.array(asked) == share.argmax()).mean())


@pytest.mark.parametrize(
    ('split', 'batch_size', 'devices'),
    [('validation', 8, 1), ('validation', 1, 1), ('validation', 5, 4), ('train', 32, 1)],
)
def test_figures_count_each_hidden_token_once(path, split, batch_size, devices):
    """The test computes window by window from the logits; batch and devices must not matter."""
    result, evaluator = evaluated(path, config=EvaluateConfig(split=split, batch_size=batch_size), devices=devices)
    store = TokenStore.open(path)
    n = store.tokens(split)
    assert n % LENGTH  # the last window overlaps the one before
    functions, state = state_of(MODEL)
    model = functions.merge(state)
    hiding = Masked().make_hiding(store, 28, split)
    tokens = np.stack([store.read(split, at, at + LENGTH) for at in [*range(0, n - LENGTH, LENGTH), n - LENGTH]])
    inputs, chosen = (np.array(x) for x in hiding.hide(jnp.asarray(tokens, jnp.int32), jnp.arange(len(tokens))))
    chosen[-1, : LENGTH - n % LENGTH] = False
    logits = np.asarray(jax.jit(lambda x: model(x))(jnp.asarray(inputs)), np.float64)
    nats = -np.take_along_axis(log_softmax(logits), tokens[..., None].astype(int), -1)[..., 0][chosen]
    right = (logits.argmax(-1) == tokens)[chosen]
    check_figures(result, nats, right, tokens[chosen], store, (0, 1))
    assert 0.12 < result['tokens'] / n < 0.17
    assert (result['split'], result['context_length'], result['step']) == (split, LENGTH, 3)
    assert not result.keys() & {'word_perplexity', 'bits_per_byte', 'bytes', 'words'}
    assert sum(b['tokens'] for b in result['loss_by_position']) == result['tokens']
    line = evaluator.describe(result)
    assert f'accuracy {100 * result["accuracy"]:.2f} %' in line
    assert 'frequencies alone' in line
    assert '\n' not in line


def test_the_accuracy_of_the_next_token(path):
    """Every token of the split counts, ends of sequences too; the frequencies count the same tokens."""
    model = dataclasses.replace(MODEL, causal=True)
    config = EvaluateConfig(accuracy=True, window='sliding:10', batch_size=7)
    result, _ = evaluated(path, model, config, NextToken())
    plain, _ = evaluated(path, model, dataclasses.replace(config, accuracy=False), NextToken())
    assert {name: result[name] for name in plain} == plain
    assert result.keys() - plain.keys() == {'accuracy', 'baseline_accuracy', 'baseline_perplexity'}
    disjoint, evaluator = evaluated(path, model, EvaluateConfig(accuracy=True), NextToken())
    assert len(evaluator.describe(disjoint)) < 160  # a word is a protein, and its perplexity has a hundred digits
    store = TokenStore.open(path)
    n = store.tokens('validation')
    stream = np.concatenate([[0], store.read('validation', 0, n)])
    functions, state = state_of(model)
    graph = functions.merge(state)
    nats, right = [], []
    for start in range(0, n, LENGTH):
        window = stream[start : start + LENGTH + 1]
        logits = np.asarray(graph(jnp.asarray(window[None, :-1])), np.float64)[0]
        nats += [-row[target] for row, target in zip(log_softmax(logits), window[1:], strict=True)]
        right += (logits.argmax(-1) == window[1:]).tolist()
    check_figures(disjoint, nats, right, stream[1:], store, ())


def test_the_baseline_uses_frequencies_alone(tmp_path):
    train_texts = ['AAAC', 'AAD']
    store = TokenStore.open(str(tiny.write_store(tmp_path / 'a', {'train': train_texts, 'test': ['ACDE']}, TOKENIZER)))
    ids = TOKENIZER.encode('ACDE')
    asked = np.zeros(28, int)
    asked[ids[:2]] = 3, 1
    found = EmpiricalBaseline(store, 'train', (0, 1)).compute_figures(asked)
    # A occurs five times among seven, C once.
    assert found['baseline_accuracy'] == 3 / 4
    assert found['baseline_perplexity'] == pytest.approx(math.exp(-(3 * math.log(5 / 7) + math.log(1 / 7)) / 4))
    asked = np.zeros(28, int)
    asked[ids[[0, 3]]] = 1  # E never occurs in training: it counts as one occurrence
    found = EmpiricalBaseline(store, 'train', (0, 1)).compute_figures(asked)
    assert found['baseline_perplexity'] == pytest.approx(math.exp(-(math.log(5 / 8) + math.log(1 / 8)) / 2))
    # Ends count if they are requested: 2 of 9.
    asked = np.zeros(28, int)
    asked[0] = 1
    assert EmpiricalBaseline(store, 'train').compute_figures(asked)['baseline_perplexity'] == pytest.approx(9 / 2)
    # In a mixture the shares count, and not the lengths.
    other = TokenStore.open(str(tiny.write_store(tmp_path / 'b', {'train': ['C' * 70]}, TOKENIZER)))
    mixture = Mixture({'a': store, 'b': other}, [3.0, 1.0])
    asked = np.zeros(28, int)
    asked[ids[1]] = 1
    share = 0.75 * (1 / 9) + 0.25 * (70 / 71)
    special = 0.75 * 2 / 9 + 0.25 / 71
    found = EmpiricalBaseline(mixture, 'train', (0, 1)).compute_figures(asked)['baseline_perplexity']
    assert found == pytest.approx((1 - special) / share)


def test_long_splits_are_counted_in_pieces(monkeypatch, path):
    store = TokenStore.open(path)
    whole = EmpiricalBaseline(store, 'train').frequencies_V
    assert whole.sum() == store.tokens('train')
    monkeypatch.setattr('lm.evaluation.baseline.PIECE', 1000)
    np.testing.assert_array_equal(EmpiricalBaseline(store, 'train').frequencies_V, whole)
    monkeypatch.setattr('lm.evaluation.baseline.MOST_TOKENS', 8000)
    part = EmpiricalBaseline(store, 'train').frequencies_V
    assert part.sum() == 8000
    np.testing.assert_allclose(part / 8000, whole / whole.sum(), atol=0.02)


def test_tasks_that_need_one_direction_are_refused(path):
    data = DataConfig(path=path)
    wrong = [
        (EvaluateConfig(window='sliding:8'), r"^evaluate\.window = 'sliding:8': .* set 'disjoint'$"),
        (EvaluateConfig(chunk=8), r'^evaluate\.chunk = 8: .* delete this$'),
        (EvaluateConfig(mask_documents=True), r'^evaluate\.mask_documents = True: '),
    ]
    functions, state = state_of(MODEL)
    for config, message in wrong:
        with pytest.raises(ConfigError, match=message):
            settle_evaluation(config, data, TRAIN, MODEL)
    causal = dataclasses.replace(TRAIN, objective=NextToken())
    with pytest.raises(ConfigError, match=r'^evaluate\.chunk = 8: evaluate\.accuracy is of whole windows'):
        settle_evaluation(EvaluateConfig(chunk=8, accuracy=True), data, causal, MODEL)
    with pytest.raises(ConfigError, match=r'^model\.causal = False: a text has no probability'):
        Scorer(functions, mesh_of(), state, LENGTH, 4)


def test_mixtures_and_other_sets(path, tmp_path):
    """Each text counts by itself, and the data of the run by the sums of its parts."""
    texts = [LETTERS[i:] + LETTERS[:i] for i in range(20)]
    other = tiny.write_store(tmp_path / 'other', {'train': texts, 'validation': texts}, TOKENIZER)
    data = DataConfig(mixture=((path, 0.5), (str(other), 0.5)))
    store, (functions, state) = data.open(LENGTH), state_of(MODEL)
    config = EvaluateConfig(sets=(('ood', f'{other}@train'),))
    plan = plan_evaluation(settle_evaluation(config, data, TRAIN, MODEL), store)
    result = make_evaluator(plan, functions, mesh_of())(state, 1)
    assert list(result['sets']) == ['store', 'other', 'ood']
    parts = [result['sets'][name] for name in ('store', 'other')]
    assert result['tokens'] == sum(part['tokens'] for part in parts)
    assert result['sum_nats'] == pytest.approx(sum(part['sum_nats'] for part in parts))
    right = sum(part['accuracy'] * part['tokens'] for part in parts)
    assert result['accuracy'] == pytest.approx(right / result['tokens'])
    assert result['sets']['ood']['split'] == 'train'
    # The same text has other hidden tokens: the draw depends on the split.
    assert result['sets']['ood']['sum_nats'] != result['sets']['other']['sum_nats']
    record = flatten_result(result)
    assert record['accuracy/ood'] == result['sets']['ood']['accuracy']
    assert 'word_perplexity/ood' not in record
    assert open_sets(settle_evaluation(config, data, TRAIN, MODEL), store).keys() == {'ood'}


def test_a_table_for_people(path, capsys):
    result, _ = evaluated(path)
    print_result(result | {'sets': {'ood': result}})
    out = capsys.readouterr().out
    for words in ('accuracy', 'frequencies alone: perplexity', f'{result["baseline_perplexity"]:.4f}', 'ood'):
        assert words in out
    assert 'per word' not in out


ADVANTAGE = {'softmax': Softmax(), 'performer': Performer(features='relu', n_features=32, block=None)}


@pytest.fixture(scope='module')
def experiment(path):
    return Experiment(
        model=MODEL,
        data=DataConfig(path=path),
        train=dataclasses.replace(TRAIN, steps=150, eval_every=None, log_every=1, tensorboard=False),
        optimizer=OptimizerConfig(peak_learning_rate=1.6e-2, warmup_steps=10, rule=Muon(rms=0.1), schedule=Constant()),
        evaluate=EvaluateConfig(batch_size=32),
        mesh=MeshConfig(),
    )


@pytest.mark.parametrize('name', grids.draw(ADVANTAGE, 1))
def test_a_small_training_beats_the_baseline_and_resumes_to_the_bit(experiment, name, tmp_path, capsys):
    """The data are three families. Resumed from step 75, the run ends as before: data and hidden tokens depend on the
    step."""
    model = dataclasses.replace(MODEL, attention=ADVANTAGE[name])
    checkpoint = dataclasses.replace(experiment.checkpoint, save_every_steps=75, keep_last=3)
    run = dataclasses.replace(experiment, model=model, checkpoint=checkpoint)
    assert validate(run) == []
    train(run, str(tmp_path / 'run'), compile_cache='none')
    first, losses = tiny.checksums(tmp_path / 'run', 150), tiny.losses(tmp_path / 'run')
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    (record,) = (json.loads(line) for line in lines if '"eval"' in line)
    assert record['perplexity'] < 0.9 * record['baseline_perplexity']
    assert record['accuracy'] > 1.3 * record['baseline_accuracy']
    assert 10 < record['baseline_perplexity'] < 20
    train(run, str(tmp_path / 'run'), rewind_to=75, compile_cache='none')
    assert tiny.losses(tmp_path / 'run') == losses
    assert tiny.checksums(tmp_path / 'run', 150) == first
    capsys.readouterr()
    loaded = open_run(str(tmp_path / 'run'))
    for use in (lambda: loaded.score('ACD'), lambda: generate(loaded, 'ACD', max_tokens=2)):
        with pytest.raises(ConfigError, match=r'^model\.causal = False: '):
            use()


def best_match(motif, sequence):
    return max(sum(map(str.__eq__, motif, sequence[at:])) for at in range(len(sequence)))


def test_families_depend_on_the_arguments_alone(tmp_path):
    """The FASTA file is real: all members of a family have its motifs, and their lengths differ."""
    write, make = FAMILIES['write'], FAMILIES['families']
    sizes = [write(tmp_path / name, 4, 60, seed, 0.1, 1.0) for name, seed in (('a', 0), ('b', 0), ('c', 1))]
    a, b, c = ((tmp_path / name).read_text() for name in 'abc')
    assert a == b != c
    assert sizes[0] == sizes[1] == sum(len(line) for line in a.splitlines() if not line.startswith('>'))
    assert max(map(len, a.splitlines())) <= 60
    found = {}
    for record in a.split('>')[1:]:
        name, *lines = record.splitlines()
        found.setdefault(int(name.split()[-1]), []).append(''.join(lines))
    assert sum(map(len, found.values())) == 60
    for i, family in enumerate(make(4, 0, 1.0)):
        assert len({len(member) for member in found[i]}) > 1
        motif = ''
        for letter, is_motif in zip(family.profile.argmax(1), family.is_motif, strict=True):
            if not is_motif and motif:
                break
            motif += FAMILIES['LETTERS'][letter] if is_motif else ''
        assert np.mean([best_match(motif, member) >= len(motif) - 1 for member in found[i]]) > 0.8
    with pytest.raises(SystemExit):
        FAMILIES['main']([str(tmp_path / 'd'), '--families', '0'])


def test_a_split_without_hidden_tokens_is_named(path):
    with pytest.raises(
        ConfigError, match=r"^split 'validation' of .*store: none of the \d+ tokens is hidden; score a "
    ):
        evaluated(path, objective=Masked(share=1e-9))


def test_a_store_without_the_split_is_refused(path):
    with pytest.raises(ConfigError, match="split 'test'"):
        evaluated(path, split='test')
