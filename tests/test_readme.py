"""The commands of the documentation: every script exists, every `lm` command parses and its configuration resolves."""

import dataclasses
import pathlib
import re
import shlex
import subprocess

import pytest
import tiny

from lm import cli
from lm.runs.sweep_file import write_rows

README = (tiny.ROOT / 'README.md').read_text()
PAGES = [page.read_text() for page in tiny.PAGES]
COMMANDS = sorted(
    {
        line.partition('#')[0].strip()
        for path, page in zip(tiny.PAGES, PAGES, strict=True)
        if path.name != 'add_a_mechanism.md'  # tests/site/test_add_a_mechanism.py executes its commands
        for block in re.findall(r'```bash\n(.*?)```', page, re.DOTALL)
        for line in block.splitlines()
        # tests/scripts/test_scripts_tpu.py executes the commands of docs/tutorials/pod.md.
        if line.strip() and (page == README or not line.startswith('scripts/tpu/'))
    }
)


def test_the_shell_can_read_every_block():
    """`bash -n` reads each block and runs nothing. `shlex` would let brackets without quotes pass."""
    pages = {*tiny.PAGES, *(tiny.ROOT / 'docs' / 'notebooks').glob('*.md')}
    found = [
        (page, block)
        for page in sorted(pages)
        for block in re.findall(r'```bash\n(.*?)```', page.read_text(), re.DOTALL)
    ]
    assert len(found) > 50
    for page, block in found:
        done = subprocess.run(['bash', '-n'], input=block, capture_output=True, text=True)
        assert done.returncode == 0, f'{page}: {done.stderr}'


def test_the_readme_has_commands():
    assert sum('lm ' in command for command in COMMANDS) > 8


@pytest.mark.parametrize('command', COMMANDS)
def test_command(command, monkeypatch, reference_run, tmp_path):
    words = shlex.split(command)
    if words[0].startswith(('scripts/', 'configs/')):
        assert (tiny.ROOT / words[0]).stat().st_mode & 0o100
    if words[0] == 'cp':
        assert (tiny.ROOT / words[-2]).exists()
    if 'lm' not in words:
        return
    arguments = words[words.index('lm') + 1 :]
    verb = arguments[0]
    monkeypatch.chdir(tiny.ROOT)
    monkeypatch.setattr('lm.commands.generate.read_prompts', lambda *files: ['of a file that the reader has'])
    if verb == 'sweep' and not {'--emit', '--status'} & {*arguments}:  # the sweep itself runs, but it starts nothing
        assert cli.main([*arguments, '--dry_run'] if '--dry_run' not in arguments else arguments) == 0
        return
    # The test is about the bindings of the command. Where it reads a run directory, the tiny run stands in.
    if verb in ('evaluate', 'generate', 'export'):
        place = arguments.index('--run_dir') + 1 if '--run_dir' in arguments else 1
        arguments[place] = str(reference_run[0])
    if verb == 'distill':
        arguments[arguments.index('--teacher') + 1] = str(reference_run[0])
    if verb == 'sweep' and '--sweep_file' not in arguments:
        folder = tmp_path / 'sweep'
        write_rows(folder, [{'point': 'seed-0', 'status': 'waiting', 'step': 0, 'steps': 10}])
        arguments[arguments.index('--run_dir') + 1] = str(folder)
    if '--attention' in arguments:
        arguments[1] = str(reference_run[0])
    if words[0].startswith('scripts/tpu') and verb == 'train':
        arguments += ['--run_dir', 'runs/pod']
    # The call is built with its configuration. It is not run: it would take hours.
    make_call, made = cli.VERBS[verb].make_call, []
    pretend = dataclasses.replace(cli.VERBS[verb], make_call=lambda parsed: made.append(make_call(parsed)) or int)
    monkeypatch.setitem(cli.VERBS, verb, pretend)
    assert cli.main(arguments) == 0
    assert len(made) == 1


@pytest.mark.parametrize('folder', ['configs', 'data', 'scripts'])
def test_commands_of_headers_parse(folder, monkeypatch):
    monkeypatch.chdir(tiny.ROOT)
    found = set()
    for path in (p for p in pathlib.Path(folder).rglob('*') if p.suffix in ('.gin', '.md', '.py', '.sh')):
        text = '\n'.join(line.lstrip('# ') for line in path.read_text().splitlines()).replace('\\\n', ' ')
        found |= set(re.findall(r'^(?:lm|python (?:scripts|configs)/\S+) .*[^…\n]$', text, re.M))
    assert found
    for words in map(shlex.split, sorted(found)):
        if words[0] == 'lm':
            assert cli.parse(words[1:]).verb == words[1]
        else:
            assert pathlib.Path(words[1]).exists()


def test_files_that_the_documentation_names_exist():
    for name in re.findall(r'`((?:configs|data|docs|scripts|tests)/[\w./-]+)`', README):
        assert (tiny.ROOT / name).exists(), name
    for name in re.findall(
        r'(?<![\w./])(?:configs|docs|lm|scripts|tests)/[\w/]+\.(?:gin|json|md|py|sh|toml)\b', '\n'.join(PAGES)
    ):
        in_a_template = any((tiny.ROOT / 'docs' / 'templates').glob(f'*/{name}'))  # a tutorial copies it
        assert (tiny.ROOT / name).exists() or in_a_template, name


def test_the_expected_perplexity_is_the_same_in_the_quickstart():
    expected = re.search(r'validation perplexity per token of (\d+ to \d+)', README)[1]
    assert f'of {expected}' in (tiny.ROOT / 'scripts' / 'quickstart.sh').read_text()


def test_the_quickstart_ends_with_pictures_that_its_text_names(reference_run, tmp_path, capsys):
    script = (tiny.ROOT / 'scripts' / 'quickstart.sh').read_text()
    named = set(re.findall(r'\$run-report/(\w+\.\w+)', script))
    assert named == {'loss.png', 'position.png', 'report.html'}
    verbs = re.findall(r'^"\$lm" (\w+)', script, re.MULTILINE)
    assert verbs == ['prepare', 'train', 'evaluate', 'report']
    assert 'scripts/install.sh report' in script, 'pictures need matplotlib'
    assert cli.main(['report', str(reference_run[0]), '--out', str(tmp_path / 'out')]) == 0
    assert named <= {path.name for path in (tmp_path / 'out').iterdir()}
