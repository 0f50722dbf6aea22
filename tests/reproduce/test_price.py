"""`lm reproduce --price`: each row is what `lm check` says, and the sum is of rows that it names."""

import json

import pytest
from etils import epath

from lm import cli
from lm.errors import ConfigError
from lm.hardware import parse
from lm.reproduce import price
from lm.reproduce.descriptions import find_description, load_corpora, load_scales
from lm.reproduce.price import RunPrice, describe_data, estimate_hours, price_runs, print_price, sum_up
from lm.reproduce.runs import TableChoice, list_runs
from lm.runs.records import to_json

TABLE_2 = find_description('polysketchformer/table_2')
SMALL = ('model.n_layers = 1', 'train.tokens_per_step = 4096', 'train.steps = 1000', 'optimizer.warmup_steps = 80')


@pytest.mark.slow  # compiles for TPUs
def test_a_price_is_that_of_lm_check(tmp_path, capsys, monkeypatch):
    pytest.importorskip('libtpu')
    choice, topology = TableChoice(rows=('1', '11'), columns=('1',), gin_params=SMALL), parse('v5e:2x2')
    runs = list_runs(TABLE_2, choice)
    prices = price_runs(runs, choice, epath.Path(tmp_path), topology)
    capsys.readouterr()
    for one in prices:
        config = tmp_path / 'point.gin'
        config.write_text(one.run.point.config)
        command = ['check', '--gin_file', str(config), '--topology', topology.name, '--json', '--no_advice']
        assert cli.main(command) == 0
        (found,) = json.loads(capsys.readouterr().out)['checks']
        assert one.fits == found['fits']
        assert one.hours == pytest.approx(found['predicted']['run_hours'])
        assert one.least_hours == pytest.approx(found['speed']['run_hours'])
        assert one.chip_hours == pytest.approx(found['predicted']['run_chip_hours'])
        assert one.needed_gib == pytest.approx(found['memory']['needed_gib'])
    monkeypatch.setattr(price, 'check', None)  # the second time nothing is compiled
    assert price_runs(runs, choice, epath.Path(tmp_path), topology) == prices


@pytest.fixture
def prices():
    """Three rows: one that fits, one that does not, and one that the paper has no number for either."""
    runs = list_runs(TABLE_2, TableChoice(rows=('1-3',), columns=('16k',)))
    return [
        RunPrice(runs[0], 1e18, True, 10.0, 8.0, 320.0, 20.0),
        RunPrice(runs[1], 1e18, False, None, None, None, 40.0),
        RunPrice(runs[2], 1e18, True, 5.0, 4.0, 160.0, 20.0),
    ]


def test_the_sum_names_the_runs_that_it_leaves_out(prices):
    total, left_out = sum_up(prices, parse('v4-64'), 2.0)
    assert total.startswith('total of 2 of 3 runs: 15.0 hours, one after another (at least 12.0), 480 chip-hours')
    assert total.endswith(', 960.00 at 2 each')
    assert left_out == 'left out, as they do not fit: exact_polynomial-deg-2_16384_seed-0'


def test_a_run_without_room_is_expected_where_the_paper_had_none(prices):
    assert [one.is_expected for one in prices] == [True, True, True]  # the paper prints OOM
    assert not prices[0]._replace(fits=False).is_expected


def test_a_run_that_should_fit_and_does_not_ends_with_an_error(tmp_path, capsys):
    choice, topology = TableChoice(rows=('1',), columns=('512',), gin_params=SMALL), parse('v5e:2x2')
    (run,) = list_runs(TABLE_2, choice)
    refused = {'fits': False, 'hours': None, 'least_hours': None, 'chip_hours': None, 'needed_gib': 99.0}
    (tmp_path / price.NAME).write_text(to_json({price.identify(run.point.experiment, topology): refused}))
    with pytest.raises(ConfigError, match=r'--topology v5e:2x2: does not fit: exact_softmax.*take a larger topology'):
        print_price(TABLE_2, choice, str(tmp_path), topology)
    assert 'total of 0 of 1 run' in capsys.readouterr().out


def test_another_step_has_another_price(tmp_path):
    topology = parse('v5e:2x2')
    one, seeded, other = (
        list_runs(TABLE_2, TableChoice(rows=('1',), columns=('512',), gin_params=params))[0].point.experiment
        for params in ((), ('train.seed = 5',), ('model.n_layers = 3',))
    )
    assert price.identify(one, topology) == price.identify(seeded, topology)
    assert len({price.identify(e, t) for e in (one, other) for t in (topology, parse('v5e:4x4'))}) == 4


def test_hours_of_a_processor_come_from_the_measured_rate():
    scale = load_scales()['tiny']
    assert estimate_hours(0.0, TableChoice('tiny')) == pytest.approx(scale['seconds_to_start'] / 3600)
    assert estimate_hours(3600 * scale['flops_per_second'], TableChoice('tiny')) > 1
    assert estimate_hours(1e12, TableChoice()) is None


def test_store_and_preparation():
    choice = TableChoice(rows=('1',), columns=('512',))
    store, preparation = describe_data(choice, list_runs(TABLE_2, choice))
    tokens = load_corpora()['pg19']['text_bytes'] / load_corpora()['pg19']['bytes_per_token']
    assert f'{tokens / 1e9:.2f}B tokens, {2 * tokens / 1e9:.3g} GB, from 11 GB of text' in store
    assert preparation.startswith('preparation: about 0.583 hours')  # 11 GB at 190.7 s each
    induction = find_description('polysketchformer/appendix_f2')
    assert describe_data(TableChoice(), list_runs(induction, TableChoice())) == [
        'data: drawn by the training, no store'
    ]


def test_each_corpus_of_a_table_has_its_size():
    draft = find_description('polysketchformer_draft/section_5')
    lines = describe_data(TableChoice(), list_runs(draft, TableChoice()))
    assert [line.partition(':')[0] for line in lines] == ['store', 'preparation'] * 2
    assert 'data/pg19.gin' in lines[0]
    assert '10.6 GB of text (data/wiki40b.gin)' in lines[2]
    proteins = find_description('performer/figure_5_proteins')
    assert describe_data(TableChoice(), list_runs(proteins, TableChoice())) == [
        'store and preparation of data/proteins: configs/papers/corpora.toml has no size of this corpus'
    ]
