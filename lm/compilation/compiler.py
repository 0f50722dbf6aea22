"""Compilation for described devices, with the program in the compiler's own text."""

import dataclasses
import pathlib
import tempfile

import jax

from lm.compilation.memory import ProgramMemory, program_memory

OPTIONS = {'xla_dump_hlo_as_text': True, 'xla_syntax_sugar_async_ops': True}  # as `Compiled.as_text` writes it
FINAL = '*after_codegen.txt'
REPORT = '*memory-usage-report.txt'


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program, its text (for `HloProgram`), and its memory; None if the compiler gives no figures."""

    executable: jax.stages.Compiled
    text: str
    memory: ProgramMemory | None


def compile_with_text(lowered: jax.stages.Lowered) -> CompiledProgram:
    """Compiles the result of `jax.jit(f).lower(…)`.

    The text is libtpu's own. libtpu may be newer than jaxlib and write operations that jaxlib cannot read (seen with
    v6e and v7x); `Compiled.as_text` then reports this at length. Other compilers write no text, so `Compiled.as_text`
    is asked.
    """
    with tempfile.TemporaryDirectory(prefix='lm_program_') as folder:
        executable = lowered.compile(compiler_options=OPTIONS | {'xla_dump_to': folder})
        text, report = (_last(pathlib.Path(folder), pattern) for pattern in (FINAL, REPORT))
        return CompiledProgram(executable, text or executable.as_text() or '', program_memory(executable, report))


def _last(folder: pathlib.Path, pattern: str) -> str:
    found = sorted(folder.glob(pattern))
    return found[-1].read_text() if found else ''
