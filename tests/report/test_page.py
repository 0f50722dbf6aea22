"""The page of `lm report`, opened in a real browser: sorting, values under the pointer, differences and links."""

import functools
import html
import http.server
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import tiny
from made_up_runs import write_run

from lm.attention.polynomial import Polynomial
from lm.attention.softmax import Softmax
from lm.cli import main
from lm.runs.records import Run

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
ASK = """
<script>
addEventListener('load', () => setTimeout(() => {
  const texts = query => [...document.querySelectorAll(query)].map(element => element.textContent);
  const answer = (() => { %s })();
  const place = Object.assign(document.createElement('pre'), {id: 'answer', textContent: JSON.stringify(answer)});
  document.body.append(place);
}, 200));
</script>
"""
PERPLEXITIES = """
  const table = document.querySelector('table.figures');
  const titles = [...table.querySelectorAll('th')].map(heading => heading.textContent);
  const column = titles.indexOf('perplexity per token');
  const read = () => [...table.querySelectorAll('tbody tr')].map(row => row.children[column].textContent);
"""


def open_in_browser(address: str, profile: pathlib.Path) -> str:
    """Returns the document after its scripts ran."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip('needs a browser: apt-get install chromium')
    command = [browser, '--headless=new', '--no-sandbox', '--disable-gpu', '--window-size=1280,2000', '--dump-dom']
    command += ['--virtual-time-budget=10000', f'--user-data-dir={profile}', address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def browse(page: pathlib.Path, script: str):
    """Opens a copy of the page from the disk and returns what the JavaScript function body `script` returns there."""
    copy = page.with_name('asked.html')
    copy.write_text(page.read_text().replace('</body>', ASK % script + '</body>'))
    document = open_in_browser(copy.as_uri(), page.parent / 'profile')
    found = re.search(r'<pre id="answer">(.*?)</pre>', document, re.DOTALL)
    assert found, document[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope='module')
def page(tmp_path_factory) -> pathlib.Path:
    """The page of three runs without a file beside it: the runs are called a, b and <c> <!--."""
    root = tmp_path_factory.mktemp('runs')
    write_run(root / 'a', Softmax(), steps=1000, quality=0.2)
    write_run(root / 'b', Softmax(), steps=1000, seed=1)
    write_run(root / '<c> <!--', Polynomial(), steps=200, log_every=25)
    assert main(['report', str(root), '--out', str(root / 'out'), '--no_pictures']) == 0
    alone = root / 'alone' / 'out'
    alone.mkdir(parents=True)
    shutil.copyfile(root / 'out' / 'report.html', alone / 'report.html')
    return alone / 'report.html'


def test_a_click_sorts_a_table(page):
    first, once, twice = browse(
        page,
        PERPLEXITIES
        + """
  const seen = [read()];
  for (let i = 0; i < 2; i++) {
    table.querySelectorAll('th button')[column].click();
    seen.push(read());
  }
  return seen;
""",
    )
    assert len(set(first)) == 3
    assert once == sorted(first, key=float) != first
    assert twice == once[::-1]


def test_tables_fit_a_laptop_and_curves_have_perplexity_and_speed(page):
    cut_off, charts = browse(
        page,
        """
  const isCutOff = box => box.scrollWidth > box.clientWidth;
  return [[...document.querySelectorAll('.scroll')].map(isCutOff), Object.keys(plots)];
""",
    )
    assert cut_off
    assert not any(cut_off)
    assert {'loss', 'perplexity_steps', 'speed_steps'} <= set(charts)


def test_numbers_are_sorted_by_size_and_dashes_stay_last(page):
    script = """
  return [[3, null, 20, 100], ['10', '9', null]].map(
    values => [1, -1].map(direction => [...values].sort((a, b) => compare(a, b, direction))));
"""
    assert browse(page, script) == [[[3, 20, 100, None], [100, 20, 3, None]], [['9', '10', None], ['10', '9', None]]]


def test_the_pointer_shows_the_values_of_each_curve(page):
    run = Run.read(page.parents[2] / '<c> <!--')
    before, after, drawn = browse(
        page,
        """
  const plot = plots.position;
  const seen = [texts('#chart-position .u-value')];
  const box = plot.over.getBoundingClientRect();
  const x = plot.valToPos(Math.sqrt(65 * 128), 'x');
  const look = {clientX: box.left + x, clientY: box.top + 50, bubbles: true};
  plot.over.dispatchEvent(new MouseEvent('mouseenter', look));
  plot.over.dispatchEvent(new MouseEvent('mousemove', look));
  plot.setCursor({left: x, top: 50});
  seen.push(texts('#chart-position .u-series').map(text => text));
  const canvas = plot.ctx.getImageData(0, 0, plot.ctx.canvas.width, plot.ctx.canvas.height).data;
  seen.push(canvas.some(value => value));
  return seen;
""",
    )
    assert set(before) <= {'–', '--'}
    (expected,) = [b['loss'] for b in run.last_evaluation['loss_by_position'] if b['start'] == 64]
    (shown,) = [text for text in after if 'Polynomial' in text]
    assert f'{expected:.5g} at 91.21' in shown
    assert drawn, 'the canvas is empty'


def test_the_pointer_shows_the_nearest_point_where_runs_differ_in_their_points(page):
    between, wrong = browse(
        page,
        """
  const plot = plots.loss;
  const [x, values] = [plot.data[0], plot.data[plot.series.findIndex(one => /Polynomial/.test(one.label))]];
  const known = [...x.keys()].filter(i => values[i] != null);
  const inner = [...x.keys()].filter(i => values[i] == null && i > known[0] && i < known.at(-1));
  const place = i => plot.valToPos(x[i], 'x');
  const wrong = inner.filter(i => {
    plot.setCursor({left: place(i), top: 50});
    const shown = plot.cursor.idxs[plot.data.indexOf(values)];
    return known.some(k => Math.abs(place(k) - place(i)) < Math.abs(place(shown) - place(i)) - 1e-6);
  });
  return [inner.length, wrong.length];
""",
    )
    assert between > 3
    assert wrong == 0


def test_short_and_long_runs_are_both_drawn(page):
    labels = browse(page, "return texts('#chart-loss .u-label');")
    assert [label for label in labels if 'steps' in label] == ['Softmax, steps 1000', 'Polynomial (deg=4), steps 200']


def test_differences_and_links(page):
    links, tables = browse(
        page,
        """
  const rows = [...document.querySelectorAll('table.figures')].map(table => [...table.querySelectorAll('tbody tr')].map(
    row => [...row.children].map(cell => cell.textContent)));
  return [[...document.querySelectorAll('table.figures td a')].map(a => a.getAttribute('href')), rows];
""",
    )
    rows = {row[0]: row[1:] for row in tables[1]}
    assert rows['train.steps'] == ['200', '1000', '1000']
    assert rows['train.seed'] == ['0', '0', '1']
    assert rows['polynomial.degree'] == ['4', '–', '–']
    assert 'model.n_layers' not in rows, 'equal in all runs'
    assert links[:3] == ['../%3Cc%3E%20%3C%21--/', '../a/', '../b/']


def test_the_page_asks_for_nothing_else(page, tmp_path):
    """A server sees what the browser reads when it opens the page."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_request(self, code='-', size='-'):
            asked.append(self.path)

    served = shutil.copyfile(page, tmp_path / 'report.html').parent
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Handler, directory=served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    dom = open_in_browser(f'http://127.0.0.1:{server.server_port}/report.html', tmp_path / 'profile')
    server.shutdown()
    assert 'uplot' in dom
    assert set(asked) <= {'/report.html', '/favicon.ico'}
    assert not re.findall(r'(?:src|href)="?(?:https?:)?//', page.read_text()), 'an address of another machine'


def test_watching_refreshes_the_report_and_ctrl_c_ends_it(tmp_path):
    root, out = tmp_path / 'runs', tmp_path / 'out'
    run = write_run(root / 'a', Softmax(), steps=1000)
    lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (run / 'metrics.jsonl').write_text(''.join(lines[: len(lines) // 2]))
    code = 'import sys; from lm.report import watch; watch.POLL_SECONDS = 0.2; import lm.cli; sys.exit(lm.cli.main())'
    command = [sys.executable, '-c', code, 'report', str(root), '--out', str(out), '--no_pictures', '--watch']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=tiny.environment())

    def read_until(words: str) -> str:
        return next(line for line in process.stdout if words in line)

    try:
        read_until('Ctrl-C ends')
        assert '"refresh": 10' in (out / 'report.html').read_text()
        assert ' of 1,000' in (out / 'report.md').read_text()
        time.sleep(1)
        before = (out / 'report.html').stat().st_mtime_ns
        time.sleep(1)
        assert (out / 'report.html').stat().st_mtime_ns == before, 'nothing changed'
        with open(run / 'metrics.jsonl', 'a') as file:
            file.writelines(lines[len(lines) // 2 :])
        assert read_until('report.html').endswith(f'{out}/report.html: 1 run, 0 not finished\n')
        assert ' of 1,000' not in (out / 'report.md').read_text()
        write_run(root / 'b', Polynomial(), steps=100)
        assert '2 runs' in read_until('2 runs')
        # In the middle of a refresh, at any place.
        (run / 'evaluations').mkdir()
        (run / 'evaluations' / 'new.json').write_text('{}')
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    assert not [name for name in os.listdir(out) if name.startswith('.')]
    assert (out / 'report.html').read_text().rstrip().endswith('</html>')
