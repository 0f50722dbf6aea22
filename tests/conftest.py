"""Every test sees 8 simulated CPU devices; the environment is set before jax is first imported."""

import ctypes
import gc
import os
import pathlib
import signal
import sys
import threading
import tracemalloc  # noqa: F401  pytest imports it for a warning, which fails while a test runs lazy imports of etils

if threading.current_thread() is threading.main_thread():
    # A shell that starts the tests in the background, or `nohup`, ignores these signals. Children would inherit that;
    # they do not inherit a handler.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # libtpu, which some tests load, ignores SIGHUP if nothing handles it, and children would inherit that too.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.default_int_handler)

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if 'xla_force_host_platform_device_count' not in os.environ.get('XLA_FLAGS', ''):
    os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
import journey
import short_run
import tiny

if 'xla_backend_optimization_level' not in os.environ['XLA_FLAGS']:
    os.environ['XLA_FLAGS'] += f' {tiny.COMPILE_QUICKLY}'

import compile_cache
import hypothesis
import interpreter
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# No test fails because its machine is busy.
hypothesis.settings.register_profile(
    'any_speed', deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile('any_speed')
# Tracing makes many objects that live on, and little garbage. With the default setting, looking for garbage takes a
# tenth of the time.
gc.set_threshold(10_000, 20, 20)
# The `lm` commands that tests start share one cache of compiled programs. This process has read its environment
# already: it compiles for itself, except in tests of whole commands (`kept_programs`).
assert jax.devices()
# The flags have been read. libtpu, which some tests load, would end the process at a flag that it does not know.
os.environ['XLA_FLAGS'] = os.environ['XLA_FLAGS'].replace(tiny.COMPILE_QUICKLY, '')
compile_cache.choose_folders(pathlib.Path(tiny.ROOT, '.pytest_cache', 'xla'))
compile_cache.share()
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
if sys.platform == 'linux':
    tiny.WARM.update(tiny.variables())


pytest_addoption, pytest_configure = short_run.add_options, short_run.configure
pytest_collect_file = journey.collect


def pytest_collection_modifyitems(config, items):
    short_run.leave_out(config, items)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # imported modules stay: the collector need not visit them


class _CompiledPrograms:
    """JAX's compiled programs, dropped when this process has grown by `MORE_BYTES`.

    A process that kept the programs of all tests would grow to 5 GB. Then it would end with a segmentation fault: a
    program takes a few memory mappings, of which Linux gives a process 65,530.
    """

    MORE_BYTES = 1_000_000_000

    def __init__(self):
        self.most = self.measure() + self.MORE_BYTES

    @staticmethod
    def measure() -> int:
        resident = pathlib.Path('/proc/self/statm')
        return int(resident.read_text().split()[1]) * os.sysconf('SC_PAGESIZE') if resident.exists() else 0

    def bound(self) -> None:
        if self.measure() > self.most:
            jax.clear_caches()
            gc.collect()
            if trim := getattr(ctypes.CDLL(None), 'malloc_trim', None):  # glibc keeps what is free
                trim(0)
            self.most = self.measure() + self.MORE_BYTES  # not all memory goes back to the system


_compiled = _CompiledPrograms()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    _compiled.bound()


@pytest.fixture(scope='session')
def tokens(tmp_path_factory):
    """Returns a small token store of real text, made by `lm prepare`."""
    return tiny.prepare(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='session')
def other_tokens(tmp_path_factory):
    """Returns a store whose tokenizer differs from the tokenizer of `tokens`."""
    return tiny.prepare(tmp_path_factory.mktemp('other'), characters=30_000)


@pytest.fixture(scope='session')
def tiny_flags(tokens):
    """Returns the command-line flags of the tiny experiment on `tokens`."""
    return tiny.params(tiny.MODEL | {'data.path': str(tokens)})


@pytest.fixture(scope='session')
def reference_run(tiny_flags, tmp_path_factory):
    """Returns (directory, output) of the tiny experiment, trained without interruption."""
    run = tmp_path_factory.mktemp('reference') / 'run'
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags, cold=True)  # as a user starts it
    assert done.returncode == 0, done.stderr
    return run, done.stdout


@pytest.fixture(scope='module')
def kept_programs():
    """Makes commands that tests run in this process share JAX's cache, so that each program is compiled once."""

    def use(settings: dict) -> None:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # the first program has made it settle on a folder, or on none

    ours = {
        'jax_compilation_cache_dir': compile_cache.find_shared(),
        'jax_persistent_cache_min_compile_time_secs': 0.1,
    }
    before = {name: getattr(jax.config, name) for name in ours}
    use(ours)
    yield
    use(before)


@pytest.fixture
def no_races(request, capfd):
    """Fails a test in which the interpreter of TPU kernels has found a race; the interpreter only prints races."""
    interpreter.cores = interpreter.draw_cores(request.node.nodeid)
    yield
    interpreter.cores = 1
    assert 'RACE DETECTED' not in ''.join(capfd.readouterr())
