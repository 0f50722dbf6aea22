"""The README's commands: every script exists, every `lm` command parses and its configuration resolves."""

import dataclasses
import re
import shlex

import pytest
import tiny

from lm import cli

README = (tiny.ROOT / 'README.md').read_text()
COMMANDS = [
    line.partition('#')[0].strip()
    for block in re.findall(r'```bash\n(.*?)```', README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


def test_the_readme_has_commands():
    assert sum('lm ' in command for command in COMMANDS) > 8


@pytest.mark.parametrize('command', COMMANDS)
def test_command(command, monkeypatch, reference_run):
    words = shlex.split(command)
    if words[0].startswith('scripts/'):
        assert (tiny.ROOT / words[0]).stat().st_mode & 0o100
    if words[0] == 'cp':
        assert (tiny.ROOT / words[1]).exists()
    if 'lm' not in words:
        return
    arguments = words[words.index('lm') + 1 :]
    # What the command runs with is what matters here; a run directory that it reads is the tiny run's.
    if arguments[0] in ('evaluate', 'generate'):
        arguments[arguments.index('--run_dir') + 1] = str(reference_run[0])
    if words[0].startswith('scripts/tpu'):
        arguments += ['--run_dir', 'runs/pod']
    verb = arguments[0]
    monkeypatch.setitem(cli.VERBS, verb, dataclasses.replace(cli.VERBS[verb], main='test_readme:pretend'))
    monkeypatch.chdir(tiny.ROOT)
    assert cli.main(arguments) == 0


def pretend(experiment, arguments) -> int:
    """Stands in for the verb, which would run for hours."""
    return 0 if experiment is not None else 1


def test_files_that_the_readme_names_exist():
    for name in re.findall(r'`((?:configs|data|docs|scripts|tests)/[\w./-]+)`', README):
        assert (tiny.ROOT / name).exists(), name


def test_the_expected_perplexity_is_the_same_in_the_quickstart():
    expected = re.search(r'validation perplexity per token near (\d+)', README)[1]
    assert f'near {expected}' in (tiny.ROOT / 'scripts' / 'quickstart.sh').read_text()
