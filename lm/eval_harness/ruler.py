"""RULER (Hsieh et al. 2024): the harness makes its texts itself, as long as the context of a run.

To measure their length, the harness has `transformers` load a tokenizer by name, and takes no object in its place.
`measured_by` answers with the run's tokenizer, of any kind. It changes a name in RULER's own module alone, until the
tasks are loaded: `transformers` stays as it is.
"""

import contextlib
import importlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError, MissingPackageError

COMMON = 'lm_eval.tasks.ruler.common_utils'
"""The module that all RULER tasks of the harness share."""
NEEDS_NOTHING = ('niah_single_1', 'niah_multikey_2', 'niah_multikey_3', 'ruler_vt', 'ruler_cwe', 'ruler_fwe')
"""The tasks made of installed data; the others need essays or questions from the hub."""
SENTENCE = 'The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n'
"""The filler of their texts; it determines the length of a token."""
SHORTEST, ANSWER = 2500, 128
"""Characters of the shortest texts, and tokens of the longest answer.

The example of variable tracking has 880 characters. It must fit into 500 tokens, with 30 for the answer: two characters
per token.
"""


class Measure:
    """A stand-in for `AutoTokenizer` and for the tokenizer that it loads, of which RULER asks for lengths alone."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def from_pretrained(self, name: str, **options: object) -> 'Measure':
        return self

    def __call__(self, text: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(input_ids=self._tokenizer.encode(text).tolist())


@contextlib.contextmanager
def measured_by(tokenizer: Tokenizer) -> Iterator[None]:
    """Gives `tokenizer` to RULER tasks that are loaded inside the block, under any name.

    Raises ConfigError if a package that they need is not installed.
    """
    try:
        common = importlib.import_module(COMMON)
        importlib.import_module('wonderwords')
    except ImportError as error:
        raise MissingPackageError('--tasks of RULER', str(error.name), 'harness') from None
    with mock.patch.object(common, 'AutoTokenizer', Measure(tokenizer)):
        yield


def check_fits(name: str, tokenizer: Tokenizer, length: int) -> None:
    """Raises ConfigError if the shortest text of a task has more than `length` tokens: some tasks would shorten it for
    ever."""
    rate = len(SENTENCE) / len(tokenizer.encode(SENTENCE))
    if rate < 2:
        raise ConfigError(
            f'--tasks {name}: the tokenizer of the run has {rate:.1f} characters a token of English, RULER needs 2; '
            'it is not for this run'
        )
    needed = int(SHORTEST / rate) + ANSWER
    if length < needed:
        raise ConfigError(
            f'--context_length {length}: too short for {name}, whose texts have at least {needed} tokens; give more'
        )


def check_answers(tasks: dict[str, Any], length: int) -> None:
    """Raises ConfigError if a task has nothing to find, because there was no room for it."""
    for name, task in tasks.items():
        if not all(task.dataset['test']['outputs']):
            raise ConfigError(f'--context_length {length}: too short for {name} with this tokenizer; give more')
