"""Proportionate versions of an experiment: all lengths are divided by one number (configs/papers/scales.toml)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm.config.text import dump, format_value
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.runs.config_diff import parse_bindings

LENGTHS = (
    *('train.context_length', 'model.d_model', 'model.head_dim', 'model.hidden_dim', 'model.vocab_size'),
    'tokenizer.vocab_size',
)
LENGTHS_OF_PARTS = ('block', 'sketch_size', 'window', 'feature_dim')
"""Fields of mechanisms that are lengths, too."""
PRODUCTS_OF_PARTS = ('n_features',)
"""Fields that count products of two lengths: r² products of a sketch, and as many random features per head size."""
OWN_DATA = 'data/reproduce'
"""Stores of smaller scales lie here, one per text and vocabulary."""
OF_A_SMALL_RUN = {
    'checkpoint.keep_last': 1,
    'checkpoint.save_every_minutes': None,
    'checkpoint.save_every_steps': 100,
    'data.eval_split': 'validation',
    'evaluate.batch_size': 32,
    'model.remat': 'none',
    'train.eval_every': None,
    'train.eval_tokens': 131_072,
    'train.tensorboard': False,
}
"""Settings of a run on a laptop that change no weight, and the split that every text has."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """A scale.

    Attributes:
        settings: binding → value, of steps and tokens.
        text: a folder of text files; None: the Python sources that every machine has.
    """

    name: str
    divisor: int
    settings: Mapping[str, Any]
    text: str | None = None

    def shrink(self, experiment: Experiment) -> Experiment:
        """Returns the experiment at this scale. Raises ConfigError for a length that the divisor does not divide."""
        bindings = parse_bindings(dump(experiment))
        changed = {name: self._divide(name, text) for name, text in bindings.items()}
        # The source of the paper goes with all its bindings.
        source = changed['prepare.source'].strip('@()')
        changed = {name: text for name, text in changed.items() if not name.startswith(f'{source}.')}
        changed['prepare.source'] = '@text_files()' if self.text else '@python_sources()'
        if self.text:
            changed['text_files.path'] = repr(self.text)
        steps = self.settings['train.steps']
        share = experiment.optimizer.warmup_steps / experiment.train.steps
        given = {
            'data.path': f'{OWN_DATA}/{Path(self.text).name if self.text else "python"}_{changed["model.vocab_size"]}',
            'optimizer.peak_learning_rate': experiment.optimizer.peak_learning_rate * self.divisor,
            'optimizer.warmup_steps': max(1, round(share * steps)),
            **OF_A_SMALL_RUN,
            **self.settings,
        }
        changed |= {name: format_value(value) for name, value in given.items()}
        return load((), [f'{name} = {text}' for name, text in changed.items()])

    def _divide(self, name: str, text: str) -> str:
        part = name.rpartition('.')[2]
        power = 1 if name in LENGTHS or part in LENGTHS_OF_PARTS else 2 if part in PRODUCTS_OF_PARTS else 0
        if not power or not text.isdigit():
            return text
        number, rest = divmod(int(text), self.divisor**power)
        if rest or not number:
            raise ConfigError(
                f'{name} = {text}: is no multiple of {self.divisor**power}, so --scale {self.name} has none'
            )
        return str(number)
