"""Mistakes of beginners end with one line that holds the next command, or the word that was meant."""

import pytest
import tiny

from lm.cli import main

Q = ('--gin_file', 'configs/experiments/quickstart.gin')
RUN = ('--run_dir', 'runs/new')


@pytest.mark.parametrize(
    ('typed', 'remedy'),
    [
        (['trian'], 'did you mean train?'),
        (['train'], 'for example: lm train --run_dir runs/quickstart --gin_file'),
        (['prepare'], "for example data.path = 'data/my_text'"),
        (['train', *Q], 'for example: lm train --run_dir runs/quickstart --gin_file'),
        (['train', '--gin_file', 'quickstart', *RUN], 'did you mean configs/experiments/quickstart.gin?'),
        (['train', '--gin_file', 'quikstart.gin', *RUN], 'did you mean configs/experiments/quickstart.gin?'),
        (
            ['train', '--gin_file', 'configs/experiments/quikstart.gin', *RUN],
            'did you mean configs/experiments/quickstart.gin?',
        ),
        (
            ['train', *Q, '--gin_file', 'configs/attention/polysketch', *RUN],
            'did you mean configs/attention/polysketch.gin?',
        ),
        (['train', *Q, '--set', 'train.step=10', *RUN], 'did you mean train.steps?'),
        (['train', *Q, '--set', 'steps=10', *RUN], 'did you mean train.steps?'),
        (['train', *Q, '--set', 'train.steps=ten', *RUN], "train.steps = 'ten': must be an int"),
        (['train', *Q, '--steps', '10', *RUN], '--set train.steps=10'),
        (['train', *Q, '--attention', 'polysketch', *RUN], '--set model.attention=polysketch'),
        (['train', *Q, '--set', 'model.attention=polysketh', *RUN], 'did you mean @polysketch()?'),
        (['train', *Q, '--gin_param', 'data.path = data/x', *RUN], 'strings in quotes'),
        (['train', *Q, '--gin_param', 'data.path = ‘data/x’', *RUN], 'strings in quotes'),
        (['train', '--gin_file', 'configs/models/small.gin', *RUN], 'name the token store, for example --gin_param'),
        (['train', '--gin_file', 'configs/attention/polysketch.gin', *RUN], 'name the token store, for example'),
        (['train', *Q, *RUN, '--set', 'data.path=nowhere'], 'run `lm prepare` first'),
        (['generate', '--prompt', 'X'], 'name the run: lm generate runs/quickstart'),
        (['evaluate'], 'name the run: lm evaluate runs/quickstart'),
        (['generate', 'configs'], 'name one, such as runs/quickstart'),
        (['generate', 'runs/nope'], 'name one, such as runs/quickstart'),
        (['inspect', 'configs'], 'name a run, a sweep or a token store, such as runs/quickstart'),
        (['inspect', 'configs/models/small.gin'], 'name a run, a sweep or a token store, such as runs/quickstart'),
        (['report', 'configs'], 'for example: lm report runs/sweep'),
        (['sweep', *Q, '--sweep_file', 'configs/sweeps/quickstart.gin'], 'such as --run_dir runs/sweep'),
        (['check', *Q, '--topology', 'v5e'], 'such as v5e:4x8'),
        (['check', *Q, '--topology', 'v9-8'], 'there are v4, v5e'),
        (['help', 'polisketch'], 'did you mean polysketch?'),
    ],
)
def test_the_line_holds_the_next_command(typed, remedy, monkeypatch, capsys):
    monkeypatch.chdir(tiny.ROOT)
    code = main(typed)
    (line,) = capsys.readouterr().err.splitlines()
    assert code in (2, 44)
    assert remedy in line
    assert not (tiny.ROOT / 'runs' / 'new').exists(), 'a mistake writes nothing'


def test_a_longer_training_is_a_branch(reference_run, tiny_flags, capsys):
    """`train.steps` decides where the rate falls, so that the run cannot simply go on."""
    assert main(['train', '--run_dir', str(reference_run[0]), *tiny_flags, '--set', 'train.steps=4000']) == 44
    line = capsys.readouterr().err.splitlines()[-1]
    assert f'lm train --run_dir {reference_run[0]}-4000 --branch_from {reference_run[0]} --step ' in line


def test_a_file_from_windows_is_read(tmp_path, capsys):
    """Carriage returns and a byte order mark, and an absolute path of what it includes."""
    file = tmp_path / 'mine.gin'
    include = tiny.ROOT / 'configs' / 'models' / 'small.gin'
    file.write_bytes(f"\ufeffinclude '{include}'\r\nmodel.n_layers = 2\r\n".encode())
    assert main(['check', '--gin_file', str(file)]) == 0
    assert '2 layers of width 768' in capsys.readouterr().out
