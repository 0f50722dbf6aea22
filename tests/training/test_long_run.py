"""What must not grow in a run of many steps."""

import json
import pathlib
import time

import pytest
import tiny


def resident(process) -> int:
    """Bytes of memory that a process holds."""
    [line] = [x for x in pathlib.Path(f'/proc/{process.pid}/status').read_text().splitlines() if x.startswith('VmRSS')]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_steps_need_no_more_memory_than_two_thousand(tiny_flags, tmp_path):
    run = tmp_path / 'run'
    changes = {
        'train.steps': 10_000,
        'train.log_every': 10,
        'train.eval_every': 1000,
        'checkpoint.save_every_steps': 500,
    }
    process = tiny.start('train', '--run_dir', str(run), *tiny_flags, *tiny.params(changes))
    sizes = {}
    while process.poll() is None:
        lines = (run / 'metrics.jsonl').read_text().splitlines() if (run / 'metrics.jsonl').exists() else []
        step = json.loads(lines[-2])['step'] if len(lines) > 1 else 0
        if step >= 2000 * (len(sizes) + 1):
            sizes[step] = resident(process)
        time.sleep(0.05)
    output = process.stdout.read()
    assert process.returncode == 0, output
    assert len(sizes) >= 4, sizes
    first, *others = sizes.values()
    assert max(others) < 1.1 * first, sizes
