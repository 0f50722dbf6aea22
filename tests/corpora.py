"""Real text and small synthetic data sets for the tests."""

import importlib.util
import os
import pathlib
import random

import numpy as np
import pytest

_default = pathlib.Path(__file__).resolve().parent.parent.parent / 'shared' / 'corpora'
CORPORA: pathlib.Path | None = pathlib.Path(os.environ.get('LM_TEST_CORPORA', _default))
"""The folder of real text (pg19/ wiki40b_en/ c4_en/), or None."""
if not CORPORA.is_dir():
    CORPORA = None

needs_corpora = pytest.mark.skipif(CORPORA is None, reason='set LM_TEST_CORPORA to the folder of real text')


def words(n: int, seed: int) -> str:
    """Returns prose-like text of `n` made-up words in lines; the same seed gives the same text."""
    draw = random.Random(seed)
    vocabulary = [''.join(draw.choices('etaoinshrdlu', k=draw.randint(1, 9))) for _ in range(2000)]
    chosen = draw.choices(vocabulary, weights=[1 / (i + 1) for i in range(2000)], k=n)
    return ''.join(word + draw.choice('      \n') for word in chosen) + 'end.\n'


def documents(source, split: str, max_bytes: int = 10**8) -> list:
    """Returns all documents that a source reads from a split; each must have its own id."""
    found = [d for shard in source.shards(split) for d in source.read(shard, max_bytes)]
    assert len({d.id for d in found}) == len(found)
    return found


def texts(source, split: str) -> list[str]:
    """Returns the texts of `documents`."""
    return [d.text for d in documents(source, split)]


def write_text(folder: pathlib.Path, files: int = 4, n: int = 3000) -> pathlib.Path:
    """Writes a corpus in PG-19's layout; returns its folder."""
    for split, count in {'train': files, 'validation': 1, 'test': 1}.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            (folder / split / f'{i}.txt').write_text(words(n, seed=len(split) * 1000 + i))
    return folder


def write_tfds(
    data_dir: pathlib.Path, texts: dict[str, list[bytes | str]], name: str = 'tiny', version='1.0.0'
) -> None:
    """Writes a prepared TFDS data set of ArrayRecord files with the features `text` and `number`."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    with registered.skip_registration():

        class Tiny(tfds.core.GeneratorBasedBuilder):
            VERSION = tfds.core.Version(version)

            def _info(self):
                features = {'text': tfds.features.Text(), 'number': np.int32}
                return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

            def _split_generators(self, download_manager):
                return {split: self._generate_examples(texts[split]) for split in texts}

            def _generate_examples(self, own):
                for i, text in enumerate(own):
                    yield i, {'text': text, 'number': i}

    Tiny.name = name
    Tiny(data_dir=str(data_dir), file_format='array_record').download_and_prepare()


def write_real_tfds(data_dir: pathlib.Path) -> None:
    """Writes the real text as the TFDS data sets pg19, wiki40b/en and c4/en; skips the test if there is none."""
    tool = CORPORA and CORPORA.parent / 'tools' / 'make_tfds.py'
    if tool is None or not tool.exists():
        pytest.skip('set LM_TEST_CORPORA to the folder of real text')
    spec = importlib.util.spec_from_file_location('make_tfds', tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for dataset in module.datasets(CORPORA):
        module.write(data_dir, *dataset)
