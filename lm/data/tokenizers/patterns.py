"""How text is split into the pieces in which byte pairs are merged, by the names of known vocabularies."""

_LOWER, _UPPER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]', r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]'
_FIRST = r'[^\r\n\p{L}\p{N}]?'
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

PATTERNS = {
    'gpt2': r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    'cl100k': rf'{_ENDINGS}|{_FIRST}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+',
    'o200k': rf'{_FIRST}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_FIRST}{_UPPER}+{_LOWER}*{_ENDINGS}?'
    r'|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+',
}
"""Name → regular expression. OpenAI publishes them; Llama 3 splits text as cl100k does."""
