"""`lm distill --forecast`: a teacher that copies, its student in both stages, and what is said of them."""

import re

import numpy as np
import pytest
import tiny

from lm.data.tokenizers.amino_acids import AminoAcids, AminoAcidsConfig

TEACHER = {
    'model.vocab_size': 32, 'model.n_layers': 2, 'model.d_model': 64, 'model.n_heads': 2, 'model.head_dim': 32,
    'model.key_offset': 0.5, 'model.attention': '@softmax()', 'train.context_length': 128, 'train.steps': 400,
    'train.tokens_per_step': 4096, 'train.log_every': 50, 'train.eval_every': None, 'evaluate.batch_size': 16,
    'optimizer.rule': '@adamw()', 'optimizer.peak_learning_rate': 4e-3, 'optimizer.warmup_steps': 10,
    'optimizer.schedule': '@wsd()', 'wsd.decay_share': 0.3,
}  # fmt: skip
"""Half of each key comes from the token before, so that one layer can copy."""
STUDENT = ['--gin_file', str(tiny.ROOT / 'configs/attention/hedgehog.gin')]


def write_copies(folder):
    """Writes a store of random letters. Training texts repeat parts of themselves, texts of the evaluation do not."""
    tokenizer, random = AminoAcids(AminoAcidsConfig().contents()), np.random.default_rng(0)

    def draw(count):
        return ''.join(random.choice(list('ACDEFGHIKLMNPQRSTVWY'), count))

    def repeat(text):
        while len(text) < 120:
            start, size = random.integers(0, 24), random.integers(12, 25)
            text += text[start : start + size]
        return text

    texts = {'train': [repeat(draw(48)) for _ in range(8000)], 'validation': [draw(120) for _ in range(400)]}
    return tiny.write_store(folder, texts, tokenizer)


def run(*arguments):
    done = tiny.lm(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_student_is_measured_beside_a_teacher_that_copies(tmp_path):
    teacher, align, pilot = (str(tmp_path / name) for name in ('teacher', 'align', 'pilot'))
    run('train', '--run_dir', teacher, *tiny.params(TEACHER | {'data.path': str(write_copies(tmp_path / 'store'))}))
    stage = ['distill', '--teacher', teacher, *STUDENT, '--gin_file']
    recipes = tiny.ROOT / 'configs/recipes'
    run(*stage, str(recipes / 'align_short.gin'), '--stage', 'align', '--run_dir', align, '--set', 'train.steps=60')
    measure = ['distill', '--forecast', '--teacher', teacher, '--run_dir']
    first = run(*measure, align)
    assert first.startswith('no needles: ')  # the tokenizer has no words
    known, found = (float(re.search(rf'recall of the {who}: (-?[\d.]+)', first)[1]) for who in ('teacher', 'student'))
    assert found < known
    assert known > 0.1
    assert f'no forecast: {align} has no steps of stage 2; make some: lm distill --stage distill' in first
    changes = {
        'train.steps': 80, 'optimizer.peak_learning_rate': 1e-3, 'checkpoint.save_every_steps': 10,
        'checkpoint.keep_every': 10,
    }  # fmt: skip
    again = [str(recipes / 'distill_short.gin'), '--stage', 'distill', '--init_from', align, '--run_dir', pilot]
    run(*stage, *again, *tiny.params(changes))
    second = run(*measure, pilot)
    shares = [float(row.split()[-1]) for row in re.findall(r'^ +\d+ +[\d,]+ +-?[\d.]+ +-?[\d.]+$', second, re.M)]
    assert len(shares) == 8
    assert all(0 < share < 1 for share in shares)
    *_, last = second.splitlines()
    assert last.startswith(('test: ', '95% of', 'no forecast: '))
