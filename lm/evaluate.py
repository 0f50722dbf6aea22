"""Perplexity of a split: every token counted once, padding never, sums in float64 on the host.

The stream of a split is its documents with their end-of-document tokens; one more end-of-document token stands before
the first token, so that every token of the split is predicted. Results do not depend on batch size, devices or hosts.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.checkpoint import Checkpointer
from lm.config_text import dump
from lm.configurable import configurable, field
from lm.data.store import TokenStore
from lm.errors import ConfigError, MismatchError
from lm.mesh import batch_sharding, initialize_distributed, make_mesh, place, replicated
from lm.metrics import perplexity
from lm.run_dir import RunDir, config_differences
from lm.step import State, Step
from lm.tasks import TaskStore
from lm.tasks.evaluator import TaskEvaluator

if TYPE_CHECKING:
    from lm.experiment import Experiment


def _check_window(window: str) -> str | None:
    if window == 'disjoint':
        return None
    kind, _, stride = window.partition(':')
    if kind == 'sliding' and stride.isdigit() and int(stride) > 0:
        return None
    return "must be 'disjoint' or 'sliding:STRIDE', such as 'sliding:512'"


@configurable('evaluate')
class EvaluateConfig:
    """Which tokens are scored and with how much context."""

    split: str | None = field(None, help='None: data.eval_split')
    context_length: int | None = field(None, minimum=1, help='None: train.context_length')
    window: str = field('disjoint', check=_check_window, help="'disjoint' or 'sliding:STRIDE'")
    batch_size: int = field(8, minimum=1, help='windows at a time, rounded up to a multiple of the devices')


@dataclasses.dataclass(frozen=True)
class EvaluationWindows:
    """Windows over the n tokens of a split. Window i starts at i·stride; after the first, only its last `stride`
    targets are scored, so that each token is scored once, with at least context_length - stride tokens before it."""

    n_tokens: int
    context_length: int
    stride: int

    @classmethod
    def create(cls, n_tokens: int, context_length: int, window: str) -> 'EvaluationWindows':
        """Raises ConfigError when the context is longer than the split or the stride longer than the context."""
        if context_length > n_tokens:
            raise ConfigError(
                f'evaluate.context_length = {context_length}: the split has only {n_tokens} tokens; shorten the context'
            )
        stride = context_length if window == 'disjoint' else int(window.partition(':')[2])
        if stride > context_length:
            raise ConfigError(f"evaluate.window = '{window}': the stride must be at most the context, {context_length}")
        return cls(n_tokens, context_length, stride)

    def __len__(self) -> int:
        return 1 + max(0, math.ceil((self.n_tokens - self.context_length) / self.stride))

    def batch(self, store: TokenStore, split: str, eod: int, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows first, …, first+size-1: (token ids [size, L+1], bool [size, L] of the targets that are scored)."""
        L, n = self.context_length, self.n_tokens
        tokens = np.full((size, L + 1), eod, np.int32)
        scored = np.zeros((size, L), bool)
        starts = [i * self.stride for i in range(first, min(first + size, len(self)))]
        inner = [row for row, start in enumerate(starts) if start > 0 and start + L <= n]
        if inner:
            tokens[inner] = store.read_many(split, np.array([starts[row] - 1 for row in inner]), L + 1)
        for row, start in enumerate(starts):
            if row not in inner:  # the first window, which an end-of-document token opens, and the last, which is short
                text = store.read(split, max(start - 1, 0), min(start + L, n))
                offset = 1 if start == 0 else 0
                tokens[row, offset : offset + len(text)] = text
            scored[row, L - self.stride if start else 0 : min(L, n - start)] = True
        return tokens, scored


class Evaluator:
    """Scores splits with the weights of a model; compiled once, used at every evaluation of a training run."""

    def __init__(
        self, step: Step, mesh: Mesh, store: TokenStore, config: EvaluateConfig, split: str, context_length: int
    ):
        self.store, self.split, self.config, self.mesh = store, split, config, mesh
        self.windows = EvaluationWindows.create(store.tokens(split), context_length, config.window)
        devices = mesh.size
        self.batch_size = math.ceil(config.batch_size / devices) * devices
        self._sharding = batch_sharding(mesh)

        def nats(weights, tokens_BxL):
            return step.nats(weights, tokens_BxL[:, :-1], tokens_BxL[:, 1:])

        self._nats = jax.jit(nats, out_shardings=replicated(mesh))

    def __call__(self, weights: Any, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict | None:
        """The result as a dict of plain numbers (see `summarize`), or None when `should_stop` said so."""
        L = self.windows.context_length
        nats, tokens = np.zeros(L, np.float64), np.zeros(L, np.int64)
        for nats_BxL, scored_BxL in self._scores(weights):
            nats += np.where(scored_BxL, nats_BxL.astype(np.float64), 0.0).sum(axis=0)
            tokens += scored_BxL.sum(axis=0)
            if should_stop():
                return None
        return summarize(nats, tokens, self.store, self.split) | {
            'split': self.split,
            'context_length': L,
            'window': self.config.window,
            'step': step,
        }

    def describe(self, result: dict) -> str:
        """The result in one line."""
        return (
            f'loss {result["loss"]:.4f}  perplexity {result["perplexity"]:.3f}'
            f'  per word {result["word_perplexity"]:.3f}  bits per byte {result["bits_per_byte"]:.4f}'
        )

    def _scores(self, weights) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(nats [B, L], scored [B, L]) of each batch, fetched one batch late so that the devices never wait."""
        eod = self.store.tokenizer().eod_id
        pending = None
        with jax.set_mesh(self.mesh):
            for first in range(0, len(self.windows), self.batch_size):
                tokens, scored = self.windows.batch(self.store, self.split, eod, first, self.batch_size)
                array = jax.make_array_from_callback(tokens.shape, self._sharding, tokens.__getitem__)
                nats = self._nats(weights, array)
                if pending:
                    yield np.asarray(pending[0]), pending[1]
                pending = nats, scored
        yield np.asarray(pending[0]), pending[1]


def make_evaluator(
    experiment: 'Experiment', step: Step, mesh: Mesh, store: TokenStore | TaskStore
) -> Evaluator | TaskEvaluator:
    """What measures the weights of a run: perplexity on text, accuracy on a task."""
    config, task = experiment.evaluate, experiment.data.task
    split = config.split or experiment.data.eval_split
    context_length = config.context_length or experiment.train.context_length
    if task:
        return TaskEvaluator(step, mesh, task, split, context_length, config.window, config.batch_size)
    return Evaluator(step, mesh, store, config, split, context_length)


def summarize(nats_L: np.ndarray, tokens_L: np.ndarray, store: TokenStore, split: str) -> dict:
    """The reported figures from sums over each position of the context.

    Word-level perplexity divides by the words of the text (PG-19's published counts on its full splits), bits per byte
    by its bytes: both can be compared across tokenizers, perplexity per token cannot.
    """
    n_bytes, n_words = store.bytes(split), store.words(split)
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
        'bytes': n_bytes,
        'words': n_words,
        'documents': store.documents(split),
        'loss': sum_nats / n_tokens,
        'perplexity': perplexity(sum_nats / n_tokens),
        'word_perplexity': perplexity(sum_nats / n_words),
        'bits_per_byte': sum_nats / math.log(2) / n_bytes,
        'loss_by_position': positions,
        'tokenizer_sha256': store.info['tokenizer']['sha256'],
    }


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """What a checkpoint of a run needs to be used: its functions, weights (params and buffers), data and devices."""

    directory: RunDir
    store: TokenStore | TaskStore
    mesh: Mesh
    step: Step
    weights: State
    at: int


def load_run(experiment: 'Experiment', arguments: Any) -> LoadedRun:
    """The weights of `arguments.run_dir` at `arguments.step` (None: the newest), laid out on all devices.

    Raises MismatchError where the checkpoint does not fit the model or was trained with another tokenizer.
    """
    initialize_distributed(
        experiment.mesh, arguments.coordinator_address, arguments.process_count, arguments.process_id
    )
    store = experiment.data.open(experiment.train.context_length)
    mesh = make_mesh(experiment.mesh)
    directory = RunDir(arguments.run_dir)
    with jax.set_mesh(mesh):
        step = Step(experiment.model, experiment.optimizer, experiment.train.steps)
        abstract = jax.eval_shape(lambda: step.init(0))
    abstract = place({name: abstract[name] for name in ('params', 'buffers')}, mesh)
    # Other data may be scored, but only tokens of the same kind.
    tokenizer = {name: value for name, value in store.fingerprints.items() if name == 'tokenizer'}
    with Checkpointer(directory.checkpoints, experiment.checkpoint, tokenizer) as saved:
        restored = saved.restore(abstract, step=arguments.step)
    if restored is None:
        raise MismatchError(f'--run_dir {arguments.run_dir}: holds no checkpoint; train it first with lm train')
    return LoadedRun(directory, store, mesh, step, restored[0], restored[1])


def main(experiment: 'Experiment', arguments: Any) -> int:
    """`lm evaluate`: scores a split with the weights of a run, prints a table and writes evaluations/*.json."""
    run = load_run(experiment, arguments)
    evaluator = make_evaluator(experiment, run.step, run.mesh, run.store)
    result = evaluator(run.weights, run.at)
    if jax.process_index() == 0:
        # A model that is run otherwise than it was trained, or other data, has a file of its own.
        differences = config_differences(run.directory.config.read_text(), dump(experiment))
        changes = {name: new for name, _, new in differences if not name.startswith(('evaluate.', 'mesh.'))}
        result['overrides'] = changes
        parts = [f'step-{run.at}', result['split'], str(result['context_length'])]
        parts += [experiment.evaluate.window.replace(':', '-')]
        parts += [hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:8]] if changes else []
        path = run.directory.evaluations / ('_'.join(parts) + '.json')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + '\n')
        if arguments.json:
            print(json.dumps(result, indent=2))
        elif experiment.data.task:
            print(f'{result["split"]} at step {result["step"]}: {evaluator.describe(result)}\nwritten to {path}')
        else:
            print_table(result, str(path))
    return 0


def print_table(result: dict, path: str) -> None:
    """The result for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f'{result["split"]} at step {result["step"]}', show_header=False, title_justify='left')
    rows = {
        'perplexity per token': f'{result["perplexity"]:.4f}',
        'perplexity per word': f'{result["word_perplexity"]:.4f}',
        'bits per byte': f'{result["bits_per_byte"]:.5f}',
        'nats in total': f'{result["sum_nats"]:.3f}',
        'tokens scored': f'{result["tokens"]:,}',
        'words / bytes / documents': f'{result["words"]:,} / {result["bytes"]:,} / {result["documents"]:,}',
        'context / window': f'{result["context_length"]} / {result["window"]}',
        'tokenizer': result['tokenizer_sha256'][:16],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    by_position = Table(title='loss by position in the context', title_justify='left')
    for heading in ('positions', 'loss', 'perplexity'):
        by_position.add_column(heading, justify='right')
    for bucket in result['loss_by_position']:
        by_position.add_row(
            f'{bucket["start"]}–{bucket["end"] - 1}', f'{bucket["loss"]:.4f}', f'{perplexity(bucket["loss"]):.2f}'
        )
    console = Console()
    console.print(table)
    console.print(by_position)
    console.print(f'written to {path}', soft_wrap=True)
