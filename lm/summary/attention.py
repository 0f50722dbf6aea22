"""`lm inspect --attention`: what each head of a run weighs for a text, as a picture and a table.

The weights of every mechanism are what it makes of one-hot values (Choromanski et al. 2020, App. C.4 and Figs. 7 to 9),
so linear mechanisms, which never form them, are shown like softmax.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm import plots
from lm.errors import ConfigError
from lm.evaluation.finite import refuse_not_finite
from lm.experiment import Experiment
from lm.files import JsonObject
from lm.inference.loaded_run import LoadedRun, load_run
from lm.runs.records import to_json
from lm.text import print_table

MOST_TOKENS = 2048
"""A head then has 4M weights."""
MOST_LABELS = 128
"""Tokens that are written beside the matrices of one row in all; more could not be read."""

Head = tuple[int, int]
"""Layer and head, from 0."""


def show_attention(
    experiment: Experiment,
    run_dir: str,
    step: int | None,
    *,
    text: str,
    heads: Sequence[Head] | None = None,
    tokens: int | None = None,
    out: str = 'attention',
    as_json: bool = False,
) -> None:
    """Draws what each head weighs for `text` by the weights of a run at `step` (None: the newest); prints a table.

    Args:
        heads: the heads of the picture; None: all.
        tokens: only the first ones are drawn, with the weights that they have in the whole text; None: all.
        out: the picture, without a suffix.
        as_json: print JSON instead of the table.

    Raises ConfigError for a text that is too long, and for heads that the model does not have. Raises Diverged, which
    names the first layer, if weights are not finite.
    """
    plots.check_matplotlib()
    jax.config.update('jax_platforms', 'cpu')  # the accelerators of this machine may be busy with this very run
    model = experiment.model
    counts = [model.resolve(mechanism).dims.n_heads for mechanism in model.layers]
    for layer, head in heads or ():
        if layer >= len(counts):
            raise ConfigError(f'--heads {layer}-{head}: the model has the layers 0 to {len(counts) - 1}')
        if head >= counts[layer]:
            raise ConfigError(f'--heads {layer}-{head}: layer {layer} has the heads 0 to {counts[layer] - 1}')
    run = load_run(experiment, run_dir, step)
    # Every document of the training data follows this token.
    ids = np.concatenate([[run.begin_id], run.tokenizer.encode(text)]).astype(np.int32)
    if len(ids) > MOST_TOKENS:
        raise ConfigError(f'--attention: has {len(ids):,} tokens, more than {MOST_TOKENS:,}; give a shorter text')
    model.check_length(len(ids))
    drawn, measured = [], []
    for layer, weights_HxLxL in enumerate(weigh(run, ids)):
        if not np.isfinite(weights_HxLxL).all():
            refuse_not_finite(run.model, ids, f'what layer {layer} weighs')
        for head, weights_LxL in enumerate(weights_HxLxL):
            measured.append({'layer': layer, 'head': head} | describe(weights_LxL))
            if heads is None or (layer, head) in heads:
                shown = weights_LxL[:tokens, :tokens]
                drawn.append((f'{layer}-{head}, up to {shown.flat[np.abs(shown).argmax()]:.2g}', shown))
    labels = [run.tokenizer.piece(int(index)) for index in ids[:tokens]]
    # Rows are layers if all have the same number of heads.
    columns = min(len(drawn), max(counts) if heads is None else 4)
    beside = labels if columns * len(labels) <= MOST_LABELS else None
    title = f'weights of queries (down) for keys, layer-head, {run_dir} at step {run.step}'
    plots.draw_matrices(out, drawn, columns, beside, title)
    if as_json:
        print(to_json({'kind': 'attention', 'step': run.step, 'tokens': labels, 'heads': measured, 'picture': out}))
    else:
        print_heads(measured)
        print(f'{len(drawn)} heads are drawn in {out}.png and {out}.pdf')


def weigh(run: LoadedRun, ids: np.ndarray) -> Any:
    """Yields the weights of each layer [H, L, L] for token ids [L]."""
    with jax.set_mesh(run.mesh):
        for weights_1xHxLxL in run.model.attention_weights(jnp.asarray(ids)[None]):
            yield np.asarray(weights_1xHxLxL[0])


def describe(weights_LxL: np.ndarray) -> dict[str, float]:
    """Describes where a head looks, as means over the queries.

    Shares are of the sum of the absolute weights of a query. A query without a weight has none.
    """
    length = len(weights_LxL)
    size_LxL = np.abs(weights_LxL)
    sums_L = size_LxL.sum(1)
    seen = sums_L > 0
    share_LxL = size_LxL[seen] / sums_L[seen, None]
    queries = np.arange(length)
    distance_LxL = np.abs(queries[:, None] - queries)[seen]

    def sum_shares(chosen_LxL: np.ndarray) -> float:
        return float((share_LxL * chosen_LxL).sum(1).mean()) if seen.any() else 0.0

    return {
        'own': sum_shares(distance_LxL == 0),
        'neighbours': sum_shares(distance_LxL == 1),
        'first': sum_shares(np.broadcast_to(queries == 0, (length, length))[seen]),
        'distance': sum_shares(distance_LxL),
        'negative': sum_shares(weights_LxL[seen] < 0),
        'sum': float(weights_LxL.sum(1).mean()),
    }


def print_heads(measured: Sequence[JsonObject]) -> None:
    """Prints where each head looks."""
    headings = 'layer', 'head', 'own token', 'neighbours', 'first token', 'distance', 'negative', 'sum of a query'
    rows = []
    for row in measured:
        shares = (f'{100 * row[name]:.1f} %' for name in ('own', 'neighbours', 'first'))
        rest = (f'{row["distance"]:.1f}', f'{100 * row["negative"]:.1f} %', f'{row["sum"]:.3g}')
        rows.append((str(row['layer']), str(row['head']), *shares, *rest))
    print_table(headings, rows, title='shares of the weights, and their mean distance in tokens')
