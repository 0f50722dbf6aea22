"""Where documents come from."""

from lm.configurable import configurable, field


class Source:
    """Base of the sources."""


@configurable('tfds')
class Tfds(Source):
    """A dataset of TensorFlow Datasets, read without TensorFlow."""

    name: str = field(help="the dataset, such as 'pg19', 'wiki40b/en' or 'c4/en'")
    data_dir: str | None = field(None, help='TFDS data_dir (a folder or gs://…); None: ~/tensorflow_datasets')
    text_feature: str | None = field(None, help="the feature that holds the text; None: book_text for pg19, else 'text'")
    version: str | None = field(None, help='the version of the dataset; None: the newest under data_dir')


@configurable('text_files')
class TextFiles(Source):
    """A folder of .txt files, one document each; PG-19's own layout if it has a folder for each split."""

    path: str = field(help='a folder of .txt files, or one that holds train/ validation/ test/')
    validation_fraction: float = field(0.05, above=0, below=1, help='of a folder without folders for the splits')


@configurable('jsonl')
class Jsonl(Source):
    """JSON lines, one document each, plain or gzipped."""

    path: str = field(help="a file, a folder of {split}.jsonl[.gz], or a pattern with * and possibly '{split}'")
    text_field: str = field('text', help='the key that holds the text')
    validation_fraction: float = field(0.05, above=0, below=1, help='of files that belong to no split')


@configurable('python_sources')
class PythonSources(Source):
    """The .py files of this Python's standard library: real text that every machine has."""

    validation_fraction: float = field(0.05, above=0, below=1, help='of the files')
