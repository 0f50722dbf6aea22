"""The memory of programs: on CPUs, a call takes the memory of the call before."""

import ctypes
import os
import subprocess
import sys

import jax
import pytest

import lm
from lm.errors import MismatchError

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from lm.compilation.memory import keep_freed_memory
if 'keep' in sys.argv:
    keep_freed_memory()
compute = jax.jit(lambda x: jnp.outer(x, x) @ x)
x = jnp.arange(2.0**12)
counts = []
for _ in range(4):
    compute(x).block_until_ready()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[-1] - counts[-2])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallopt'), reason='not the GNU C library')
def test_a_program_takes_the_memory_of_the_call_before():
    def count_faults(*words: str) -> int:
        environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'GLIBC_TUNABLES': ''}
        command = [sys.executable, '-c', PROGRAM, *words]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert count_faults() > 10_000
    assert count_faults('keep') < 1_000


def test_a_training_from_python_does_as_the_command(tmp_path):
    name = 'jax_cpu_enable_async_dispatch'
    before = jax.config.values[name]
    try:
        jax.config.update(name, True)
        with pytest.raises(MismatchError, match='no finished token store is there'):
            lm.train(lm.configure([], [f"data.path = '{tmp_path}/absent'"]), str(tmp_path / 'run'))
        assert jax.config.values[name] is False
    finally:
        jax.config.update(name, before)
