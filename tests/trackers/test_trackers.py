"""Trackers get the figures of a run and its outcome, and none of them stops it."""

import base64
import contextlib
import dataclasses
import http.server
import json
import logging
import math
import os
import sys
import threading
import types

import numpy as np
import pytest
import tiny
from etils import epath

from lm.config.configurable import REGISTRY, configurable
from lm.config.load import load
from lm.config.text import dump
from lm.errors import ConfigError, Diverged, Preempted, WrongResults
from lm.experiment import Experiment
from lm.runs.run_dir import RunDir
from lm.trackers import Tracker, Trackers, TrackerWriter, tensorboard
from lm.trackers.base import RunFacts
from lm.trackers.services import Trackio, Wandb
from lm.trackers.tensorboard import TensorBoard
from lm.trackers.webhook import Webhook, make_request

RECORD = {'kind': 'train', 'step': 3, 'loss': 2.5, 'mfu': None, 'grad_norm': float('inf')}


@pytest.fixture
def facts(tmp_path):
    return RunFacts('mine', epath.Path(tmp_path), {'train.steps': '40'})


@pytest.fixture
def server():
    """Returns (address, the bodies that were posted to it)."""
    posted = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers['Content-Length']))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}/hook', posted
        server.shutdown()


def test_gin_names_trackers_and_a_resumed_run_may_change_them():
    experiment = load([], ['train.trackers = [@webhook(), @wandb()]', "wandb.mode = 'offline'"], root=Experiment)
    assert experiment.train.trackers == (Webhook(), Wandb(mode='offline'))
    text = [line for line in dump(experiment).splitlines() if '=' in line]
    assert load([], text, root=Experiment) == experiment
    assert Experiment().train.trackers == ()
    with pytest.raises(ConfigError, match=r'webhook\.url: must begin with http'):
        Webhook(url='ftp://x')


@pytest.mark.parametrize(
    ('error', 'event'),
    [
        (None, 'done'),
        (Preempted('told to stop'), 'preempted'),
        (Diverged('not finite'), 'diverged'),
        (WrongResults('chip 3'), 'wrong results'),
        (OSError('full'), 'failed'),
    ],
)
def test_the_webhook_reports_how_the_run_ended(facts, server, error, event, monkeypatch):
    monkeypatch.setenv('MY_HOOK', server[0])
    with contextlib.suppress(type(error) if error else ()), Trackers([Webhook(url='$MY_HOOK')], facts) as trackers:
        trackers.write(RECORD)
        if error:
            raise error
    (body,) = server[1]
    assert (body['event'], body['run'], body['step']) == (event, 'mine', 3)
    assert body['message'] == (str(error) if error else 'done')
    assert event in body['text']


def test_a_failing_tracker_is_reported_once_and_stops_nothing(facts, caplog):
    @configurable('test_broken')
    class Broken(Tracker):
        def open(self, run):
            return BrokenWriter()

    class BrokenWriter(TrackerWriter):
        def write(self, step, numbers):
            raise RuntimeError('no\nconnection')

    with caplog.at_level(logging.WARNING), Trackers([Broken(), Webhook(url='$NOT_SET')], facts) as trackers:
        trackers.write(RECORD)
        trackers.write(RECORD)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith("train.trackers[1] = @webhook(): ValueError: webhook.url = '$NOT_SET'")
    assert said[1] == ('train.trackers[0] = @test_broken(): RuntimeError: no connection; the run goes on without it')


def test_an_address_in_the_configuration_is_announced(facts, caplog, monkeypatch):
    monkeypatch.setenv('OWN', 'http://127.0.0.1:9/x')
    with caplog.at_level(logging.WARNING):
        Webhook(url='http://name:key@127.0.0.1:9/x').open(facts)
        Webhook(url='$OWN').open(facts)
    assert caplog.messages == [
        'webhook.url: 127.0.0.1:9 gets a message when this run ends, as the configuration says; no file keeps the '
        'address: set LM_WEBHOOK before a resume'
    ]
    for url in ('https://127.0.0.1/$SECRET', '$OWN/more', 'http://x/${SECRET}'):
        with pytest.raises(ConfigError, match='must be one environment variable'):
            Webhook(url=url)


def test_a_name_and_a_password_in_the_address_become_a_header():
    request = make_request('https://me:a%2Fb@example.org:8443/hook?x=1', b'{}')
    assert request.full_url == 'https://example.org:8443/hook?x=1'
    assert request.get_header('Authorization') == 'Basic ' + base64.b64encode(b'me:a/b').decode()
    assert make_request('https://example.org/hook', b'{}').get_header('Authorization') is None


def test_a_dead_webhook_is_only_a_warning(facts, caplog):
    with caplog.at_level(logging.WARNING), Trackers([Webhook(url='http://127.0.0.1:9/x')], facts):
        pass
    assert 'the run goes on without it' in caplog.text


def test_a_missing_package_is_named(facts, caplog, monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'trackio', None)
    with caplog.at_level(logging.WARNING), Trackers([Trackio()], facts):
        pass
    assert "pip install 'trackio'" in caplog.text


def test_records_of_services_are_of_one_run_between_rewinds(tmp_path, monkeypatch):
    begun, module = [], types.SimpleNamespace(finish=lambda: None)
    module.init = lambda **options: begun.append(options.get('id', options['name'])) or module
    for name in ('wandb', 'trackio'):
        monkeypatch.setitem(__import__('sys').modules, name, module)
    for folder, start, rewinds in (('a', 0, 0), ('a', 20, 0), ('a', 10, 1), ('b', 0, 0)):
        run = RunFacts('seed-0', epath.Path(tmp_path) / folder / 'seed-0', {}, start, rewinds)
        with Trackers([Wandb(), Trackio()], run):
            pass
    one, again, rewound, other = begun[::2]
    assert begun[1::2] == begun[::2]
    assert one == again
    assert rewound == f'{one}-rewind1'
    assert len({one, rewound, other}) == 3


def test_the_end_of_a_resumed_run_has_a_step(tmp_path, monkeypatch):
    ends = []
    writer = types.SimpleNamespace(event=lambda *end: ends.append(end), close=lambda: None)
    monkeypatch.setattr(Webhook, 'open', lambda self, run: writer)
    with Trackers([Webhook(url='http://127.0.0.1:9/x')], RunFacts('mine', epath.Path(tmp_path), {}, 5000)):
        pass
    assert ends == [('done', 5000, 'done')]


@pytest.mark.parametrize('name', [name for name, cls in REGISTRY.items() if issubclass(cls, Tracker)])
def test_every_tracker_follows_a_run_and_never_stops_it(name, facts, monkeypatch):
    monkeypatch.setenv('WANDB_MODE', 'disabled')
    monkeypatch.setenv('TRACKIO_DIR', str(facts.path))
    assert REGISTRY[name].gin_resume
    for end in (None, Diverged('loss')):
        with contextlib.suppress(Diverged), Trackers([REGISTRY[name]()], facts) as trackers:
            trackers.begin(lambda: [RECORD])
            trackers.write(RECORD | {'step': 4})
            if end:
                raise end


def test_other_processes_write_nothing(facts, server):
    with Trackers([Webhook(url=server[0])], facts, enabled=False) as trackers:
        trackers.write(RECORD)
    assert server[1] == []


def events_of(path) -> list:
    """Returns the contents of an event file."""
    from tensorboardX.proto.event_pb2 import Event

    data, found = path.read_bytes(), []
    while data:  # length, its checksum, the record, its checksum
        size = int.from_bytes(data[:8], 'little')
        found.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


def test_tensorboard_holds_the_numbers_without_tensorflow(facts):
    with Trackers([TensorBoard()], facts) as trackers:
        trackers.write(RECORD)
        trackers.write(RECORD | {'step': 4, 'loss': 2.0})
    (path,) = (facts.path / 'tensorboard').iterdir()
    found = {(event.step, value.tag): value.simple_value for event in events_of(path) for value in event.summary.value}
    assert found == {(3, 'train/loss'): 2.5, (4, 'train/loss'): 2.0}


def test_a_restart_hides_the_steps_that_are_repeated(facts):
    (facts.path / 'tensorboard').mkdir()
    old = facts.path / 'tensorboard' / 'events.out.tfevents.1'
    old.touch()
    with Trackers([TensorBoard()], dataclasses.replace(facts, start=3)) as trackers:
        trackers.write(RECORD | {'step': 4})
    (path,) = (path for path in old.parent.iterdir() if path != old)
    assert [event.step for event in events_of(path) if event.HasField('session_log')] == [4]


def test_train_tensorboard_writes_through_clu(tmp_path, monkeypatch):
    written = []

    def writer(folder):
        return types.SimpleNamespace(
            write_scalars=lambda step, scalars: written.append((folder, step, scalars)),
            close=lambda: written.append('closed'),
        )

    module = types.SimpleNamespace(metric_writers=types.SimpleNamespace(SummaryWriter=writer))
    monkeypatch.setitem(sys.modules, 'clu', module)
    monkeypatch.setattr(tensorboard.importlib.util, 'find_spec', lambda name: 'there')
    run = RunDir(tmp_path)
    record = {'kind': 'train', 'step': 4, 'loss': np.float32(2), 'mfu': None, 'bad': math.inf, 'split': 'test', 'n': 3}
    with run.track((), dump(Experiment()), True, tensorboard=True) as trackers:  # noqa: SIM117
        with run.metrics(trackers=trackers) as metrics:
            metrics.write(record)
    expected = (str(tmp_path / 'tensorboard'), 4, {'train/loss': 2.0, 'train/n': 3.0})
    assert written == [expected, 'closed']
    # A tracker that writes there itself is enough.
    written.clear()
    with run.track((TensorBoard(),), dump(Experiment()), True, tensorboard=True) as trackers:
        trackers.write(record)
    assert written == []
    assert len(list((tmp_path / 'tensorboard').iterdir())) == 1


def test_metrics_reach_the_trackers(tmp_path, server):
    run = RunDir(tmp_path / 'run')
    with run.track((Webhook(url=server[0]),), dump(Experiment()), True) as trackers:  # noqa: SIM117
        with run.metrics(trackers=trackers) as metrics:
            metrics.write(RECORD)
    assert server[1][0]['step'] == 3
    assert trackers.run.bindings['train.steps'] == '125000'


def test_a_training_reports_its_end(tiny_flags, tmp_path, server):
    flags = tiny.params({
        'train.trackers': '[@webhook(), @tensorboard()]', 'webhook.url': server[0], 'train.steps': 6,
        'train.log_every': 2,
    })  # fmt: skip
    done = tiny.lm('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, *flags)
    assert done.returncode == 0, done.stderr
    assert [(body['event'], body['step']) for body in server[1]] == [('done', 6)]
    assert list((tmp_path / 'run' / 'tensorboard').iterdir())


@pytest.mark.interop
def test_weights_and_biases_works_offline(facts):
    pytest.importorskip('wandb', reason='needs wandb: scripts/test.sh -m interop')
    with Trackers([Wandb(mode='offline')], facts) as trackers:
        trackers.write(RECORD)
    assert trackers._writers
    assert list((facts.path / 'wandb').glob('offline-run-*/*.wandb'))


@pytest.mark.interop
def test_trackio_keeps_the_numbers(facts, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, 'TRACKIO_DIR', str(tmp_path / 'trackio'))
    pytest.importorskip('trackio', reason='needs trackio: scripts/test.sh -m interop')
    with Trackers([Trackio(project='test_lm')], facts) as trackers:
        trackers.write(RECORD)
    assert trackers._writers
    assert [path for path in (tmp_path / 'trackio').rglob('*') if path.is_file()]
