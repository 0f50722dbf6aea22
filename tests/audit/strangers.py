"""Loads single files of other packages: the packages need GPU compilers and more, these files need PyTorch."""

import functools
import importlib.util
import pathlib
import sys
from types import ModuleType

import torch
from packaging.version import parse
from torch.nn import functional as F


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-5)


STAND_INS = {
    'fla': {
        'fla': {'__path__': []},
        'fla.modules': {'__path__': []},
        'fla.modules.activations': {
            'fast_gelu_impl': lambda x: F.gelu(x, approximate='tanh'),
            'sigmoid': torch.sigmoid,
            'sqrelu': lambda x: torch.relu(x) ** 2,
            'swish': F.silu,
        },
        'fla.modules.layernorm': {'layer_norm': layer_norm},
        'fla.utils': {'checkpoint': lambda function: function},
    },
    'performer_pytorch': {
        'local_attention': {'LocalAttention': None},
        'axial_positional_embedding': {'AxialPositionalEmbedding': None},
        'performer_pytorch': {'__path__': []},
        'performer_pytorch.reversible': {'ReversibleSequence': None, 'SequentialSequence': None},
        'distutils': {'__path__': []},
        'distutils.version': {'LooseVersion': parse},
    },
}
"""Package → module → the names that its files import from there. PyTorch's own functions replace fused ones; names that
nothing here uses are empty."""


@functools.cache
def load(package: str, path: str) -> ModuleType:
    """Loads the file `path`.py of an installed package."""
    root = pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f'file_of_{package}_{path.replace("/", "_")}', root / f'{path}.py')
    module, before = importlib.util.module_from_spec(spec), dict(sys.modules)
    for name, contents in STAND_INS[package].items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in STAND_INS[package]:
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]
    return module


fla = functools.partial(load, 'fla')
feature_maps = functools.partial(load, 'fla', 'modules/feature_map')
performer = functools.partial(load, 'performer_pytorch', 'performer_pytorch')


def head_first(function):
    """Turns a function of [B, H, L, …] into a function of [B, L, H, …]."""
    return lambda *arrays, **options: function(*(x.transpose(1, 2) for x in arrays), **options).transpose(1, 2)


def mean(weighted):
    """Turns a function that sums weighted values into one that divides by the sum of weights."""

    def divided(q, k, v):
        ones = torch.ones((*v.shape[:-1], 1), dtype=v.dtype)
        both = weighted(q, k, torch.cat([v, ones], dim=-1))
        return both[..., :-1] / both[..., -1:]

    return divided
