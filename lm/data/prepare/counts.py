"""The counts that `lm prepare` takes of a shard: the file NAME.json of the intermediate files."""

import dataclasses
import hashlib
import json

from lm.errors import LmError
from lm.files import parse_json

SEAL = 'digest'
"""The entry that holds the SHA-256 of the others."""


class DamagedPartError(LmError):
    """The intermediate file `file` is not as it was written. `base` names the shard: SPLIT/NUMBER."""

    def __init__(self, base: str, suffix: str):
        super().__init__(f'{base}{suffix} of the intermediate files is damaged or gone; run the same command again')
        self.base, self.suffix, self.file = base, suffix, base + suffix

    def __reduce__(self) -> tuple:
        return type(self), (self.base, self.suffix)  # it comes from a worker process


@dataclasses.dataclass
class ShardCounts:
    """Counts of a tokenized shard.

    Attributes:
        documents, bytes, words, tokens: of its usable documents; tokens include the end of each document.
        bad: the unusable documents, each with `split`, `document` and `reason`.
        decoded: documents whose tokens were compared with their text; 0 from versions that compared none.
        unchanged: compared documents that came back without a change.
        source: the SHA-256 of its usable documents, as they were read; '' from versions that computed none.
        sha256: suffix of an intermediate file → its SHA-256; empty from versions that computed none.
    """

    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    bad: list[dict[str, str]] = dataclasses.field(default_factory=list)
    decoded: int = 0
    unchanged: int = 0
    source: str = ''
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)


def check_content(counts: ShardCounts, base: str, suffix: str, content: bytes | None) -> bytes:
    """Returns the contents of the file BASE SUFFIX. Raises DamagedPartError unless they are as they were written."""
    if content is None:
        raise DamagedPartError(base, suffix)
    digest = hashlib.sha256(content).hexdigest()
    if counts.sha256.get(suffix, digest) != digest:
        raise DamagedPartError(base, suffix)
    return content


def encode_counts(counts: ShardCounts) -> bytes:
    """Returns the contents of NAME.json, with a digest of themselves."""
    values = dataclasses.asdict(counts)
    return json.dumps(values | {SEAL: _seal(values)}).encode()


def decode_counts(content: bytes | None) -> ShardCounts | None:
    """Reads the contents of NAME.json. Returns None for a file that is gone, cut or damaged."""
    try:
        values = dict(parse_json(content or b''))
        seal = values.pop(SEAL, None)
        if seal not in (None, _seal(values)):
            return None
        values.pop('sizes', None)  # of earlier versions
        return ShardCounts(**values)
    except (TypeError, ValueError):  # no object, or other names
        return None


def _seal(values: dict) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
