"""Tasks of lm-evaluation-harness over a run: the harness itself by `scripts/test.sh -m interop`."""

import importlib.util
import json

import numpy as np
import pytest

import lm
from lm.cli import main
from lm.errors import ConfigError
from lm.harness.tasks import evaluate_tasks, known_task, read_questions

QUESTIONS = [
    {'question': 'What does import do?', 'choices': ['import sys', 'qqq zzz 7#', '@@@@'], 'answer': 0},
    {'question': 'What is a function?', 'choices': ['()=)(', 'def main():'], 'answer': 'B'},
]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / 'physics.jsonl'
    path.write_text('\n'.join(map(json.dumps, QUESTIONS)) + '\n\n')
    return path


def test_questions_are_read(questions):
    assert [entry['answer'] for entry in read_questions(questions)] == [0, 1]


@pytest.mark.parametrize('line', ['{}', '[1]', 'x', '{"question": "a", "choices": ["b", "c"], "answer": 2}',
                                  '{"question": "a", "choices": "bc", "answer": 0}'])  # fmt: skip
def test_a_wrong_line_is_named(questions, line):
    questions.write_text(questions.read_text() + line + '\n')
    with pytest.raises(ConfigError, match=r'physics.jsonl: line 4 is not'):
        read_questions(questions)


@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is not None, reason='lm_eval is installed')
def test_without_the_package_it_says_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install -e '.\[harness\]'"):
        evaluate_tasks(None, ['piqa'])


@pytest.fixture(scope='module')
def run(reference_run):
    pytest.importorskip('lm_eval', reason='needs lm-evaluation-harness: scripts/test.sh -m interop')
    return lm.load(str(reference_run[0]))


def likelihood(run, context, continuation):
    """Straight from the logits, and whether it is greedy."""
    encode = lambda text: run.tokenizer.encode(text).tolist()  # noqa: E731
    n = len(encode(context + continuation)) - len(encode(context))
    row = np.array([run.tokenizer.eod_id, *encode(context + continuation)][-33:], np.int32)
    logits = np.asarray(run.model(row[None, :-1])[0], np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    own = logits[np.arange(len(row) - 1), row[1:]][-n:]
    return own.sum(), bool((logits.argmax(-1) == row[1:])[-n:].all())


@pytest.mark.interop
def test_questions_of_a_file(run, questions, reference_run, capsys):
    expected = []
    for entry in read_questions(questions):
        text = f'Question: {entry["question"]}\nAnswer:'
        own = [likelihood(run, text, f' {choice}')[0] for choice in entry['choices']]
        expected.append(int(np.argmax(own)) == entry['answer'])
    result = evaluate_tasks(run, [str(questions)], num_fewshot=0)
    assert result['results']['physics']['acc,none'] == np.mean(expected)
    assert main(['evaluate', '--run_dir', str(reference_run[0]), '--tasks', str(questions), '--limit', '1']) == 0
    assert 'acc_norm' in capsys.readouterr().out
    (written,) = (reference_run[0] / 'evaluations' / 'harness').glob('*.json')
    assert json.loads(written.read_text())['limit'] == 1


@pytest.fixture
def folder(run, tmp_path):
    """A folder of tasks in the harness's format: perplexity of the validation split, and an answer to be written."""
    text = run.tokenizer.decode(run.store.read('validation', 0, run.store.tokens('validation') - 1))
    (tmp_path / 'text.json').write_text(json.dumps({'page': text}) + '\n')
    (tmp_path / 'asked.json').write_text('\n'.join(json.dumps({'q': q, 'a': 'x'}) for q in ('import ', 'def ')))
    (tmp_path / 'own_text.yaml').write_text(f"""
task: own_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / 'text.json'}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - {{metric: bits_per_byte}}
  - {{metric: word_perplexity}}
""")
    (tmp_path / 'own_answers.yaml').write_text(f"""
task: own_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / 'asked.json'}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list:
  - {{metric: exact_match}}
""")
    return tmp_path


@pytest.mark.interop
def test_bits_per_byte_are_those_of_lm_evaluate(run, folder):
    result = evaluate_tasks(run, ['own_text', 'own_answers'], include_path=str(folder))
    theirs = result['results']['own_text']['bits_per_byte,none']
    assert theirs == pytest.approx(lm.evaluate(run)['bits_per_byte'], rel=1e-6)
    assert result['results']['own_answers']['exact_match,none'] == 0.0


def test_an_unknown_task_gets_a_hint():
    with pytest.raises(ConfigError, match=r'no such task; did you mean own_answers'):
        known_task('own_answer', ['own_answers', 'own_text'])
    assert known_task('own_text', ['own_text']) == 'own_text'


@pytest.mark.interop
def test_requests_are_answered_by_the_model(run):
    from lm_eval.api.instance import Instance

    from lm.harness.adapter import RunModel

    def instance(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    model = RunModel(run)
    # No context ends with white space: the harness gives that to the continuation.
    greedy = lm.generate(run, 'import', max_tokens=4, temperature=0)
    pairs = [('def main', '(x):'), ('', 'import sys'), ('import', greedy), ('x = 1\n' * 30 + 'y', ' = 2')]
    found = model.loglikelihood([instance('loglikelihood', *pair) for pair in pairs])
    for pair, (value, is_greedy) in zip(pairs, found, strict=True):
        expected = likelihood(run, *pair)
        assert value == pytest.approx(expected[0], abs=1e-4), pair
        assert is_greedy == expected[1]
    options = {'until': ['('], 'max_gen_toks': 12}
    prompts = ['import ', 'def m', 'class A']
    answers = model.generate_until([instance('generate_until', prompt, options) for prompt in prompts])
    assert answers == lm.generate(run, prompts, max_tokens=12, temperature=0, until=['('])
