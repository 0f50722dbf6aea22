"""`lm help`: what it says comes from the classes and gin files of the project."""

import pytest

from lm.cli import main
from lm.config.configurable import REGISTRY, list_fields
from lm.config.project import project_root


def read_help(capsys, *words: str) -> str:
    assert main(['help', *words]) == 0
    return ' '.join(capsys.readouterr().out.split())


def test_without_a_name_it_lists_the_topics(capsys):
    printed = read_help(capsys)
    assert 'sections: checkpoint, data, evaluate' in printed
    assert 'polysketch, retention, softmax' in printed
    assert 'optimizer.rule: adamw, muon' in printed
    assert 'attention, experiments, models, papers, recipes' in printed


@pytest.mark.parametrize('name', ['polysketch', '@polysketch()'])
def test_a_value_has_its_fields_and_files_and_paper(name, capsys):
    printed = read_help(capsys, name)
    assert '(PolySketchFormer)' in printed
    assert 'set it: model.attention = @polysketch(), or --set model.attention=polysketch' in printed
    own = [n for n, f in list_fields(REGISTRY['polysketch']).items() if not f.metadata.get('omit_default')]
    assert len(own) > 5
    assert all(f' polysketch.{field} = ' in printed for field in own)
    assert 'configs/attention/polysketch.gin: PolySketchFormer with learned sketches' in printed


def test_a_section_a_field_and_a_folder(capsys):
    assert ' train.steps' in read_help(capsys, 'train')
    printed = read_help(capsys, 'optimizer.rule')
    assert 'what makes directions out of gradients' in printed
    assert 'muon: Orthogonalized momentum' in printed
    names = [path.name for path in (project_root() / 'configs' / 'recipes').glob('*.gin')]
    printed = read_help(capsys, 'recipes')
    assert all(f'configs/recipes/{name}: ' in printed for name in names)


@pytest.mark.parametrize('words', [('learning rate',), ('learning', 'rate')])
def test_words_find_fields_whose_names_hold_them_first(words, capsys):
    assert read_help(capsys, *words).startswith('optimizer.peak_learning_rate = ')


def test_a_name_that_nothing_has_leads_to_the_topics(capsys):
    assert main(['help', 'polisketch']) == 2
    assert capsys.readouterr().err == (
        "lm help: error: 'polisketch': no section, value, field or gin file has this name, did you mean polysketch? "
        'lm help lists the topics\n'
    )
