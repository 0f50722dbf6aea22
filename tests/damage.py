"""Damage of any kind to the files of a format: a reader answers with one line, soon, and takes little memory."""

import contextlib
import faulthandler
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from lm.errors import LmError

ODD = (None, True, -5, 0, 1.5, 2**31, 10**9, 2**40, 2**64, 1e308, 'x', '', [], {}, [0], {'a': 1}, [[]])
"""Values that stand where others should."""
HUGE = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
"""Numbers that are written over a place of a file."""
MOST_BYTES = 2e9
"""The memory that reading a small damaged file may take beyond what its process has."""
PATIENCE = 60
"""Seconds after which a reader hangs; the files are read in a moment."""
EXAMPLES = 100
"""Damaged files that the complete check draws per format that is read in a moment."""
SECONDS = float(os.environ.get('FUZZ_SECONDS', '3600'))
"""The processor seconds that a slow test draws damaged files of a format."""
LENGTHS = [pytest.param(0, id='few'), pytest.param(SECONDS, marks=pytest.mark.slow, id='an hour')]
"""Values of `seconds`: the complete check draws always the same few, the slow tests others in each run."""


@st.composite
def damages(draw) -> Callable[[bytes], bytes]:
    """Draws a function of the contents of a file that damages them."""
    kind = draw(st.sampled_from(['bits', 'number', 'cut', 'repeat', 'text', 'value', 'key']))
    place, other = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    # Headers hold what matters, so half of the places are near the beginning.
    place = place**4 if draw(st.booleans()) else place
    bit, number, value = draw(st.integers(0, 7)), draw(st.sampled_from(HUGE)), draw(st.sampled_from(ODD))

    def damage(contents: bytes) -> bytes:
        at, end = int(place * len(contents)), int(other * len(contents))
        match kind:
            case 'bits':
                return contents[:at] + bytes([contents[at] ^ 1 << bit]) + contents[at + 1 :] if contents[at:] else b''
            case 'number':
                return contents[:at] + struct.pack('<Q', number) + contents[at + 8 :]
            case 'cut':
                return contents[:at]
            case 'repeat':
                return contents[:at] + contents[end:]
            case 'text':
                return contents[:at] + json.dumps(value).encode() + contents[at:]
        try:
            found = json.loads(contents)
        except ValueError:
            return contents[:at]
        places = list_places(found)
        if not places:
            return contents[:at]
        *above, last = places[int(place * (len(places) - 1))]
        inside = found
        for key in above:
            inside = inside[key]
        if kind == 'value':
            inside[last] = value
        else:
            del inside[last]
        return json.dumps(found).encode()

    return damage


def list_places(found, above=()):
    """Returns the keys that lead to each value of a JSON object; of long lists, the first members alone."""
    items = found.items() if isinstance(found, dict) else enumerate(found[:3]) if isinstance(found, list) else ()
    places = [((*above, key), value) for key, value in items]
    return [place for place, _ in places] + [deeper for place, value in places for deeper in list_places(value, place)]


def tell_damage(read: Callable[[pathlib.Path], object], path: pathlib.Path) -> str | None:
    """Returns what a reader says about a file or folder; None where it is sound. Other errors than ours go on."""
    try:
        with bounding_time():
            read(path)
    except LmError as error:
        return str(error)
    return None


@contextlib.contextmanager
def bounding_time() -> Iterator[None]:
    """A block that fails after PATIENCE seconds; if it is in a library that does not return, the process ends."""

    def stop(*_):
        raise TimeoutError(f'it hangs: no answer after {PATIENCE} s')

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_damages(
    whole: pathlib.Path,
    read: Callable[[pathlib.Path], object],
    scratch: pathlib.Path,
    seconds: float,
    examples: int = EXAMPLES,
) -> None:
    """Damages files of `whole`, a sound file or folder, and reads it: `examples` times, or for so many seconds.

    Fails for other errors than ours, for lines that are several, for hangs and for much memory.
    """
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    copy, count, refused = scratch / whole.name, 0, 0
    inside = [path.relative_to(whole).as_posix() for path in sorted(whole.rglob('*')) if path.is_file()]

    def check(name, damage):
        nonlocal count, refused
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy) if whole.is_dir() else shutil.copy(whole, copy)
        damaged = copy / name
        damaged.write_bytes(damage(damaged.read_bytes()))
        said = tell_damage(read, copy)
        assert said is None or (said and '\n' not in said)
        count, refused = count + 1, refused + (said is not None)

    def draw(**options):
        drawn = given(name=st.sampled_from(inside or ['']), damage=damages())(check)
        return settings(database=None, deadline=None, suppress_health_check=list(HealthCheck), **options)(drawn)

    def tell_progress():
        taken = time.process_time() - begun
        print(f'{whole.name}: {count} damaged files, {refused} refused, {taken:.1f} s of processor time', flush=True)

    draw(max_examples=examples, derandomize=True)()
    while time.process_time() - begun < seconds:
        tell_progress()
        seed(random.SystemRandom().randrange(2**32))(draw(max_examples=EXAMPLES))()
    tell_progress()
    assert refused, 'no damage was seen'
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert more < MOST_BYTES, f'it needs {more / 1e9:.1f} GB'
