"""A run and its exports give the same results per document in lm-evaluation-harness; needs PyTorch:
`scripts/test.sh -m interop`."""

import json

import numpy as np
import pytest
import tokenizers
from test_exchange import write_llama
from test_gguf import byte_level

import lm
from lm.cli import main

pytestmark = pytest.mark.interop
torch = pytest.importorskip('torch', reason='needs PyTorch: scripts/test.sh -m interop')
transformers = pytest.importorskip('transformers', reason='needs transformers: scripts/test.sh -m interop')
lm_eval = pytest.importorskip('lm_eval', reason='needs lm-evaluation-harness: scripts/test.sh -m interop')

WORDS = ['the', 'whale', 'sea', 'old', 'man', 'and', 'ship', 'of', 'a', 'white', 'captain']
DOCUMENTS = 12
LENGTH = 64
"""Tokens of a context; some documents are longer."""


def write_tasks(folder) -> None:
    """Writes a task of questions with three answers, and a task of texts to continue."""
    draw = np.random.default_rng(0)
    sentence = lambda n: ' '.join(draw.choice(WORDS, n))  # noqa: E731
    rows = [{'q': sentence(3 + 4 * i), 'choices': [sentence(2) for _ in range(3)], 'label': i % 3}
            for i in range(DOCUMENTS)]  # fmt: skip
    (folder / 'rows.json').write_text('\n'.join(map(json.dumps, rows)))
    data = f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / "rows.json"}}}}}\ntest_split: test\n'
    (folder / 'whale_choices.yaml').write_text(f"""task: whale_choices
{data}output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - {{metric: acc}}
""")
    (folder / 'whale_texts.yaml').write_text(f"""task: whale_texts
{data}output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 6, do_sample: false}}
metric_list:
  - {{metric: exact_match}}
""")


def answer(model, folder) -> tuple[np.ndarray, list[bool], list[str]]:
    """Returns the log-likelihoods of all answers, whether each is greedy, and the texts, in the order of documents."""
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=model, tasks=['whale_choices', 'whale_texts'], task_manager=TaskManager(include_path=str(folder)),
        num_fewshot=0, log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    samples = {name: sorted(own, key=lambda one: one['doc_id']) for name, own in found['samples'].items()}
    pairs = [pair for one in samples['whale_choices'] for pair in one['filtered_resps']]
    return (
        np.array([float(value) for value, _ in pairs]),
        [str(greedy) == 'True' for _, greedy in pairs],
        [one['filtered_resps'][0] for one in samples['whale_texts']],
    )


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """Returns a run and the folder of its exports. Its tokenizer puts a token before every text, as Llama 3 does."""
    folder = tmp_path_factory.mktemp('harness')
    write_llama(folder / 'llama')
    made = tokenizers.Tokenizer.from_str(byte_level(' '.join(WORDS) * 99)[0].decode())
    made.post_processor = tokenizers.processors.TemplateProcessing('<|end|> $A', special_tokens=[('<|end|>', 1)])
    (folder / 'llama' / 'tokenizer.json').write_text(made.to_str())
    run_dir = str(folder / 'run')
    length = ['--gin_param', f'train.context_length = {LENGTH}']
    assert main(['import', str(folder / 'llama'), '--run_dir', run_dir, *length]) == 0
    for kind in ('native', 'huggingface'):
        assert main(['export', '--run_dir', run_dir, '--format', kind, '--out', str(folder / kind)]) == 0
    write_tasks(folder)
    return lm.load(run_dir), folder


@pytest.mark.parametrize('kind', ['native', 'huggingface'])
def test_an_export_gives_the_same_result_per_document(kind, exported, capsys):
    from lm_eval.models.huggingface import HFLM

    from lm.eval_harness.adapter import RunModel

    run, folder = exported
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / kind / 'tokenizer.json'), bos_token='<|end|>', eos_token='<|endoftext|>'
    )

    def load(dtype):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / kind, trust_remote_code=True, dtype=dtype)
        options = {'batch_size': 4, 'max_length': LENGTH, 'add_bos_token': True}
        return HFLM(pretrained=model.eval(), tokenizer=tokenizer, **options)

    ours, theirs, half = (answer(model, folder) for model in (RunModel(run), load(torch.float32), load(torch.bfloat16)))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    assert ours[1:] == theirs[1:]
    best = [values[0].reshape(DOCUMENTS, 3).argmax(-1) for values in (ours, theirs, half)]
    assert best[0].tolist() == best[1].tolist()
    # bfloat16 keeps eight bits of a number, so log-likelihoods differ by per cents, and near ties change.
    difference = np.abs(half[0] - ours[0]).max()
    with capsys.disabled():
        print(f'\n{kind}: float32 {np.abs(ours[0] - theirs[0]).max():.1e} nats, bfloat16 {difference:.2f} nats of '
              f'{np.abs(ours[0]).max():.0f}; {(best[0] != best[2]).sum()} of {DOCUMENTS} choices change')  # fmt: skip
    assert 1e-4 < difference < 0.05 * np.abs(ours[0]).max()
