"""The files of an open project: citation, issue forms, workflow and hooks are valid and agree with the code."""

import re

import pytest
import tiny
import yaml

import lm

FORMS = sorted((tiny.ROOT / '.github' / 'ISSUE_TEMPLATE').glob('*.yml'))
KINDS = {'markdown', 'input', 'textarea', 'dropdown', 'checkboxes'}
CFF_KEYS = {'cff-version', 'type', 'title', 'message', 'abstract', 'authors', 'version', 'license', 'keywords'}
"""The keys of Citation File Format 1.2.0 that CITATION.cff uses."""


def read(name: str):
    return yaml.safe_load((tiny.ROOT / name).read_text())


def test_the_citation_names_this_version():
    cff = read('CITATION.cff')
    assert set(cff) == CFF_KEYS
    assert (cff['cff-version'], cff['type'], cff['license']) == ('1.2.0', 'software', 'Apache-2.0')
    assert cff['version'] == lm.__version__
    assert cff['authors'] == [{'name': 'The authors of lm'}]
    assert all(isinstance(cff[key], str) for key in ('title', 'message', 'abstract'))


@pytest.mark.parametrize('form', [form for form in FORMS if form.name != 'config.yml'], ids=lambda path: path.stem)
def test_issue_forms_follow_their_schema(form):
    found = yaml.safe_load(form.read_text())
    assert set(found) == {'name', 'description', 'labels', 'body'}
    ids = [item['id'] for item in found['body'] if item['type'] != 'markdown']
    assert len(ids) == len(set(ids))
    for item in found['body']:
        assert item['type'] in KINDS
        assert set(item) <= {'type', 'id', 'attributes', 'validations'}
        attributes = item['attributes']
        assert attributes.get('value' if item['type'] == 'markdown' else 'label')
        assert set(attributes) <= {'value', 'label', 'description', 'placeholder', 'render', 'options'}
        assert item.get('validations', {'required': True}) == {'required': True}
        for option in attributes.get('options', ()):
            assert set(option) <= {'label', 'required'}
        for verb in re.findall(r'`lm ([a-z]+)', str(attributes)):
            assert verb in ('bench', 'train', 'check', 'doctor')


def test_the_workflow_runs_what_ci_runs():
    workflow = read('.github/workflows/ci.yml')
    (job,) = workflow['jobs'].values()
    assert [step['run'] for step in job['steps'] if 'run' in step] == ['.ci/run']
    (versions,) = (step['with']['python-version'].split() for step in job['steps'] if 'python' in step.get('uses', ''))
    assert versions == ['3.12', '3.11'], 'the last one is the default'
    assert set(workflow[True]) == {'push', 'pull_request', 'workflow_dispatch'}  # YAML reads `on` as True


def test_ci_builds_the_site_runs_the_tests_and_checks_types():
    lines = (tiny.ROOT / '.ci' / 'run').read_text().splitlines()
    assert (
        lines.index('scripts/docs.sh') < lines.index('scripts/test.sh --all') < lines.index('scripts/lint.sh pyright')
    )


def test_hooks_run_the_checks_of_the_tests():
    script = (tiny.ROOT / 'scripts' / 'lint.sh').read_text()
    checks = re.search(r'\|\| set -- (.*)$', script, re.MULTILINE)[1].split()
    (repository,) = read('.pre-commit-config.yaml')['repos']
    assert repository['repo'] == 'local'
    assert [hook['entry'] for hook in repository['hooks']] == [f'scripts/lint.sh {check}' for check in checks]
    assert [hook['id'] for hook in repository['hooks']] == checks
    assert all(hook['language'] == 'system' and not hook['pass_filenames'] for hook in repository['hooks'])
    (quick,) = re.findall(
        r'^VENV=\S+ scripts/lint\.sh (.*)$', (tiny.ROOT / 'scripts' / 'test.sh').read_text(), re.MULTILINE
    )
    assert [*quick.split(), 'pyright'] == checks, 'the tests wait for all but the types, which CI checks'


def test_the_guide_for_contributors_names_existing_files():
    text = (tiny.ROOT / 'CONTRIBUTING.md').read_text()
    names = re.findall(r'(?:^|`)((?:scripts|tests|docs|lm|\.ci)/[\w./]*)', text, re.MULTILINE)
    assert len(names) > 8
    for name in names:
        assert (tiny.ROOT / name).exists(), name
