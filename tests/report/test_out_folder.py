"""The folder of a report: an earlier report is replaced, and no other file is."""

import pytest
from made_up_runs import write_run

from lm.attention.softmax import Softmax
from lm.cli import main


@pytest.fixture
def report(tmp_path, capsys):
    """Returns a function that writes a report into tmp_path/out; it returns the exit code and what was said."""
    write_run(tmp_path / 'run', Softmax(), steps=100)

    def write() -> tuple[int, str]:
        code = main(['report', str(tmp_path / 'run'), '--out', str(tmp_path / 'out'), '--no_pictures'])
        return code, capsys.readouterr().err

    return write


@pytest.mark.parametrize('name', ['runs.csv', 'report.md', 'report.html', 'ladder.csv'])
def test_files_of_others_stay(name, report, tmp_path):
    out = tmp_path / 'out'
    out.mkdir()
    (out / name).write_text('# My own notes\n')
    code, said = report()
    assert code == 2
    assert f'holds {name}, which no report has written; name another folder' in said
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [(name, '# My own notes\n')]


def test_a_report_replaces_itself_beside_other_files(report, tmp_path):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'notes.txt').write_text('mine')
    assert report()[0] == 0
    first = (tmp_path / 'out' / 'runs.csv').read_text()
    (tmp_path / 'out' / 'runs.csv').write_text('old')
    assert report()[0] == 0
    assert (tmp_path / 'out' / 'runs.csv').read_text() == first
    assert (tmp_path / 'out' / 'notes.txt').read_text() == 'mine'
