"""More faults of random draws: wrong chips, strangers' files, absurd numbers, states in memory, plants of other users,
secrets, and work that hangs between two steps."""

import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable

from draws import BRAKE, STEPS, Draw, wait_until
from workshop import Session, files, logged, need, saved

from lm.checkpoint.shared_memory import SharedMemory

ABSURD = (
    *('optimizer.weight_decay=1e999', 'optimizer.clip_norm=1e-300', 'train.steps=3000000000', 'train.hang_minutes=-1'),
    *('mesh.heartbeat_seconds=1e999', 'checkpoint.save_every_minutes=1e-300', 'train.skip_batches=[(0, 2**63)]'),
    *('model.n_layers=0', 'train.tokens_per_step=1000000000000000000', 'optimizer.peak_learning_rate=1e300'),
)
KEPT = {'checkpoint__memory_every': 2}


def wrong_chip(d: Draw) -> Session:
    """A chip computes wrongly in a replay: 45, and another machine goes on."""
    return wrong(d, ('miscompute', str(d.draw.randint(0, 4))), train__replay_every=d.draw.choice([1, 2, 3]))


def wrong_copy(d: Draw) -> Session:
    """A bit flips in the memory of one device before a save: 45, where another device has a copy."""
    return wrong(d, ('spoil', str(d.draw.randint(0, 3))))


def wrong(d: Draw, launcher: tuple[str, ...], **changes) -> Session:
    session = d.start(launcher=launcher, **changes)
    session.end()
    codes = set(session.codes())
    need(codes <= {0} or (codes <= {45, 42} and 45 in codes), f'{session.codes()}:\n{session.output()}')
    need('Traceback' not in session.output(), session.output())
    if 45 in codes:
        found = json.loads((d.path / 'run.json').read_text())['differences']
        need(found, 'run.json has no difference')
    return session


def planted_file(d: Draw) -> Session:
    """Somebody else changes a file of the run: it is refused or repaired, and steers nothing."""
    session = d.stop()
    steps = saved(d.path)
    if not steps or steps[-1] == STEPS:
        return session
    what = d.draw.choice(['lock', 'metrics', 'chunk', 'record', 'info'])
    checkpoints = d.path / 'checkpoints'
    if what == 'lock':
        (d.path / 'lock.json').write_text(d.draw.choice(['{"host": 5, "pid": "x"}', '[' * 100_000, '']))
    elif what == 'metrics':
        with open(d.path / 'metrics.jsonl', 'a') as file:
            file.write(d.draw.choice(['{"kind": "train", "step": 999999', '[' * 100_000, '\x1b]0;x\x07']))
    elif what == 'info':
        path = d.path / 'run.json'
        path.write_text(path.read_text().replace('"started": "', '"note": "\\u001b[2J", "started": "'))
    else:
        path = checkpoints / str(steps[-1]) / 'metadata' / 'metadata'
        if what == 'record':
            path.write_text(d.draw.choice(['[' * 100_000, '{"leaves": 5}', 'null']))
        else:
            enlarge_chunks(d, checkpoints / str(steps[-1]))
    again = d.start()
    code = again.end()
    is_lost = what in ('chunk', 'record') and len(steps) == 1
    need(code in ((0, 44) if is_lost else (0,)), f'{again.codes()} after {what}:\n{again.output()}')
    need('Traceback' not in again.output() and '\x1b' not in again.output(), again.output())
    if code == 44:  # the owner starts the run again
        for path in sorted(d.path.rglob('*'), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    return again


def enlarge_chunks(d: Draw, step: pathlib.Path) -> None:
    """Flips bits in a file of the arrays' descriptions, so that sizes are others; a database keeps them compressed."""
    path = d.draw.choice([path for path in files(step.parent.parent, int(step.name)) if 'state' in path.parts])
    data = bytearray(path.read_bytes())
    for _ in range(4):
        if data:
            data[d.draw.randrange(len(data))] = 0xFF
    path.write_bytes(data)


def absurd_number(d: Draw) -> Session:
    """A number that no run can compute with: 2, by name, and not a byte is written."""
    session = d.stop()
    setting = d.draw.choice(ABSURD)
    before = contents(d.path)
    name = setting.partition('=')[0]
    found = d.start('--set', setting)
    found.end()
    need(set(found.codes()) == {2}, f'{found.codes()} for {setting}:\n{found.output()}')
    need(re.search(rf'{re.escape(name)}\b', found.output()), found.output())
    need('Traceback' not in found.output() and contents(d.path) == before, f'{setting} has written something')
    return session


def changed_digit(d: Draw) -> Session:
    """Somebody changes a digit of a line that a checkpoint has sealed: it is named, and the run goes on."""
    session = d.stop()
    path, steps = d.path / 'metrics.jsonl', saved(d.path)
    if not steps or steps[-1] == STEPS:
        return session
    intact = path.read_bytes()
    sealed = [line for line in intact.splitlines(keepends=True) if json.loads(line)['step'] <= steps[0]]
    which = d.draw.randrange(len(sealed))
    place = sum(map(len, sealed[:which])) + re.search(rb'"loss": \d', sealed[which]).end() - 1
    digit = d.draw.choice([n for n in b'0123456789' if n != intact[place]])
    path.write_bytes(intact[:place] + bytes([digit]) + intact[place + 1 :])
    again = d.start()
    need(again.end() == 0, again.output())
    need('has changed since the checkpoint of step' in again.output(), again.output())
    later = path.read_bytes()
    path.write_bytes(intact[: place + 1] + later[place + 1 :])
    return again


def planted_folder(d: Draw) -> Session:
    """Another user plants a link, a file or a pipe where the run's folder in memory would be: nothing behind it is
    touched, and nothing waits for it."""
    session = d.stop()
    if saved(d.path)[-1:] == [STEPS]:
        return session
    victim = d.path.parent / 'victim'
    victim.mkdir(exist_ok=True)
    (victim / '0.0').write_text('precious')
    folder = SharedMemory(d.path, '').folder
    need(not os.path.lexists(folder), f'{folder} is there before')
    what = d.draw.choice(['link', 'dangling', 'file', 'pipe'])
    if what == 'file':
        folder.write_text('precious')
    elif what == 'pipe':
        os.mkfifo(folder)
    else:
        folder.symlink_to(victim if what == 'link' else victim / 'none')
    try:
        again = d.start(**d.draw.choice([KEPT, {}]))
        code = again.end()
        need(code == 0 and 'Traceback' not in again.output(), f'{again.codes()} with a {what}:\n{again.output()}')
        need((victim / '0.0').read_text() == 'precious', f'a {what} was followed')
        need(os.path.lexists(folder) and (what != 'file' or folder.read_text() == 'precious'), f'the {what} is gone')
    finally:
        folder.unlink(missing_ok=True)
        shutil.rmtree(victim)
    return again


def pipe_in_place(d: Draw) -> Session:
    """A pipe lies in the place of a file of the run: 44 at once."""
    session = d.stop()
    if not saved(d.path) or saved(d.path)[-1] == STEPS:
        return session
    path = d.path / d.draw.choice(['config.gin', 'run.json', 'metrics.jsonl'])
    aside = d.path.parent / 'aside'
    d.before = logged(d.path)
    path.rename(aside)
    os.mkfifo(path)
    refused = d.shop.start(d.shape, d.path)
    refused.end()
    path.unlink()
    aside.rename(path)
    need(set(refused.codes()) == {44} and path.name in refused.output(), f'{refused.codes()}:\n{refused.output()}')
    return refused


def planted_secret(d: Draw) -> Session:
    """The address of a webhook is a secret: no file of the run has it."""
    secret = f'PLANTED{d.draw.randrange(10**12):012}'
    flags = ('--set', 'train.trackers=[@webhook()]', '--gin_param', f"webhook.url = 'http://127.0.0.1:9/{secret}'")
    session = d.start(*flags)
    code = session.end()
    need(code == 0, f'{session.codes()}:\n{session.output()}')
    found = [path.name for path, content in contents(d.path).items() if secret.encode() in content]
    need(not found and secret not in session.output(), f'the secret is in {found or "the output"}')
    return session


def hanging_phase(d: Draw) -> Session:
    """A replay, an evaluation or a save never ends: 42, with the stacks."""
    phase = d.draw.choice(['replay', 'evaluation', 'checkpoint'])
    changes = {'train__hang_minutes': 0.1} | ({'train__replay_every': 2} if phase == 'replay' else {})
    session = d.start(launcher=('hang', phase), **changes)
    session.end(300)
    codes = set(session.codes())
    need(codes <= {0} or codes <= {42}, f'{session.codes()}:\n{session.output()}')
    need(codes == {0} or 'most recent call first' in session.output(), session.output())
    return session


def contents(run: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {path: path.read_bytes() for path in sorted(run.rglob('*')) if path.is_file()}


def kept_in_memory(d: Draw) -> Session:
    """A process dies whose host holds the state in memory: the run goes on from there, and gives the memory back."""
    session = d.start(launcher=BRAKE, **KEPT)
    wait_until(lambda: logged(d.path) >= min(d.before + d.draw.randint(3, 8), STEPS - 2), session)
    session.send(signal.SIGKILL, d.draw.randrange(d.shape.processes))
    session.end()
    reached, stored = logged(d.path), (saved(d.path) or [0])[-1]
    if not any(session.codes()):
        return session
    again = d.start(launcher=BRAKE, **KEPT)
    wait_until(lambda: logged(d.path) > reached, again)
    again.send(signal.SIGTERM)
    again.end()
    wrong = [code for code in again.codes() if code not in (0, 42, -signal.SIGTERM)]
    need(not wrong, f'{again.codes()}:\n{again.output()}')
    first = again.resumed_from() or 0
    need(first >= max(stored, reached - 4), f'from {first}, reached {reached}, stored {stored}:\n{again.output()}')
    need(not SharedMemory(d.path, '').folder.exists(), 'the memory is not given back')
    return again


ATTACKS: dict[str, Callable[[Draw], Session]] = {
    'wrong chip': wrong_chip,
    'wrong copy': wrong_copy,
    "stranger's file": planted_file,
    'absurd number': absurd_number,
    'state in memory': kept_in_memory,
    'changed digit': changed_digit,
    'planted folder': planted_folder,
    'pipe in place': pipe_in_place,
    'planted secret': planted_secret,
    'hanging phase': hanging_phase,
}
