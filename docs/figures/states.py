#!/usr/bin/env python3
"""Prints the decoding states of `small` models in MiB per sequence, as JSON: python docs/figures/states.py

The panel of step_and_state.json whose command this is holds its curves. Nothing is computed but shapes.
"""

import json

from flax import nnx

from lm.experiment import load
from lm.inference.decoding import state_bytes
from lm.model import build

LENGTHS = (2048, 8192, 32768, 131072)
FILES = {
    'softmax': ('models/small', 'attention/softmax'),
    'three gated delta per softmax': ('models/hybrid_small',),
    'three polysketch per softmax': ('models/small', 'attention/polysketch_and_softmax'),
    'polysketch': ('models/small', 'attention/polysketch'),
    'gated_linear': ('models/small', 'attention/gated_linear'),
}
"""The name of a curve → the gin files in configs/ that it stands for."""


def compute_curves() -> dict[str, list[float]]:
    """Returns the MiB of each model's state after `LENGTHS` tokens."""
    curves = {}
    for name, files in FILES.items():
        config = load([f'configs/{file}.gin' for file in files]).model
        model = nnx.eval_shape(lambda config=config: build(config, 0, 'bfloat16'))
        curves[name] = [round(state_bytes(model, length) / 2**20, 1) for length in LENGTHS]
    return curves


if __name__ == '__main__':
    print(json.dumps({'x': LENGTHS, 'curves': compute_curves()}, indent=2))
