#!/usr/bin/env python3
"""Draws how alike a model of proteins treats amino acids, beside BLOSUM62 (Performer, Fig. 10).

    python configs/papers/performer/figures_7_to_10/amino_acids.py runs/real_proteins [--by queries] [--out amino_acids]

The description of an amino acid is the share of the weights that it receives in each head, over windows of the
evaluation split (Vig et al. 2021, "BERTology meets biology"). Two amino acids are as similar as the correlation of
their shares over the heads. With `--by queries` the shares are counted for each kind of asking amino acid apart, which
says more where a model has few heads. `--by embeddings` compares the input embeddings in their place. Weights come
from `Transformer.attention_weights`, so any mechanism will do. Negative weights count by their size.

The script draws both matrices, and prints their correlation over the 190 pairs of different amino acids. It also prints
how many of 10,000 random orders of the amino acids have a correlation as high (a Mantel test).
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import lm
from lm.data.tokenizers.amino_acids import AminoAcids
from lm.errors import ConfigError, LmError
from lm.inference.loaded_run import LoadedRun
from lm.plots import draw_matrices
from lm.text import make_markdown_table

LETTERS = 'ARNDCQEGHILKMFPSTWYV'
"""The order of BLOSUM62 as NCBI prints it."""
BLOSUM62 = """
 4 -1 -2 -2  0 -1 -1  0 -2 -1 -1 -1 -1 -2 -1  1  0 -3 -2  0
-1  5  0 -2 -3  1  0 -2  0 -3 -2  2 -1 -3 -2 -1 -1 -3 -2 -3
-2  0  6  1 -3  0  0  0  1 -3 -3  0 -2 -3 -2  1  0 -4 -2 -3
-2 -2  1  6 -3  0  2 -1 -1 -3 -4 -1 -3 -3 -1  0 -1 -4 -3 -3
 0 -3 -3 -3  9 -3 -4 -3 -3 -1 -1 -3 -1 -2 -3 -1 -1 -2 -2 -1
-1  1  0  0 -3  5  2 -2  0 -3 -2  1  0 -3 -1  0 -1 -2 -1 -2
-1  0  0  2 -4  2  5 -2  0 -3 -3  1 -2 -3 -1  0 -1 -3 -2 -2
 0 -2  0 -1 -3 -2 -2  6 -2 -4 -4 -2 -3 -3 -2  0 -2 -2 -3 -3
-2  0  1 -1 -3  0  0 -2  8 -3 -3 -1 -2 -1 -2 -1 -2 -2  2 -3
-1 -3 -3 -3 -1 -3 -3 -4 -3  4  2 -3  1  0 -3 -2 -1 -3 -1  3
-1 -2 -3 -4 -1 -2 -3 -4 -3  2  4 -2  2  0 -3 -2 -1 -2 -1  1
-1  2  0 -1 -3  1  1 -2 -1 -3 -2  5 -1 -3 -1  0 -1 -3 -2 -2
-1 -1 -2 -3 -1  0 -2 -3 -2  1  2 -1  5  0 -2 -1 -1 -1 -1  1
-2 -3 -3 -3 -2 -3 -3 -3 -1  0  0 -3  0  6 -4 -2 -2  1  3 -1
-1 -2 -2 -1 -3 -1 -1 -2 -2 -3 -3 -1 -2 -4  7 -1 -1 -4 -3 -2
 1 -1  1  0 -1  0  0  0 -1 -2 -2  0 -1 -2 -1  4  1 -3 -2 -2
 0 -1  0 -1 -1 -1 -1 -2 -2 -1 -1 -1 -1 -2 -1  1  5 -2 -2  0
-3 -3 -4 -4 -2 -2 -3 -2 -2 -3 -2 -3 -1  1 -4 -3 -2 11  2 -3
-2 -2 -2 -3 -2 -1 -2 -3  2 -1 -1 -2 -1  3 -3 -2 -2  2  7 -1
 0 -3 -3 -3 -1 -2 -2 -3 -3  3  1 -2  1 -1 -2 -2  0 -3 -1  4
"""
"""Henikoff and Henikoff (1992), half bits."""
SHUFFLES = 10_000
PAIRS = np.triu_indices(20, 1)


def blosum() -> np.ndarray:
    """Returns BLOSUM62 in the order of LETTERS [20, 20], normalized so that its diagonal is 1."""
    scores = np.array([row.split() for row in BLOSUM62.strip().splitlines()], float)
    sizes = np.sqrt(np.diag(scores))
    return scores / sizes / sizes[:, None]


def count_weights(run: LoadedRun, windows: int, batch: int = 8) -> np.ndarray:
    """Sums the sizes of the weights from each kind of token to each kind of amino acid.

    Returns:
        [heads of all layers, tokens of the vocabulary, 20], over so many windows of the evaluation split.
    """
    length, split = run.experiment.train.context_length, run.experiment.data.eval_split
    windows = min(windows, (run.splits.tokens(split) - 1) // length)
    if not windows:
        raise ConfigError(f'data.path: split {split!r} has no window of {length:,} tokens; take a larger one')
    kinds = [int(run.tokenizer.encode(letter)[0]) for letter in LETTERS]
    total = 0.0
    for first in range(0, windows, batch):
        starts = np.arange(first, min(first + batch, windows)) * length
        tokens_BxL = jnp.asarray(run.splits.read_many(split, starts, length)[:, :length], jnp.int32)
        queries = jax.nn.one_hot(tokens_BxL, run.store.vocab_size)
        keys = (tokens_BxL[..., None] == jnp.asarray(kinds)).astype(jnp.float32)
        layers = [
            jnp.einsum('bhij,biq,bjk->hqk', jnp.abs(weights_BxHxLxL), queries, keys)
            for weights_BxHxLxL in run.model.attention_weights(tokens_BxL)
        ]
        total = total + np.concatenate([np.asarray(layer, np.float64) for layer in layers])
    return np.asarray(total)


def compute_similarity(sums_HxVx20: np.ndarray, by: str) -> np.ndarray:
    """Returns the correlations [20, 20] of the shares of the weights that amino acids receive.

    Args:
        sums_HxVx20: of `count_weights`.
        by: 'heads', a share per head, or 'queries', a share per head and kind of token that asks.

    Raises ConfigError for a model of one head, whose shares have no correlation, and for amino acids that never occur.
    """
    if missing := [letter for letter, total in zip(LETTERS, sums_HxVx20.sum((0, 1)), strict=True) if not total]:
        raise ConfigError(f'the windows hold no {", ".join(missing)}; take more by --windows, or a larger split')
    sums = sums_HxVx20.sum(1) if by == 'heads' else sums_HxVx20.reshape(-1, 20)
    sums = sums[sums.sum(1) > 0]
    if len(sums) < 2:
        raise ConfigError('the model has one head, whose shares cannot be compared; pass --by queries')
    return np.corrcoef(sums / sums.sum(1, keepdims=True), rowvar=False)


def compare_embeddings(run: LoadedRun) -> np.ndarray:
    """Returns the cosines [20, 20] of the embeddings of amino acids, from which their mean is subtracted."""
    kinds = [int(run.tokenizer.encode(letter)[0]) for letter in LETTERS]
    x_20xD = np.asarray(run.model.embedding.embedding[...], np.float64)[kinds]
    x_20xD -= x_20xD.mean(0)
    x_20xD /= np.linalg.norm(x_20xD, axis=1, keepdims=True)
    return x_20xD @ x_20xD.T


def compare(similarity: np.ndarray, expected: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Returns the correlation of two similarities over all pairs, and the share of random orders with one as high."""
    rng = np.random.default_rng(seed)

    def correlate(order: np.ndarray) -> float:
        return float(np.corrcoef(similarity[np.ix_(order, order)][PAIRS], expected[PAIRS])[0, 1])

    found = correlate(np.arange(20))
    return found, float(np.mean([correlate(rng.permutation(20)) >= found for _ in range(SHUFFLES)]))


def list_pairs(similarity: np.ndarray, count: int = 6) -> str:
    """Lists the most similar pairs of amino acids."""
    best = np.argsort(-similarity[PAIRS])[:count]
    return ', '.join(f'{LETTERS[PAIRS[0][i]]}{LETTERS[PAIRS[1][i]]}' for i in best)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='a run directory, of a model of proteins')
    parser.add_argument('--windows', type=int, default=800, help='of the evaluation split; default: 800')
    parser.add_argument('--by', choices=('heads', 'queries', 'embeddings'), default='heads', help='what is compared')
    parser.add_argument('--out', default='amino_acids', help='the picture, without suffix; default: amino_acids')
    arguments = parser.parse_args()
    try:
        run = lm.load(arguments.run)
        if not isinstance(run.tokenizer, AminoAcids):
            raise ConfigError(f'{arguments.run}: reads no amino acids; name a run on data of @fasta()')
        if arguments.by == 'embeddings':
            similarity = compare_embeddings(run)
        else:
            similarity = compute_similarity(count_weights(run, arguments.windows), arguments.by)
    except LmError as error:
        print(f'amino_acids: {error}', file=sys.stderr)
        return error.exit_code
    found, share = compare(similarity, blosum())
    pictures = [('BLOSUM62, normalized', blosum()), (f'the model, by {arguments.by}', similarity)]
    draw_matrices(arguments.out, pictures, 2, LETTERS)
    rows = [[arguments.by, f'{found:.3f}', f'{share:.4f}', list_pairs(similarity)]]
    headings = ['similarity by', 'correlation with BLOSUM62', 'random orders as high', 'most similar pairs']
    print(make_markdown_table(rows, headings))
    print(f'drawn in {arguments.out}.png and {arguments.out}.pdf')
    return 0


if __name__ == '__main__':
    sys.exit(main())
