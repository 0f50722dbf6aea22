#!/usr/bin/env python3
"""Fills the line `# Hardware: …` in the headers of experiments with what `lm check` computes for that accelerator type.

    python scripts/update_headers.py [configs/papers/polysketchformer/table_1_c4/large.gin …]

Without arguments it reads every gin file below configs/. Files without such a line do not change. The others take a
minute or two each. If a step does not fit, its file does not change. Its name is printed with the bindings that make it
fit, and the exit code is 1.
"""

import json
import pathlib
import re
import subprocess
import sys

LINE = re.compile(r'^# Hardware: (\S+) \(lm check: (?!.*so small a step).*\)$', re.MULTILINE)
"""The topology of the line. A step that is bound by latency has no hours, and its line stays."""


def describe(check: dict, steps: int) -> str:
    """Returns hours and memory, in words: the bound, and the prediction where there is one."""
    memory, least, predicted = check['memory'], check['speed'], check.get('predicted')
    time = f'at least {_format_hours(least["run_hours"])}'
    if predicted:
        time += f', predicted {_format_hours(predicted["run_hours"])}'
    chips = (predicted or least)['run_chip_hours']
    chips = f'{chips:,.0f}' if chips >= 10 else f'{chips:.1f}'
    return (
        f'{time}, {chips} chip-hours, for {steps:,} steps; {memory["needed_gib"]:.1f} of {memory["limit_gib"]:.1f} GiB'
    )


def _format_hours(hours: float) -> str:
    return f'{hours:.1f} hours' if hours >= 1 else f'{60 * hours:.1f} minutes'


def read_line(path: pathlib.Path) -> str | None:
    """Returns the line of a file; None: it has none."""
    found = LINE.search(path.read_text())
    return found and found[0]


def compute_line(path: pathlib.Path) -> str:
    """Returns the line of a file as `lm check` computes it.

    Raises RuntimeError, with the last line of `lm check`, if the step does not fit its hardware.
    """
    topology = LINE.search(path.read_text())[1]
    command = [sys.executable, '-m', 'lm.cli', 'check', '--json', '--gin_file', str(path), '--topology', topology]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found = json.loads(done.stdout)
    return f'# Hardware: {topology} (lm check: {describe(found["checks"][0], found["plan"]["steps"])})'


def update(path: pathlib.Path) -> bool:
    """Writes the line if the step of this experiment fits its hardware. Returns whether it fits."""
    try:
        line = compute_line(path)
    except RuntimeError as error:
        print(f'{path}: {error}', flush=True)
        return False
    path.write_text(LINE.sub(lambda _: line, path.read_text()))
    print(f'{path}: {line[2:]}', flush=True)
    return True


def main() -> int:
    paths = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(pathlib.Path('configs').rglob('*.gin'))
    fits = [update(path) for path in paths if read_line(path)]
    return 0 if all(fits) else 1


if __name__ == '__main__':
    sys.exit(main())
