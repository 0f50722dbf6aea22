"""Perplexity of a split: every token counts once, padding never; sums are float64 on the host.

The stream of a split is its documents with their end-of-document tokens. One more end-of-document token stands before
the first token, so that every token of the split is predicted. Where a model has a token of its own before each text,
that one is the input in place of the end-of-document token (`lm.evaluation.conditioning`). Results do not depend on
batch size, devices or hosts.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from lm.data.mixture import Mixture
from lm.data.store import TokenStore
from lm.evaluation.chunks import compute_losses_in_chunks
from lm.evaluation.conditioning import FIELD as CONDITIONING
from lm.evaluation.conditioning import Conditioning
from lm.evaluation.plan import ScoredText, TextPlan
from lm.model.functions import ModelFunctions, Scored, Weights
from lm.ops.documents import Documents, TextBegin
from lm.pod.mesh import batch_sharding, replicated, round_up_rows
from lm.text import perplexity

LONG_WORDS = 1e9
"""Perplexities per word above this value are written as powers of ten."""


def make_scoring_program(
    functions: ModelFunctions,
    mesh: Mesh,
    documents: Documents | None = None,
    chunk: int | None = None,
    accuracy: bool = False,
    begin: TextBegin | None = None,
) -> Callable[[Weights, jax.Array], Scored]:
    """Makes the program (weights, tokens [B, L + 1]) → scores of the targets on all devices, compiled once per shape.

    Args:
        documents: the documents of a window do not see each other; None: a window is one document.
        chunk: a longer window is computed in parts of so many tokens (`lm.evaluation.chunks`).
        accuracy: also compute whether each target is the most probable token.
        begin: the token before a text; None: the tokens are the inputs as they are.
    """

    def score(weights: Weights, tokens_BxN: jax.Array) -> Scored:
        inputs_BxL = tokens_BxN[:, :-1] if begin is None else begin.make_inputs(tokens_BxN)
        targets_BxL = tokens_BxN[:, 1:]
        if chunk is not None and targets_BxL.shape[1] > chunk:
            return Scored(compute_losses_in_chunks(functions.merge(weights), inputs_BxL, targets_BxL, chunk, documents))
        return functions.score_targets(weights, inputs_BxL, targets_BxL, documents, accuracy)

    return jax.jit(score, out_shardings=replicated(mesh))


@dataclasses.dataclass(frozen=True)
class ScoredSums:
    """Sums of scores at each position of the context. They can be added.

    Attributes:
        nats_L: float64.
        tokens_L: the number of tokens, int64.
        right_L: the number of targets that were the most probable token; None: not computed.
        asked_V: how often each token was the target; None: not counted.
    """

    nats_L: np.ndarray
    tokens_L: np.ndarray
    right_L: np.ndarray | None = None
    asked_V: np.ndarray | None = None

    def __add__(self, other: 'ScoredSums') -> 'ScoredSums':
        def add(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
            return None if a is None or b is None else a + b

        nats_L, tokens_L = self.nats_L + other.nats_L, self.tokens_L + other.tokens_L
        return ScoredSums(nats_L, tokens_L, add(self.right_L, other.right_L), add(self.asked_V, other.asked_V))


def sum_over_windows(scored: Scored, targets_BxL: np.ndarray, store: TokenStore) -> ScoredSums:
    """Sums the scores of the targets that count, which are on the host, over windows of `store`."""
    counted_BxL = np.asarray(scored.counted)
    nats_L = np.where(counted_BxL, scored.nats.astype(np.float64), 0.0).sum(axis=0)
    if scored.correct is None:
        return ScoredSums(nats_L, counted_BxL.sum(axis=0))
    asked_V = np.bincount(targets_BxL[counted_BxL], minlength=store.vocab_size)
    return ScoredSums(nats_L, counted_BxL.sum(axis=0), (np.asarray(scored.correct) & counted_BxL).sum(axis=0), asked_V)


class Evaluator:
    """Scores a split with the weights of a model, at every evaluation of a training run.

    Evaluators share the compiled program.
    """

    def __init__(
        self,
        program: Callable[..., Scored],
        mesh: Mesh,
        text: ScoredText,
        plan: TextPlan,
        refuse: Callable[..., None] | None = None,
    ):
        """
        Args:
            program: from `make_scoring_program`; it computes the accuracy too if the text has a baseline.
            refuse: raises an error for losses that are not finite (`lm.evaluation.finite`); None: they are reported.
        """
        self.refuse = refuse
        self.program, self.mesh, self.text, self.plan = program, mesh, text, plan
        self.store, self.split, self.windows = text.store, text.split, text.windows
        self.batch_size = round_up_rows(plan.settings.config.batch_size, mesh)
        self._sharding = batch_sharding(mesh)

    @property
    def measure(self) -> str:
        """The name of the loss: losses of the same data are comparable if this name is the same."""
        windows, masked = self.windows, ' of single documents' if self.plan.documents else ''
        begin = f' ({self.conditioning})' if self.plan.begin else ''
        return (
            f'{windows.n_tokens} tokens of {self.split}, {windows.context_length} every {windows.stride}{masked}{begin}'
        )

    @property
    def conditioning(self) -> Conditioning:
        """The tokens that the scored tokens are conditioned on."""
        return Conditioning.of_windows(self.windows, self.plan.begin)

    def __call__(self, weights: Weights, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict | None:
        """Returns the result as a dict of plain numbers (see `summarize`), or None when `should_stop` returned True."""
        found = self.sum_scores(weights, should_stop)
        return None if found is None else self.result(found, step)

    def sum_scores(self, weights: Weights, should_stop: Callable[[], bool]) -> ScoredSums | None:
        """Sums the scores of all windows; returns None when `should_stop` returned True."""
        total = None
        for scored, tokens, first in self._score_batches(weights):
            sums = sum_over_windows(scored, self.targets(tokens), self.store)
            if self.refuse and not np.isfinite(sums.nats_L).all():
                row = int((scored.counted & ~np.isfinite(scored.nats)).any(axis=1).argmax())
                self.refuse(self.inputs(tokens, first)[row], f'the loss of {self.split!r}', self.plan.documents)
            total = sums if total is None else total + sums
            if should_stop():
                return None
        return total

    def result(self, sums: ScoredSums, step: int, store: TokenStore | Mixture | None = None) -> dict:
        """Returns the result of these sums for the split of `store` (None: the store of the text)."""
        facts: dict[str, object] = {'mask_documents': True} if self.plan.documents else {}
        if copied := (store or self.store).copied_share(self.split):
            facts['copied_share'] = copied
        return self.compute_figures(sums, store or self.store) | {
            'split': self.split,
            'context_length': self.windows.context_length,
            'window': self.plan.settings.config.window,
            CONDITIONING: self.conditioning.state(self.store.tokenizer(), self.plan.begin),
            **facts,
            'step': step,
        }

    def compute_figures(self, sums: ScoredSums, store: TokenStore | Mixture) -> dict:
        """Returns the reported figures of these sums."""
        found = summarize(sums.nats_L, sums.tokens_L, store, self.split)
        if self.text.baseline is None or sums.right_L is None or sums.asked_V is None:
            return found
        accuracy = {'accuracy': float(sums.right_L.sum() / sums.tokens_L.sum())}
        return found | accuracy | self.text.baseline.compute_figures(sums.asked_V)

    def describe(self, result: dict) -> str:
        """Describes the result in one line."""
        parts = [f'loss {result["loss"]:.4f}  perplexity {result["perplexity"]:.3f}']
        if 'word_perplexity' in result:
            parts.append(f'per word {format_word_perplexity(result, 3)}')
        if 'bits_per_byte' in result:
            parts.append(f'bits per byte {result["bits_per_byte"]:.4f}')
        if 'copied_share' in result:
            parts.append(f'{100 * result["copied_share"]:.3g} % of the text is a copy of training text')
        if 'baseline_accuracy' in result:
            baseline = f'{result["baseline_perplexity"]:.3f} and {100 * result["baseline_accuracy"]:.2f} %'
            parts.append(f'accuracy {100 * result["accuracy"]:.2f} %  (frequencies alone: {baseline})')
        return '  '.join(parts)

    def _score_batches(self, weights: Weights) -> Iterator[tuple[Scored, np.ndarray, int]]:
        """Yields the scores batch by batch, with the tokens of the windows and the number of the first one.

        The scores are on the host, and state which targets count. Each batch is fetched one batch late, so that the
        devices never wait.
        """
        eod = self.store.tokenizer().eod_id
        pending: list[Callable[[], tuple[Scored, np.ndarray, int]]] = []
        with jax.set_mesh(self.mesh):
            for first in range(0, len(self.windows), self.batch_size):
                tokens, counted = self.windows.batch(self.store, self.split, eod, first, self.batch_size)
                array = jax.make_array_from_callback(tokens.shape, self._sharding, tokens.__getitem__)
                scored = self.dispatch(weights, array, first)
                pending.append(functools.partial(self._fetch, scored, counted, tokens, first))
                if len(pending) > 1:
                    yield pending.pop(0)()
        for fetch in pending:
            yield fetch()

    def _fetch(self, scored: Scored, counted: np.ndarray, tokens: np.ndarray, first: int):
        """Returns the scores on the host; `counted` are the targets that no other window scores."""
        scored = jax.device_get(scored)
        own = counted if scored.counted is None else counted & scored.counted
        return scored._replace(counted=own), tokens, first

    def dispatch(self, weights: Weights, tokens: jax.Array, first: int) -> Scored:
        """Scores a batch whose first window is `first`."""
        return self.program(weights, tokens)

    def inputs(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Returns what the model reads of a batch whose first window is `first`, [B, L]."""
        return tokens[:, :-1]

    def targets(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the targets of a batch, [B, L]."""
        return tokens[:, 1:]


def format_word_perplexity(result: dict, digits: int) -> str:
    """Formats the perplexity per word: if a word is a whole protein, the figure can have a hundred digits."""
    value = result['word_perplexity']
    return f'{value:.{digits}f}' if value < LONG_WORDS else f'{value:.{digits}e}'


def summarize(nats_L: np.ndarray, tokens_L: np.ndarray, store: TokenStore | Mixture, split: str) -> dict:
    """Returns the reported figures from sums over each position of the context.

    Word-level perplexity divides by the words of the text (PG-19's published counts on its full splits), bits per byte
    by its bytes. Both are comparable across tokenizers; perplexity per token is not. They, and the counts of the text,
    are reported if every token of the split was scored.
    """
    sum_nats, n_tokens = float(nats_L.sum()), int(tokens_L.sum())
    positions = []
    start = 0
    while start < len(nats_L):
        end = min(max(1, 2 * start), len(nats_L))
        count = int(tokens_L[start:end].sum())
        if count:
            loss = float(nats_L[start:end].sum()) / count
            positions.append({'start': start, 'end': end, 'tokens': count, 'loss': loss})
        start = end
    return {
        'sum_nats': sum_nats,
        'tokens': n_tokens,
        'loss': sum_nats / n_tokens,
        'perplexity': perplexity(sum_nats / n_tokens),
        **(describe_text(sum_nats, store, split) if n_tokens == store.tokens(split) else {}),
        'loss_by_position': positions,
        'tokenizer_sha256': store.info['tokenizer']['sha256'],
    }


def describe_text(sum_nats: float, store: TokenStore | Mixture, split: str) -> dict:
    """Returns the figures that need the nats of a whole split. Text without words, such as white space, has none per
    word and byte. Images have none per word; their bits per byte are bits per dimension."""
    n_bytes, n_words = store.bytes(split), store.words(split)
    found: dict[str, object] = {'bytes': n_bytes, 'words': n_words, 'documents': store.documents(split)}
    if n_words:
        found['word_perplexity'] = perplexity(sum_nats / n_words)
    if n_words or not store.info['tokenizer'].get('holds_text', True):
        found['bits_per_byte'] = sum_nats / math.log(2) / n_bytes
    return found
