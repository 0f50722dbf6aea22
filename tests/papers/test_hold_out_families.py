"""TrEMBL is split as Performer splits it: held-out families, no copies, and shares that do not depend on the order."""

import gzip
import runpy

import numpy as np
import pytest
import tiny

from lm.data.sources.proteins.fasta import Fasta

SCRIPT = runpy.run_path(str(tiny.ROOT / 'configs/papers/performer/table_1/hold_out_families.py'))
HEADING = 'uniprot_acc\tseq_version\tcrc64\tmd5\tpfamA_acc\tseq_start\tseq_end\n'


def write(folder, regions: str = HEADING + 'A1\t1\tx\ty\tPF18369\t1\t9\nA2\t1\tx\ty\tPF00001\t1\t9\n') -> list[str]:
    """Writes 3,000 sequences, one of them of a held-out family and one twice; returns the arguments of the script."""
    rng = np.random.default_rng(0)
    drawn = [''.join(rng.choice(list('ACDEFGHIKL'), size=rng.integers(20, 90))) for _ in range(3000)]
    names = [f'>tr|A{i + 1}|A{i + 1}_TOY made up' for i in range(3000)]
    text = ''.join(f'{name}\n{letters[:30]}\n{letters[30:]}\n' for name, letters in zip(names, drawn, strict=True))
    text += f'>tr|A9999|COPY\n{drawn[5].lower()}\n'
    (folder / 'trembl.fasta.gz').write_bytes(gzip.compress(text.encode()))
    (folder / 'regions.tsv').write_text(regions)
    return [str(folder / name) for name in ('trembl.fasta.gz', 'regions.tsv', 'out')]


def read(folder) -> dict[str, list[str]]:
    source = Fasta(path=str(folder))
    return {
        split: [document.text for shard in source.shards(split) for document in source.read(shard, 10**6)]
        for split in source.splits()
    }


def test_families_are_held_out_and_copies_left_out(tmp_path, capsys):
    arguments = write(tmp_path)
    assert SCRIPT['main'](arguments) == 0
    known, held_out = read(tmp_path / 'out' / 'known'), read(tmp_path / 'out' / 'held_out')
    assert list(held_out) == ['test']
    assert len(held_out['test']) == 1
    assert sorted(known) == ['test', 'train', 'validation']
    together = [text for texts in known.values() for text in texts]
    assert len(together) == len(set(together)) == 2999
    assert held_out['test'][0] not in together
    assert 0.97 < len(known['train']) / 2999 < 1  # the paper: 98.9 %
    printed = capsys.readouterr().out
    lengths = [len(text) for text in known['train']]
    row = f'| train | ours | {len(lengths):,} | {min(lengths)} | {max(lengths)} | {np.mean(lengths):.2f} |'
    assert row in ' '.join(printed.split())
    assert '| held out | the paper | 29,696 | 24 | 4,208 | 330.96 |' in ' '.join(printed.split())


def test_a_sequence_stays_in_its_split(tmp_path):
    choose = SCRIPT['choose_split']
    texts = [f'{i:b}'.replace('0', 'A').replace('1', 'C') for i in range(20_000)]
    chosen = [choose(text) for text in texts]
    assert chosen == [choose(text) for text in texts]
    assert chosen.count('test') / len(texts) == pytest.approx(1_033_216 / 105_999_360, rel=0.3)
    assert 0 < chosen.count('validation') < chosen.count('test')


@pytest.mark.parametrize(
    ('regions', 'said'),
    [
        ('accession\tfamily\n', 'names no columns uniprot_acc and pfamA_acc'),
        (HEADING + 'A2\t1\tx\ty\tPF00001\t1\t9\n', 'no protein has a region of the 20 families'),
    ],
)
def test_another_table_is_refused(regions, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        SCRIPT['main'](write(tmp_path, regions))
    assert said in capsys.readouterr().err
    assert not (tmp_path / 'out').exists()
