"""Tasks of lm-evaluation-harness on a run; `scripts/test.sh -m interop` runs the harness itself."""

import dataclasses
import importlib.util
import itertools
import json
import random
import types

import numpy as np
import pytest
import tiny

import lm
from lm.cli import main
from lm.commands.evaluate import OF_SPLITS, OF_TASKS, check_together
from lm.data.store import TokenStore
from lm.data.tokenizers import from_bytes
from lm.errors import ConfigError
from lm.eval_harness.ruler import NEEDS_NOTHING, SENTENCE, check_answers, check_fits
from lm.eval_harness.tasks import check_names, draw_examples, evaluate_tasks, known_task, read_questions

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
    text = 'what\u2028does\x85it do?'  # JSON may hold both characters as they are
    line = json.dumps(QUESTIONS[0] | {'question': text}, ensure_ascii=False)
    questions.write_bytes(f'\ufeff{line}\r\n{line}'.encode())
    assert [entry['question'] for entry in read_questions(questions)] == [text, text]


@pytest.mark.parametrize('line', ['{}', '[1]', 'x', '{"question": "a", "choices": ["b", "c"], "answer": 2}',
                                  '{"question": "a", "choices": ["b", "c"], "answer": 0.9}',
                                  '{"question": "a", "choices": ["b", "c"], "answer": true}',
                                  '{"question": "a", "choices": "bc", "answer": 0}'])  # fmt: skip
def test_a_wrong_line_is_named(questions, line):
    questions.write_text(questions.read_text() + line + '\n')
    with pytest.raises(ConfigError, match=r'physics.jsonl: line 4 is not'):
        read_questions(questions)


@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is not None, reason='lm_eval is installed')
def test_a_missing_package_is_named_with_its_installation():
    with pytest.raises(ConfigError, match=r"pip install 'lm-tpu\[harness\]'"):
        evaluate_tasks(None, ['piqa'])


def test_results_with_the_same_name_are_refused():
    check_names(['a/one.jsonl', 'two.jsonl', 'hellaswag'])
    with pytest.raises(ConfigError, match=r'--tasks b/q\.jsonl: is called q in the results, as a/q\.jsonl is; rename'):
        check_names(['a/q.jsonl', 'b/q.jsonl'])
    with pytest.raises(ConfigError, match='--tasks: names none'):
        check_names([])


@pytest.mark.parametrize(('name', 'number'), [('limit', 0), ('num_fewshot', -1), ('sample_seed', -1)])
def test_numbers_of_tasks_are_checked(name, number):
    arguments = types.SimpleNamespace(tasks='q.jsonl', **dict.fromkeys(OF_TASKS + OF_SPLITS))
    check_together(arguments)
    setattr(arguments, name, number)
    with pytest.raises(ConfigError, match=f'--{name} {number}: must be at least {number + 1}'):
        check_together(arguments)


def test_ruler_refuses_a_context_in_which_no_text_fits():
    def tokenizer(rate):
        return types.SimpleNamespace(encode=lambda text: [0] * round(len(text) / rate))

    check_fits('ruler_vt', tokenizer(4), 1024)
    with pytest.raises(ConfigError, match=r'--context_length 512: too short for ruler_vt, whose texts have at least 7'):
        check_fits('ruler_vt', tokenizer(4), 512)
    with pytest.raises(ConfigError, match=r'the tokenizer of the run has 1.5 characters a token of English'):
        check_fits('ruler_vt', tokenizer(1.5), 10_000)


def test_a_task_of_ruler_without_answers_is_refused():
    made = {'ruler_cwe': types.SimpleNamespace(dataset={'test': {'outputs': [['word'], []]}})}
    with pytest.raises(ConfigError, match=r'--context_length 900: too short for ruler_cwe'):
        check_answers(made, 900)


def test_examples_are_drawn_by_a_seed():
    def task(name, count):
        return types.SimpleNamespace(task_name=name, eval_docs=range(count))

    drawn = draw_examples([task('hellaswag', 10_042), task('piqa', 1838), task('physics', 229)], 500, 0)
    assert {name: len(set(numbers)) for name, numbers in drawn.items()} == {
        'hellaswag': 500,
        'piqa': 500,
        'physics': 229,
    }
    assert all(numbers == sorted(numbers) for numbers in drawn.values())
    assert 4000 < np.mean(drawn['hellaswag']) < 6000
    assert drawn['hellaswag'][-1] > 9000, 'not the first ones'
    assert draw_examples([task('piqa', 1838)], 500, 0)['piqa'] == drawn['piqa'], 'other tasks change no draw'
    assert draw_examples([task('piqa', 1838)], 500, 1)['piqa'] != drawn['piqa']
    group = types.SimpleNamespace(get_all_tasks=lambda: [task('piqa', 1838), task('boolq', 40)])
    assert draw_examples([group], 500, 0) == {'piqa': drawn['piqa'], 'boolq': list(range(40))}


@pytest.fixture(scope='module')
def run(reference_run):
    pytest.importorskip('lm_eval', reason='needs lm-evaluation-harness: scripts/test.sh -m interop')
    return lm.load(str(reference_run[0]))


def likelihood(run, context, continuation, length=33):
    """Computes the log-likelihood from the logits, and whether the text is greedy."""
    encode = lambda text: run.tokenizer.encode(text).tolist()  # noqa: E731
    n = len(encode(context + continuation)) - len(encode(context))
    row = np.array([run.tokenizer.eod_id, *encode(context + continuation)][-length:], np.int32)
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
    drawn = evaluate_tasks(run, [str(questions)], limit=1, sample_seed=5)
    assert drawn['n-samples']['physics']['effective'] == 1


@pytest.fixture
def folder(run, tmp_path):
    """Returns a folder of tasks in the harness's format: perplexity of the validation split, and an answer to
    generate."""
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
def test_bits_per_byte_equal_lm_evaluate(run, folder):
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

    from lm.eval_harness.adapter import RunModel

    def instance(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    model = RunModel(run)
    # No context ends with white space: the harness moves white space to the continuation.
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


@pytest.fixture
def without_hub(monkeypatch):
    """Removes the network: the harness's libraries read this setting when they are imported."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)


@pytest.fixture
def data_sets(tmp_path):
    """Writes made-up rows in the formats of HellaSwag and PIQA."""
    for split in ('train', 'validation'):
        swag = [
            {
                'ind': i,
                'activity_label': 'Coding',
                'ctx_a': f'{split} {i}: somebody writes import',
                'ctx_b': 'they',
                'ctx': f'{split} {i}: somebody writes import They',
                'endings': [f'choose ending {k} of {i}. [title] And' for k in range(4)],
                'label': str(i % 4),
            }
            for i in range(6)
        ]
        piqa = [{'goal': f'{split} {i}?', 'sol1': 'import sys', 'sol2': f'def {i}', 'label': i % 2} for i in range(6)]
        for name, rows in {'hellaswag': swag, 'piqa': piqa}.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    return tmp_path


@pytest.mark.interop
def test_hellaswag_and_piqa_from_local_files(run, reference_run, data_sets, without_hub, capsys):
    evaluate = dataclasses.replace(run.experiment.evaluate, context_length=256)
    wide = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, evaluate=evaluate))
    found = evaluate_tasks(wide, ['hellaswag', 'piqa'], 0, task_data=str(data_sets))
    assert found['n-samples']['hellaswag']['effective'] == 6
    right = []
    for i in range(6):  # PIQA by its paper: the more probable solution counts
        own = [likelihood(wide, f'Question: validation {i}?\nAnswer:', f' {s}', 257)[0]
               for s in ('import sys', f'def {i}')]  # fmt: skip
        right.append(int(np.argmax(own)) == i % 2)
    assert found['results']['piqa']['acc,none'] == pytest.approx(np.mean(right))
    shown = evaluate_tasks(wide, ['hellaswag', 'piqa'], 2, task_data=str(data_sets))
    assert shown['n-shot'] == {'hellaswag': 2, 'piqa': 2}
    assert 0 <= shown['results']['hellaswag']['acc_norm,none'] <= 1
    with pytest.raises(ConfigError, match=r"piqa: its data cannot be had: Couldn't reach 'baber/piqa' on.*--task_data"):
        evaluate_tasks(wide, ['piqa'])
    where = ['evaluate', '--run_dir', str(reference_run[0]), '--tasks', 'piqa', '--task_data', str(data_sets / 'no')]
    assert main(where) == 2
    assert 'no: is no folder' in capsys.readouterr().err


@pytest.fixture
def english(run, tmp_path):
    """Returns the run with another tokenizer of the same size. It knows the words of RULER's texts, which are too long
    otherwise."""
    import tokenizers
    from lm_eval.tasks.ruler.vt_utils import TEMPLATE

    texts = [SENTENCE, TEMPLATE] * 9
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=399, special_tokens=['</s>'], show_progress=False)
    tokenizer = from_bytes(made.to_str().encode())
    store = tiny.write_store(tmp_path / 'english', {'validation': [SENTENCE * 99]}, tokenizer)
    evaluate = dataclasses.replace(run.experiment.evaluate, context_length=3072, batch_size=1)
    experiment = dataclasses.replace(run.experiment, evaluate=evaluate)
    return dataclasses.replace(run, experiment=experiment, store=TokenStore.open(str(store)))


@pytest.mark.interop
def test_settings_of_a_task_reach_the_generation(monkeypatch):
    """Repeats of one question are samples of their own, and a setting that lm lacks is not dropped."""
    from lm_eval.api.instance import Instance

    from lm.eval_harness import adapter

    def answers(run, prompts, *, seed, **options):
        asked.append((seed, options))
        return [f'{seed}'] * len(prompts)

    asked = []
    monkeypatch.setattr(adapter, 'generate', answers)
    scorer = types.SimpleNamespace(context_length=64, batch_size=2)
    tokenizer = types.SimpleNamespace(encode=lambda text: np.arange(4))
    model = adapter.RunModel(types.SimpleNamespace(scorer=scorer, tokenizer=tokenizer))

    def ask(count, **given):
        requests = [Instance('generate_until', {}, ('a', given), i) for i in range(count)]
        return model.generate_until(requests)

    assert ask(5, do_sample=True, temperature=0.7, max_new_tokens=17, num_beams=1) == ['0', '0', '1', '1', '2']
    assert {options['max_tokens'] for _, options in asked} == {17}
    with pytest.raises(ConfigError, match=r'a task sets repetition_penalty = 1.2, which lm does not compute'):
        ask(1, repetition_penalty=1.2)


@pytest.mark.interop
def test_ruler_is_made_and_measured_by_the_tokenizer_of_the_run(english, without_hub, monkeypatch, capsys):
    from lm_eval.api.task import ConfigurableTask

    from lm.eval_harness import adapter

    made = {}
    turn = itertools.cycle([False, True])

    def answers(run, prompts, *, max_tokens, **_):
        """Replaces the model, which would take minutes: every other question gets the right answer."""
        return [' '.join(expected[run.tokenizer.decode(p)]) if next(turn) else 'Answer' for p in prompts]

    expected = {}
    build = ConfigurableTask.build_all_requests

    def noted(task, *args, **options):
        build(task, *args, **options)
        made[task.config.task] = task.dataset['test']
        expected.update({request.args[0]: request.doc['outputs'] for request in task.instances})

    monkeypatch.setattr(ConfigurableTask, 'build_all_requests', noted)
    monkeypatch.setattr(adapter, 'generate', answers)
    random.seed(0)
    with pytest.raises(
        ConfigError, match=r"its data cannot be had: Couldn't reach.*without a network there are niah_si"
    ):
        evaluate_tasks(english, ['niah_single_2'])
    result = evaluate_tasks(english, list(NEEDS_NOTHING), limit=4)
    assert 'Max length' not in capsys.readouterr().out
    assert set(made) == set(NEEDS_NOTHING)
    for name, rows in made.items():
        assert len(rows) == 500, name
        lengths = [len(english.tokenizer.encode(row['input'])) for row in rows.select(range(20))]
        assert 0.5 * 3072 < np.mean(lengths) < 3072, name
        assert result['results'][name]['3072,none'] == 0.5, name
