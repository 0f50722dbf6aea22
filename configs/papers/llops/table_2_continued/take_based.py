#!/usr/bin/env python3
"""Writes the start of a LLoPS model that computes what a BASED run computes (LLoPS §3.3, and the method of Table 2).

    python configs/papers/llops/table_2_continued/take_based.py runs/based --run_dir runs/llops_start \
        --gin_file configs/papers/llops/table_2_continued/llops_small.gin [--set llops.degree=2]

Layers with Taylor features become LLoPS layers, whose projections are made of the compressions of queries and keys
(`lm.attention.llops.based_factors`). All other weights are copied. The new run has one checkpoint, at step 0, and
`train.init_from` names it. The gin files describe the model that continues; the BASED run says everything else.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

import lm
from lm.attention.llops import Llops, based_factors
from lm.attention.taylor import Taylor
from lm.checkpoint.checkpointer import Checkpointer
from lm.commands.flags import add_gin_flags
from lm.config.text import dump
from lm.errors import ConfigError, LmError
from lm.experiment import Experiment, load
from lm.model.functions import ModelFunctions
from lm.runs.run_dir import RunDir


def take(based: dict[str, Any], llops: dict[str, Any], config: Llops) -> dict[str, Any]:
    """Returns the projections of LLoPS layers with the map of BASED layers.

    Args:
        based: `q_weight` and `k_weight` [layers, 1, D, r].
        llops: initial projections [layers, factors, rank, D (+ 1), features], which features without effect keep.
    """
    pairs = (('q_factors', 'q_weight', True), ('k_factors', 'k_weight', False))
    return {
        factors: jax.vmap(lambda w, random, queries=queries: based_factors(config, w, random, queries=queries))(
            jnp.asarray(based[weight])[:, 0], llops[factors]
        )
        for factors, weight, queries in pairs
    }


def check(based: Experiment, given: Experiment) -> None:
    """Raises ConfigError unless Taylor layers of one compression per layer stand where LLoPS layers begin like them."""
    pairs = list(zip(based.model.pattern, given.model.pattern, strict=False))
    if len(based.model.pattern) != len(given.model.pattern) or not any(isinstance(one, Llops) for _, one in pairs):
        raise ConfigError('model.attention: put @llops() into the places of @taylor() in the pattern of the BASED run')
    for old, new in pairs:
        if not isinstance(new, Llops):
            if old != new:
                raise ConfigError(f'model.attention: has @{new.gin_name}() in place of @{old.gin_name}(); keep it')
            continue
        if not isinstance(old, Taylor) or old.feature_dim is None or old.per_head:
            raise ConfigError(f'model.attention: no @llops() begins as {old}; train with taylor.per_head = False')
        if new.init != 'based' or new.layer_norm or new.denominator_bias:
            raise ConfigError(
                "llops: begins as BASED only with init = 'based', layer_norm = False and denominator_bias = 0.0; "
                'set them'
            )


def write(run_name: str, new_name: str, gin_files: list[str], gin_params: list[str]) -> Experiment:
    """Writes the run `new_name`, and returns its configuration. Raises LmError where that is impossible."""
    run, new = lm.load(run_name), RunDir(new_name)
    given = load(gin_files, gin_params, base=str(run.directory.config))
    check(run.experiment, given)
    if new.path.exists():
        raise ConfigError(f'--run_dir {new_name}: is there already; name a new directory')
    functions = ModelFunctions(given.model, jnp.float32)
    weights = functions.init(given.train.seed)
    taken = _select(run.weights['params'], weights['params'])
    params = unflatten_dict(flatten_dict(weights['params'], keep_empty_nodes=True) | flatten_dict(taken))
    for i, config in enumerate(given.model.pattern):
        if isinstance(config, Llops):
            key = next(key for key in params['blocks'] if str(key) == str(i))
            old, ours = run.weights['params']['blocks'][key]['attention'], params['blocks'][key]['attention']
            params['blocks'][key]['attention'] = ours | take(old, ours, config)
    facts = {'parameters': sum(functions.count_parameters().values()), 'imported': run_name, **run.store.fingerprints}
    new.create_or_resume(given, facts)
    with Checkpointer(new.checkpoints, given.checkpoint, run.store.fingerprints, new.record_saved) as checkpointer:
        checkpointer.save(0, weights | {'params': params}, metadata={'config': dump(given)})
        checkpointer.wait()
    return given


def _select(taken: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the nested dict `taken` without names that `wanted` lacks."""
    return {
        name: _select(value, wanted[name]) if isinstance(value, dict) else value
        for name, value in taken.items()
        if name in wanted
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('run', help='a run of BASED')
    parser.add_argument('--run_dir', required=True, metavar='DIR', help='the new run')
    add_gin_flags(parser)
    arguments = parser.parse_args()
    try:
        write(arguments.run, arguments.run_dir, arguments.gin_file, arguments.gin_param)
    except LmError as error:
        print(f'take_based: {error}', file=sys.stderr)
        return error.exit_code
    print(f'written to {arguments.run_dir}: train.init_from names it')
    return 0


if __name__ == '__main__':
    sys.exit(main())
