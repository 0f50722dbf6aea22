"""Apache Beam makes the bytes of one machine: with repeated elements, killed workers and poisoned records."""

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny
from test_prepare import ROOT, digests
from test_prepare_parts import SMALL, config, corpus, fast, small_files  # noqa: F401 (fixtures)

from lm.cli import main
from lm.data.prepare import beam as module
from lm.data.prepare.beam import prepare_with_beam
from lm.data.prepare.parts import Share
from lm.data.prepare.stages import prepare
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, LmError, MismatchError, MissingPackageError

HERE = '--runner=DirectRunner --direct_running_mode=in_memory'
needs_beam = pytest.mark.skipif(importlib.util.find_spec('apache_beam') is None, reason='needs the extra [beam]')


@needs_beam
def test_beam_makes_the_bytes_of_one_machine_and_may_repeat_every_element(
    config, tmp_path, fast, small_files, monkeypatch  # noqa: F811
):  # fmt: skip
    for name in ('_list_units', '_list_pieces'):
        once = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, once=once: [*once(*args), *once(*args)])
    finish = module._finish
    monkeypatch.setattr(module, '_finish', lambda *args: [*finish(*args), *finish(*args)])
    prepare(config, str(tmp_path / 'one'))
    info = prepare_with_beam(config, str(tmp_path / 'beam'), HERE)
    assert info['splits']['train']['bad_records'] == 3
    assert digests(tmp_path / 'beam') == digests(tmp_path / 'one')
    assert not (tmp_path / 'beam' / 'parts').exists()


@needs_beam
def test_beam_goes_on_with_what_a_machine_has_begun(config, tmp_path, fast, capsys):  # noqa: F811
    prepare(config, str(tmp_path / 'one'))
    prepare(config, str(tmp_path / 'beam'), share=Share(1, 3))
    prepare_with_beam(config, str(tmp_path / 'beam'), HERE)
    assert digests(tmp_path / 'beam') == digests(tmp_path / 'one')
    prepare_with_beam(config, str(tmp_path / 'beam'), HERE)
    assert 'nothing to do' in capsys.readouterr().out


@needs_beam
def test_errors_of_workers_are_one_line(config, tmp_path, monkeypatch):  # noqa: F811
    large = dataclasses.replace(config, tokenizer=TokenizerConfig(vocab_size=1_000_000))
    with pytest.raises(
        ConfigError, match=r'^tokenizer.vocab_size = 1000000: the text is too small for it; .* more text$'
    ):
        prepare_with_beam(large, str(tmp_path / 'beam'), HERE)
    assert not (tmp_path / 'beam' / 'parts').exists()
    with pytest.raises(MismatchError, match=r"^split 'train', document .*jsonl@\d+: .*; mend it, or run .* list them$"):
        prepare_with_beam(dataclasses.replace(config, strict=True), str(tmp_path / 'beam'), HERE)
    monkeypatch.setattr(module, '_finish', lambda *_: 1 / 0)
    with pytest.raises(LmError, match=r'^Beam: .*division by zero; mend that and run the same command again'):
        prepare_with_beam(config, str(tmp_path / 'beam'), HERE)


@needs_beam
def test_killed_workers_and_a_killed_pipeline_change_no_byte(tmp_path):
    """A worker is killed, then the whole pipeline; the command is repeated each time."""
    text = tiny.write_text(tmp_path / 'text')
    for i in range(4):
        (text / 'train' / f'{i}.txt').write_bytes((text / 'train' / 'typing.txt').read_bytes() * (30 + i))
    flags = ['--set', f'text_files.path={text}', '--set', 'prepare.source=@text_files()', '--processes', '2']
    flags += ['--set', f'tokenizer.vocab_size={SMALL.vocab_size}']
    path = tmp_path / 'beam'
    command = [sys.executable, '-m', 'lm', 'prepare', *flags, '--set', f'data.path={path}', '--engine', 'beam']
    options = dict(cwd=ROOT, env=tiny.environment(), text=True, start_new_session=True)

    def workers(process):
        found = subprocess.run(
            ['pgrep', '-g', str(process.pid), '-f', 'sdk_worker_main'], capture_output=True, text=True
        )
        return [int(word) for word in found.stdout.split()]

    for moment in (lambda: list(path.glob('parts/*/tokenizer.model')), lambda: list(path.glob('parts/*/train/*.json'))):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options) as process:
            while not (moment() and workers(process)) and process.poll() is None:
                time.sleep(0.005)
            os.kill(workers(process)[0], signal.SIGKILL)
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGKILL)
        assert not (path / 'dataset.json').exists(), 'it was killed too late'
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert main(['prepare', *flags, '--set', f'data.path={tmp_path / "one"}']) == 0
    assert digests(path) == digests(tmp_path / 'one')


def test_wrong_flags_and_a_missing_package_are_named(config, tmp_path, monkeypatch, capsys):  # noqa: F811
    for flags, message in (
        (['--engine', 'beam', '--shard', '0/2'], '--engine beam: shares the work out by itself; leave out --shard and'),
        (['--beam_options=--runner=x'], "--beam_options '--runner=x': is of Beam; add --engine beam"),
    ):
        assert main(['prepare', *flags]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(MissingPackageError, match=r"--engine beam: needs apache-beam; pip install -e '\.\[beam\]'"):
        prepare_with_beam(config, str(tmp_path / 'beam'))
