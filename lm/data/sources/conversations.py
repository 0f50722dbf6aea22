"""Conversations: JSON lines of messages, in one of the usual forms, for supervised fine-tuning.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}            ShareGPT
    {"instruction": "…", "input": "…", "output": "…"}                                              Alpaca

The model's own chat template makes a text of them. Only the answers are predicted in training.
"""

import dataclasses
import functools
from collections.abc import Mapping

from lm.config.configurable import configurable, field
from lm.data.chat_template import ChatTemplate
from lm.data.sources.base import Document
from lm.data.sources.jsonl import Jsonl

ROLES = {'human': 'user', 'gpt': 'assistant', 'bot': 'assistant', 'model': 'assistant'}
"""Names of ShareGPT → names of chat templates; others stay."""


@configurable('conversations')
class Conversations(Jsonl):
    """Conversations as JSON lines, one each; files as of `jsonl`."""

    template: str | None = field(
        default=None, help='a run, or a folder with a tokenizer, whose chat template counts; None: tokenizer.model_path'
    )

    marks_answers = True

    def settle(self, tokenizer: str | None) -> 'Conversations':
        return self if self.template else dataclasses.replace(self, template=tokenizer)

    def identity(self) -> dict[str, object]:
        named = super().identity()
        return {name: x for name, x in named.items() if name not in ('template', 'text_field')} | {
            'template_sha256': self._chat.sha256
        }

    @functools.cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate.read(self.template or '', 'conversations.template')

    def read_record(self, identifier: str, record: object) -> Document:
        try:
            text, spans = self._chat.find_answers(read_messages(record))
        except ValueError as error:
            return Document(identifier, error=' '.join(str(error).split()))
        except RecursionError:
            return Document(identifier, error='nested too deep')
        return Document(identifier, text, answers=tuple(spans))


def read_messages(record: object) -> list[Mapping[str, str]]:
    """Returns the messages of a conversation in one of the forms. Raises ValueError for another form."""
    if not isinstance(record, dict):
        raise ValueError('no object')
    if isinstance(record.get('instruction'), str) and isinstance(record.get('output'), str):
        asked = '\n\n'.join(filter(None, (record['instruction'], record.get('input'))))
        system = [{'role': 'system', 'content': record['system']}] if record.get('system') else []
        return [*system, {'role': 'user', 'content': asked}, {'role': 'assistant', 'content': record['output']}]
    turns = record.get('messages', record.get('conversations'))
    if not isinstance(turns, list) or not turns:
        raise ValueError("none of 'messages', 'conversations', 'instruction' and 'output'")
    return [_read_turn(turn) for turn in turns]


def _read_turn(turn: object) -> Mapping[str, str]:
    if isinstance(turn, dict):
        role, content = turn.get('role', turn.get('from')), turn.get('content', turn.get('value'))
        if isinstance(role, str) and isinstance(content, str):
            return {'role': ROLES.get(role, role), 'content': content}
    raise ValueError('a turn without role and content')
