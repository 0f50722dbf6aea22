#!/usr/bin/env python
"""Compares random whole models with their formulas, in float64 and without a compiler.

    scripts/random_models.py 0 100             # models 0 to 99: a few processor seconds each.
    scripts/random_models.py 17 1 --no_shrink  # model 17, as it is drawn.

A number always draws the same model: mechanisms, options, experts, windows, documents, pieces, microbatches and devices
(`tests/random_models/drawer.py`). Checked are logits, causality, documents, decoding, loss and gradient. A model that
fails is shrunk, and printed as Python that makes it. The exit code is 1 if any model failed.
"""

import argparse
import gc
import os
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEVICES = '--xla_force_host_platform_device_count=8'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('first', type=int, help='the number of the first model')
    parser.add_argument('count', type=int, help='how many models')
    parser.add_argument('--no_shrink', action='store_true', help='print a model that fails as it was drawn')
    parser.add_argument('--small', action='store_true', help='models of one or two layers, as in the quick tests')
    arguments = parser.parse_args()
    if arguments.first < 0 or arguments.count < 1:
        parser.error(f'{arguments.first} {arguments.count}: FIRST must be at least 0, and COUNT at least 1')
    # Before JAX is imported.
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {DEVICES}'
    sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'random_models')]
    import jax
    from comparison import compare
    from drawer import draw_case
    from shrinking import describe, shrink

    gc.set_threshold(200_000, 50, 50)  # tracing makes many objects that live on
    failed = []
    for number in range(arguments.first, arguments.first + arguments.count):
        if number % 25 == 24:  # tracing keeps what it has seen
            jax.clear_caches()
        begin, case = time.process_time(), draw_case(number, small=arguments.small)
        failures = compare(case)
        layers = ', '.join(mechanism.gin_name for mechanism in case.model.layers)
        verdict = ' '.join(failure.check for failure in failures) or 'agrees'
        print(f'{number:6d}  {time.process_time() - begin:5.1f} s  {verdict:8}  {layers}', flush=True)
        if not failures:
            continue
        failed.append(number)
        first = failures[0]
        if not arguments.no_shrink:
            case = shrink(case, lambda smaller, first=first: any(map(first.is_like, compare(smaller, (first.check,)))))
        for name, found in compare(case, (first.check,)) or failures:
            print(f'        {name}: {found}')
        print(f'        {describe(case)}', flush=True)
    print(f'{arguments.count - len(failed)} of {arguments.count} models agree' + (f'; not {failed}' if failed else ''))
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
