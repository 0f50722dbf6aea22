"""Chat templates: messages → the text that a model was tuned on, by the model's own template.

The environment of Jinja is the one of transformers (`render_jinja_template`), in a sandbox: templates are programs of
strangers.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lm.data.tokenizers.companions import FOLDER, TOKENIZER_CONFIG, find_template, read_companions
from lm.errors import ConfigError, require
from lm.files import AnyPath, find_entries, open_path

Messages = Sequence[Mapping[str, Any]]
"""Turns of a conversation; each has `role` and `content`."""
MARKS = ('bos_token', 'eos_token', 'pad_token', 'unk_token')
"""The names of special tokens that templates use."""


class ChatTemplate:
    """A chat template with the special tokens that it uses."""

    def __init__(self, text: str, tokens: Mapping[str, str], where: str):
        """Raises MissingPackageError without Jinja, and ConfigError for a template that Jinja cannot read."""
        require('jinja2', 'prepare.source = @conversations()', 'tokenizers')
        import jinja2
        import jinja2.ext
        import jinja2.nodes
        import jinja2.sandbox

        class Generation(jinja2.ext.Extension):
            """The block in which some templates put answers; it changes no text."""

            tags = {'generation'}  # noqa: RUF012 (Jinja reads it so)

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
                return jinja2.nodes.Scope(body, lineno=line)

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        made = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        made.filters['tojson'] = lambda x, **options: json.dumps(x, **{'ensure_ascii': False, **options})
        made.globals |= {
            'raise_exception': refuse,
            'strftime_now': lambda form: datetime.datetime.now().strftime(form),
        }
        self._error, self._tokens = jinja2.TemplateError, dict(tokens)
        self.sha256 = hashlib.sha256(json.dumps([text, self._tokens], sort_keys=True).encode()).hexdigest()
        try:
            self._template = made.from_string(text)
        except jinja2.TemplateError as error:
            raise ConfigError(f'{where}: is no chat template ({error}); fetch it again') from None

    @classmethod
    def read(cls, folder: str, name: str) -> 'ChatTemplate':
        """Reads the template beside a tokenizer, or of a run. Raises ConfigError, which says `name`, without one."""
        path = open_path(folder, name)
        path = path if path.is_dir() else path.parent
        text = find_template(path)
        if text is None:
            raise ConfigError(f'{name} = {folder!r}: has no chat template; name an Instruct model')
        return cls(text, find_special_tokens(path), str(path))

    def render(self, messages: Messages, add_generation_prompt: bool = False) -> str:
        """Returns the text of messages. Raises ValueError, which says why, where the template refuses them."""
        given = {'tools': None, 'documents': None, 'add_generation_prompt': add_generation_prompt, **self._tokens}
        try:
            return self._template.render(messages=[dict(one) for one in messages], **given)
        except (self._error, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f'the chat template refuses it: {error}') from None

    def find_answers(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of messages, and where in it the answers of the assistant begin and end.

        Raises ValueError where there is no answer, or the template changes earlier turns.
        """
        whole, spans = self.render(messages), []
        for i, message in enumerate(messages):
            if message['role'] == 'assistant':
                before, behind = self.render(messages[:i], True), self.render(messages[: i + 1])
                if not (whole.startswith(behind) and behind.startswith(before)):
                    raise ValueError('the chat template changes earlier turns; give one answer per conversation')
                spans.append((len(before), len(behind)))
        if not spans:
            raise ValueError('no answer of the assistant')
        return whole, spans


def find_special_tokens(folder: AnyPath) -> dict[str, str]:
    """Returns the special tokens that a folder with a tokenizer, or a run, names; '' for those that it does not."""
    files = read_companions(folder / FOLDER) or read_companions(folder)
    named: dict[str, str] = dict.fromkeys(MARKS, '')
    for name in ('special_tokens_map.json', TOKENIZER_CONFIG):
        config = find_entries(files.get(name))
        for mark in MARKS:
            value = config.get(mark)
            value = value.get('content') if isinstance(value, dict) else value
            named |= {mark: value} if isinstance(value, str) else {}
    return named
