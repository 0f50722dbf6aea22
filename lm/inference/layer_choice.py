"""The choice of layers of a converted model that keep the attention of the teacher: `lm distill --choose`.

Each layer in turn gets the student's attention while all others stay the teacher's. Two losses answer: of plain text,
and of passages that stand in the text a second time, which a model predicts by recalling the first. The layers that
recall needs most, for what plain text needs of them, keep their attention (HALO, 2026, eq. 8). Where one layer carries
most of both losses, the ratio hides it, and recall alone ranks better (docs/results.md).
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.attention.base import Attention
from lm.attention.options import MODEL
from lm.config.text import dump
from lm.data.dataset import Store
from lm.data.mixture import Mixture
from lm.errors import ConfigError, Diverged, writing
from lm.evaluation.finite import REMEDY
from lm.inference.loaded_run import LoadedRun, open_run
from lm.model.distillation import score_swapped
from lm.model.functions import over_windows
from lm.model.layers import find_same_layers
from lm.training.objectives.next_token import next_token

WINDOWS = 64
"""Windows of the evaluation split that both losses are measured on, if `train.eval_tokens` has as many."""
ROWS = 8
"""Windows in one call of the program."""
PASSAGE, CUE = 16, 4
"""Tokens of a repeated passage, and how many of them are given before recall counts."""
RANKINGS = {
    'recall_per_loss': lambda effect: effect.score,
    'recall': lambda effect: effect.recall,
}
"""Name of a ranking → its number for a layer; the largest come first."""
LEAST_LOSS = 1e-3
"""Nats of plain text below which a difference counts as this much: the ratio would be noise."""
REFERENCE = re.compile(r'@([\w/]+)\(\)')
"""A configurable in a line of gin."""


@dataclasses.dataclass(frozen=True)
class LayerEffect:
    """The effect of the student's attention in one layer.

    Attributes:
        layer: its number, from 0.
        loss: nats per token of plain text that it costs.
        recall: nats per token of repeated passages that it costs.
    """

    layer: int
    loss: float
    recall: float

    @property
    def score(self) -> float:
        """Recall that the layer is worth per loss of plain text."""
        return self.recall / max(self.loss, LEAST_LOSS)


class PlantedText(NamedTuple):
    """Windows of text, [B, L].

    Attributes:
        plain: the text as it is.
        planted: with passages that stand a second time (`plant_passages`).
        told: True for each token that the first copy tells.
    """

    plain: np.ndarray
    planted: np.ndarray
    told: np.ndarray


def plant_passages(tokens_BxL: np.ndarray) -> PlantedText:
    """Repeats passages of the first half of each window in its second half."""
    rows, length = tokens_BxL.shape
    size, half = PASSAGE, length // 2
    places = range(half, length - size + 1, 2 * size)
    planted_BxL, told_BxL = tokens_BxL.copy(), np.zeros(tokens_BxL.shape, bool)
    draws = np.random.default_rng(0)
    for row in range(rows):
        sources = draws.permutation(np.arange(0, half - size + 1, size))
        for source, place in zip(sources, places, strict=False):
            planted_BxL[row, place : place + size] = tokens_BxL[row, source : source + size]
            told_BxL[row, place + CUE : place + size] = True
    return PlantedText(tokens_BxL, planted_BxL, told_BxL)


def read_planted(run: LoadedRun) -> PlantedText:
    """Reads windows of the evaluation split of a run, [B, L + 1]: at most `WINDOWS`, and `train.eval_tokens` tokens.

    Raises ConfigError if the split, the context or `train.eval_tokens` is too short, UnnamedError if the run has no
    data.
    """
    experiment, store = run.experiment, run.splits
    length, most = experiment.train.context_length, experiment.train.eval_tokens
    split = experiment.evaluate.split or experiment.data.eval_split
    if length < 4 * PASSAGE:
        raise ConfigError(f'train.context_length = {length}: must be at least {4 * PASSAGE} to measure recall')
    if most is not None and most < length:
        raise ConfigError(f'train.eval_tokens = {most}: a window has {length} tokens; take more')
    starts = lay_windows(store, split, length)[: WINDOWS if most is None else min(WINDOWS, most // length)]
    if not len(starts):
        raise ConfigError(f'evaluate.split = {split!r}: has fewer tokens than one window of {length}')
    return plant_passages(store.read_many(split, starts, length + 1).astype(np.int32))


def measure_layers(student: LoadedRun, teacher: LoadedRun, text: PlantedText) -> list[LayerEffect]:
    """Measures on a text the effect of the student's attention in each layer where it differs from the teacher's.

    Raises Diverged if a loss is not finite.
    """
    begin = student.data.text_begin(student.splits)

    @jax.jit
    def score(ours, theirs, windows_BxL, swapped_N):
        models = [(student.functions, ours), (teacher.functions, theirs)]
        function = functools.partial(score_swapped, swapped_N=swapped_N)
        inputs_BxL, targets_BxL, _ = next_token(windows_BxL, begin)
        return over_windows(function, models, None, inputs_BxL, targets_BxL)

    def measure(swapped_N: np.ndarray) -> tuple[float, float]:
        plain, recalled = (
            np.concatenate(
                [
                    score(student.weights, teacher.weights, jnp.asarray(windows_BxL[i : i + ROWS]), swapped_N)
                    for i in range(0, len(windows_BxL), ROWS)
                ]
            )
            for windows_BxL in (text.plain, text.planted)
        )
        if not (np.isfinite(plain).all() and np.isfinite(recalled).all()):
            which = f'student in layer {swapped_N.argmax()}' if swapped_N.any() else 'teacher alone'
            raise Diverged(f'the loss with attention of the {which} is not finite: {REMEDY}')
        return float(plain.mean()), float(recalled[text.told[:, 1:]].mean())

    config = student.functions.config
    depth = config.n_layers
    same = find_same_layers(teacher.functions, student.functions)
    with jax.set_mesh(student.mesh):
        loss, recall = measure(np.zeros(depth, bool))
        effects = []
        for layer in (i for i in range(depth) if config.find_layer(i)[0] not in same):
            one, other = measure(np.arange(depth) == layer)
            effects.append(LayerEffect(layer, one - loss, other - recall))
    return effects


def lay_windows(store: Store, split: str, length: int) -> np.ndarray:
    """Returns where adjacent windows of `length` tokens begin. None of them crosses from one store to the next."""
    parts = store.parts(split).values() if isinstance(store, Mixture) else [store]
    ends = np.cumsum([0, *(part.tokens(split) for part in parts)])
    return np.concatenate([np.arange(a, b - length, length) for a, b in itertools.pairwise(ends)])


def rank_layers(effects: Sequence[LayerEffect], ranking: str = 'recall_per_loss') -> list[LayerEffect]:
    """Returns the layers from the one that recall needs most; `ranking` is one of RANKINGS."""
    number = RANKINGS[ranking]
    return sorted(effects, key=lambda effect: (-number(effect), effect.layer))


def print_effects(effects: Sequence[LayerEffect], full: Sequence[int] = ()) -> None:
    """Prints a line per layer; the layers `full` keep the attention of the teacher."""
    print(f'{"layer":>5}  {"loss":>8}  {"recall":>8}  {"score":>8}')
    for effect in effects:
        kept = '  stays full' if effect.layer in full else ''
        print(f'{effect.layer:>5}  {effect.loss:>+8.4f}  {effect.recall:>+8.4f}  {effect.score:>8.2f}{kept}')


def write_pattern(student: LoadedRun, teacher: LoadedRun, full: Sequence[int]) -> str:
    """Returns the gin text of the student's pattern in which the layers `full` have the teacher's attention."""
    ours, theirs = student.experiment.model, teacher.experiment.model

    def state(mechanism: Attention) -> Attention:
        """Returns a mechanism that names the teacher's options where the student's are others."""
        names = [one.name for one in dataclasses.fields(mechanism) if getattr(mechanism, one.name) == MODEL]
        others = {name: value for name in names if (value := getattr(theirs.layer, name)) != getattr(ours.layer, name)}
        return dataclasses.replace(mechanism, **others)

    mechanisms = tuple(state(theirs.layers[i]) if i in full else ours.layers[i] for i in range(ours.n_layers))
    whole = dump(dataclasses.replace(student.experiment, model=dataclasses.replace(ours, attention=mechanisms)))
    lines = whole.splitlines()
    new = kept = [line for line in lines if line.startswith('model.attention = ')]
    titles: set[str] = set()
    while new:  # a mechanism may name configurables of its own, such as a rotary scaling
        named = {title for line in new for title in REFERENCE.findall(line)} - titles
        titles |= named
        new = [line for line in lines if line.partition('.')[0] in named]
        kept = kept + new
    return '\n'.join(kept) + '\n'


def choose_layers(
    run_dir: str, teacher_dir: str, count: int, ranking: str = 'recall_per_loss', gin_params: Sequence[str] = ()
) -> None:
    """Prints which layers of an aligned student keep the teacher's attention, and writes their pattern to the run.

    Args:
        run_dir: the student.
        teacher_dir: its teacher.
        count: the number of layers that stay full.
        ranking: one of RANKINGS.
        gin_params: change the configuration of the student, such as "data.path = '…'".

    Raises ConfigError if there are fewer layers to choose from, and the errors of `read_planted` and `measure_layers`.
    """
    student, teacher = open_run(run_dir, gin_params), open_run(teacher_dir)
    effects = measure_layers(student, teacher, read_planted(student))
    if count > len(effects):
        raise ConfigError(f'--choose {count}: the student differs from the teacher in {len(effects)} layers only')
    ranked = rank_layers(effects, ranking)
    full = sorted(effect.layer for effect in ranked[:count])
    print_effects(ranked, full)
    path = student.directory.path / 'pattern.gin'
    with writing(path):
        path.write_text(write_pattern(student, teacher, full))
    print(f'written to {path}')
