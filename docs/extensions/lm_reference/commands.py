"""Every verb of `lm` with its flags and an example, and the exit codes."""

import argparse
import re

from lm.cli import OTHER_CODES, make_parser
from lm.errors import EXIT_CODES
from lm_reference.markdown import code, fenced, prose, sentence, table

HEADS = ('argument', 'meaning', 'default')
PLAIN = ('positional arguments', 'options')
"""The groups of arguments that argparse makes itself."""
DEFAULT = re.compile(r'(?:^|[;,] )default: (.*)')
"""How a help text states a default."""


def verbs() -> dict[str, argparse.ArgumentParser]:
    """'train', 'bench step', … → its parser."""
    found: dict[str, argparse.ArgumentParser] = {}

    def walk(parser: argparse.ArgumentParser, name: str) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, part in action.choices.items():
                    found[f'{name} {word}'.strip()] = part
                    walk(part, f'{name} {word}'.strip())

    walk(make_parser(), '')
    return found


def page() -> str:
    """All verbs, the arguments that several of them share, and the exit codes."""
    parts = [_verb(name, parser) for name, parser in verbs().items()]
    parts.append('## Shared arguments')
    for title, text in shared().items():
        parts += [f'({_label(title)})=\n### {sentence(title).rstrip(".")}', text]
    return '\n\n'.join([*parts, _exit_codes()])


def _verb(name: str, parser: argparse.ArgumentParser) -> str:
    level = '##' if ' ' not in name else '###'
    parts = [f'(lm-{name.replace(" ", "-")})=\n{level} {code(f"lm {name}")}', prose(parser.description or '')]
    example = re.search(r'^example:\n  (.*)$', parser.epilog or '', re.MULTILINE)
    parts += [fenced(example[1], 'bash')] if example else []
    remarks = [
        line for line in (parser.epilog or '').splitlines() if line not in (*EXIT_CODES.splitlines(), OTHER_CODES)
    ]
    parts += [prose(line.strip()) for line in remarks if line.strip() and not line.startswith(('example:', '  lm '))]
    groups = [
        (group, [action for action in group._group_actions if _is_argument(action)]) for group in parser._action_groups
    ]
    own = [action for group, actions in groups if group.title in PLAIN for action in actions]
    parts.append(table(HEADS, (_row(parser, action) for action in own)))
    others = [
        f'[{group.title}](#{_label(group.title)})' for group, actions in groups if actions and group.title not in PLAIN
    ]
    return '\n\n'.join([*parts, *([f'Shared arguments: {", ".join(others)}.'] if others else [])])


def shared() -> dict[str, str]:
    """Title of a group of arguments → its description and table."""
    found: dict[str, str] = {}
    for parser in verbs().values():
        for group in parser._action_groups:
            rows = [_row(parser, action) for action in group._group_actions if _is_argument(action)]
            if rows and group.title not in PLAIN:
                text = '\n\n'.join(filter(None, [sentence(prose(group.description or '')), table(HEADS, rows)]))
                assert found.setdefault(group.title, text) == text, f'{group.title}: two groups have this title'
    return found


def _label(title: str) -> str:
    return f'lm-arguments-{title.replace(" ", "-")}'


def _is_argument(action: argparse.Action) -> bool:
    is_hidden = action.help is argparse.SUPPRESS  # a former name
    return not is_hidden and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str]:
    formatter = parser._get_formatter()
    metavar = formatter._get_default_metavar_for_optional(action)
    value = '' if action.nargs == 0 else formatter._format_args(action, metavar)
    names = [f'{flag} {value}'.strip() for flag in action.option_strings]
    if not names:
        names = [formatter._format_args(action, formatter._get_default_metavar_for_positional(action))]
    text = formatter._expand_help(action) if action.help else ''
    default = 'required' if action.required and action.option_strings else _default(action, text)
    several = ' It may be given several times.' if isinstance(action, argparse._AppendAction) else ''
    return ', '.join(map(code, names)), sentence(prose(DEFAULT.sub('', text))) + several, default


def _default(action: argparse.Action, text: str) -> str:
    """The default in the words of the help text, else the value."""
    if found := DEFAULT.search(text):
        return prose(found[1])
    return code(str(action.default)) if action.default not in (None, False, []) and action.nargs != 0 else ''


def _exit_codes() -> str:
    codes = re.findall(r'^\s+(\d+)\s+(.*)$', EXIT_CODES, re.MULTILINE)
    rows = [(code(number), sentence(prose(meaning))) for number, meaning in codes]
    return '\n\n'.join(['(exit-codes)=\n## Exit codes', table(('code', 'meaning'), rows)])
