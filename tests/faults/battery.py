"""The battery of faults; scripts/test_faults.sh runs and explains it."""

import argparse
import logging
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import faults_of_data as data
import faults_of_runs as runs
from attacks import ATTACKS
from draws import FAULTS, Results, random_battery
from restarts import many_restarts
from tally import Tally, table
from workshop import Workshop

BATTERY: dict[str, Callable[[Workshop, Tally], None]] = {
    'sigkill': runs.sigkill,
    'sigterm': runs.told_to_stop,
    'devices': runs.other_devices,
    'hosts': data.data_hosts,
    'processes': runs.processes,
    'flips': runs.flipped_bits,
    'files': runs.bad_files,
    'disk': runs.full_disk,
    'last-save': runs.last_save,
    'nan': runs.not_finite,
    'rewind': runs.rewind,
    'records': data.poisoned_records,
    'order': data.data_order,
    'dying-host': runs.dying_host,
    'perplexity': data.perplexity,
    'hostile': data.hostile,
    'mismatch': runs.mismatch,
    'imports': data.imports,
    'pickle': data.no_pickle,
    'scripts': data.launch_scripts,
}


def fixed_battery(shop: Workshop, names: list[str], say: Callable[[str], None]) -> list[Tally]:
    rows = []
    for name in names:
        row, begin = Tally(name), time.monotonic()
        with row.attempt(name, count=0):
            BATTERY[name](shop, row)
        rows.append(row)
        for failure in row.failures:
            say(f'failed: {failure.splitlines()[0]}')
        say(f'{name}: {row.survived} of {row.tries}, {time.monotonic() - begin:.0f} s')
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog='scripts/test_faults.sh', add_help=False)
    parser.add_argument('names', nargs='*', choices=[[], *BATTERY])
    parser.add_argument('--random', type=int, metavar='N')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--restarts', type=int, metavar='N')
    parser.add_argument('--attacks', action='store_true')
    parser.add_argument('--only', type=int, metavar='I')
    parser.add_argument('--jobs', type=int, default=2, metavar='N')
    parser.add_argument('--results', type=pathlib.Path, metavar='FILE')
    parser.add_argument('--folder', type=pathlib.Path)
    options = parser.parse_args(arguments)
    logging.getLogger('lm').setLevel(logging.ERROR)  # a damaged step is no news here
    with tempfile.TemporaryDirectory(prefix='lm_faults.') as temporary:
        folder = options.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        shop = Workshop(folder.resolve())

        def say(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        if options.restarts is not None:
            rows = [many_restarts(shop, options.restarts, options.seed, say, options.results)]
        elif options.random is not None or options.only is not None:
            numbers = [options.only] if options.only is not None else list(range(options.random))
            kinds = FAULTS | ATTACKS if options.attacks else FAULTS
            rows = random_battery(shop, Results(options.seed, options.results, kinds), numbers, say, options.jobs)
        else:
            rows = fixed_battery(shop, options.names or list(BATTERY), say)
            if not options.names:
                rows.append(Tally('the same on a bucket', why_not='no real bucket can be had here'))
    print(table(rows))
    failures = [f'{row.fault}: {failure}' for row in rows for failure in row.failures]
    for failure in failures:
        print(f'\n{failure}')
    return bool(failures)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
