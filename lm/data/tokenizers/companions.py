"""The files of a checkpoint that go along with its weights as they are: how its tokenizer and its texts are used.

They lie in the folder `checkpoint_files` of a run: `lm import` puts them there, runs that start from it take them over,
and `lm export` writes them again, byte for byte.
"""

from collections.abc import Mapping

from lm.data.tokenizers.marks import list_ids
from lm.errors import writing
from lm.files import AnyPath, find_entries, write_atomically

FOLDER = 'checkpoint_files'
"""The folder in a run."""
TEMPLATE = 'chat_template.jinja'
TOKENIZER_CONFIG, GENERATION_CONFIG = 'tokenizer_config.json', 'generation_config.json'
OF_THE_TOKENIZER = (
    *(TOKENIZER_CONFIG, 'special_tokens_map.json', 'added_tokens.json', TEMPLATE, 'chat_template.json'),
    *('vocab.json', 'merges.txt'),
)
COMPANIONS = (*OF_THE_TOKENIZER, GENERATION_CONFIG)


def read_companions(folder: AnyPath) -> dict[str, bytes]:
    """Returns name → contents of the files of `COMPANIONS` in a folder."""
    return {name: path.read_bytes() for name in COMPANIONS if (path := folder / name).is_file()}


def write_companions(run_dir: AnyPath, files: Mapping[str, bytes]) -> None:
    """Writes the files into the folder of a run. Raises LmError where that fails."""
    for name, contents in files.items():
        path = run_dir / FOLDER / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, contents)


def take_over(source: AnyPath, run_dir: AnyPath) -> None:
    """Gives a run the files of the run that it starts from, unless it has some. Raises LmError where that fails."""
    if not (run_dir / FOLDER).exists():
        write_companions(run_dir, read_companions(source / FOLDER))


def find_ends(files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Returns the tokens at which generation ends, as generation_config.json says; none where it says nothing."""
    return list_ids(find_entries(files.get(GENERATION_CONFIG)).get('eos_token_id'))


def find_template(folder: AnyPath) -> str | None:
    """Returns the chat template of a folder with a tokenizer, or of a run; None: there is none.

    A file of its own counts before tokenizer_config.json. Of several templates the one that is called `default` counts.
    """
    files = read_companions(folder / FOLDER) or read_companions(folder)
    if TEMPLATE in files:
        return files[TEMPLATE].decode()
    for name in (TOKENIZER_CONFIG, 'chat_template.json'):
        found = find_entries(files.get(name)).get('chat_template')
        if isinstance(found, list):
            named = {one.get('name'): one.get('template') for one in found if isinstance(one, dict)}
            found = named.get('default')
        if isinstance(found, str):
            return found
    return None
