"""The counts that `lm prepare` takes of a shard: the file NAME.json of the intermediate files."""

import dataclasses
import json


@dataclasses.dataclass
class ShardCounts:
    """Counts of a tokenized shard.

    Attributes:
        documents, bytes, words, tokens: of its usable documents; tokens include the end of each document.
        bad: the unusable documents, each with `split`, `document` and `reason`.
        decoded: documents whose tokens were compared with their text; 0 from versions that compared none.
        unchanged: compared documents that came back without a change.
        sizes: suffix of an intermediate file → its bytes.
    """

    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    bad: list[dict[str, str]] = dataclasses.field(default_factory=list)
    decoded: int = 0
    unchanged: int = 0
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)


def encode_counts(counts: ShardCounts) -> bytes:
    """Returns the contents of NAME.json."""
    return json.dumps(dataclasses.asdict(counts)).encode()


def decode_counts(content: bytes) -> ShardCounts:
    """Reads the contents of NAME.json. Raises ValueError for a file that is cut or damaged."""
    try:
        return ShardCounts(**json.loads(content))
    except TypeError as error:  # no object, or other names
        raise ValueError(error) from None
