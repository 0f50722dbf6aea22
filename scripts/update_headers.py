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

LINE = re.compile(r'^# Hardware: (\S+) \(lm check: .*\)$', re.MULTILINE)


def describe(check: dict, steps: int) -> str:
    """Returns hours and memory, in words."""
    speed, memory = check['speed'], check['memory']
    hours, chips = speed['run_hours'], speed['run_chip_hours']
    time = f'{hours:.1f} hours' if hours >= 1 else f'{60 * hours:.1f} minutes'
    chips = f'{chips:,.0f}' if chips >= 10 else f'{chips:.1f}'
    return (
        f'at least {time}, {chips} chip-hours, for {steps:,} steps; '
        f'{memory["needed_gib"]:.1f} of {memory["limit_gib"]:.1f} GiB'
    )


def update(path: pathlib.Path) -> bool:
    """Writes the line if the step of this experiment fits its hardware. Returns whether it fits."""
    text = path.read_text()
    topology = LINE.search(text)[1]
    command = [sys.executable, '-m', 'lm.cli', 'check', '--json', '--gin_file', str(path), '--topology', topology]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f'{path}: {done.stderr.strip().splitlines()[-1]}', flush=True)
        return False
    found = json.loads(done.stdout)
    line = f'# Hardware: {topology} (lm check: {describe(found["checks"][0], found["plan"]["steps"])})'
    path.write_text(LINE.sub(lambda _: line, text))
    print(f'{path}: {line[2:]}', flush=True)
    return True


def main() -> int:
    paths = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(pathlib.Path('configs').rglob('*.gin'))
    fits = [update(path) for path in paths if LINE.search(path.read_text())]
    return 0 if all(fits) else 1


if __name__ == '__main__':
    sys.exit(main())
