"""The proof of weights: the logits of a fixed prompt. An import keeps them, and exports and further imports compute
them again.

The prompt depends on the size of the vocabulary alone. A proof holds a part of the logits of each token.
"""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.errors import MismatchError, writing
from lm.files import AnyPath, parse_json_object, write_atomically
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions

FILE = 'proof.json'
TOKENS, KEPT = 16, 64
"""The tokens of the prompt, and the logits per token that a proof holds."""
TOLERANCE = 1e-4
"""The share of the largest logit by which two computations of equal weights may differ."""


class Proof(NamedTuple):
    """The logits [tokens, kept] of the tokens `ids`, which are spread over the vocabulary, behind each token of the
    prompt."""

    prompt: list[int]
    ids: list[int]
    logits: np.ndarray

    def write(self, folder: AnyPath) -> None:
        """Writes proof.json. Raises LmError where that fails."""
        entries = {'prompt': self.prompt, 'ids': self.ids, 'logits': self.logits.tolist()}
        with writing(folder / FILE):
            write_atomically(folder / FILE, json.dumps(entries))

    def compare(self, other: 'Proof', what: str) -> str:
        """Returns a line on the difference of two proofs; `what` names the other one.

        Raises MismatchError if they are of different models.
        """
        if (self.prompt, self.ids) != (other.prompt, other.ids):
            raise MismatchError(f'{FILE} of {what}: is of another vocabulary; delete it, and prove those weights again')
        difference = float(np.abs(self.logits - other.logits).max() / np.abs(other.logits).max())
        said = f'the logits of the fixed prompt differ by {difference:.1e} of the largest from the logits of {what}'
        if not difference <= TOLERANCE:
            raise MismatchError(f'{said}, more than {TOLERANCE:g}: these are other weights; do not use them')
        return said


def compute_proof(model: ModelConfig, weights: object) -> Proof:
    """Computes the proof of weights in float32."""
    functions = ModelFunctions(model, jnp.float32)
    prompt = np.arange(1, 1 + min(TOKENS, model.learned_positions or TOKENS)) * 7919 % model.vocab_size
    ids = np.linspace(0, model.vocab_size - 1, min(KEPT, model.vocab_size)).astype(int)
    logits = jax.jit(lambda weights, tokens: functions.merge(weights)(tokens)[0][:, ids])(weights, prompt[None])
    return Proof(prompt.tolist(), ids.tolist(), np.asarray(logits))


def read_proof(folder: AnyPath) -> Proof | None:
    """Reads proof.json of a run or an export; None: there is none. Raises MismatchError if it is damaged."""
    try:
        found = parse_json_object((folder / FILE).read_bytes())
        prompt, ids, logits = (np.asarray(found[name]) for name in ('prompt', 'ids', 'logits'))
        if logits.shape != (len(prompt), len(ids)):
            raise ValueError
        return Proof(prompt.tolist(), ids.tolist(), logits.astype(np.float32))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise MismatchError(f'{folder / FILE}: is damaged; delete it, and prove the weights again') from None
