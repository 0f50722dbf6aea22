'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const main = document.querySelector('main');

function add(parent, tag, properties = {}, text = '') {
  const element = Object.assign(document.createElement(tag), properties);
  element.textContent = text;
  return parent.appendChild(element);
}

// What the reader chose stays after a reload. Some browsers refuse to store anything for local files.
function remember(key, value) {
  try { sessionStorage.setItem(key, JSON.stringify(value)); } catch { /* nothing is remembered */ }
}
function recall(key) {
  try { return JSON.parse(sessionStorage.getItem(key)); } catch { return null; }
}

// Numbers by size, words by the alphabet; cells without a value stay at the end.
function compare(a, b, direction) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === 'number' && typeof b === 'number'
    ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true });
  return direction * order;
}

function drawTable(table) {
  const section = add(main, 'section');
  add(section, 'h2', {}, table.title);
  const element = add(add(section, 'div', { className: 'scroll' }), 'table', { className: 'figures' });
  const head = add(add(element, 'thead'), 'tr');
  const body = add(element, 'tbody');
  const side = column => (column < table.left ? 'left' : '');
  const rows = table.rows.map(cells => {
    const row = add(body, 'tr');
    cells.forEach((cell, column) => {
      const place = add(row, 'td', { className: `${side(column)} ${cell.marked ? 'marked' : ''}`.trim() });
      if (cell.link) add(place, 'a', { href: cell.link }, cell.text); else place.textContent = cell.text;
    });
    return { row, cells };
  });
  function sort(column, direction) {
    head.childNodes.forEach((heading, i) => heading.setAttribute(
      'aria-sort', i !== column ? 'none' : direction > 0 ? 'ascending' : 'descending'));
    rows.sort((a, b) => compare(a.cells[column].value, b.cells[column].value, direction));
    body.append(...rows.map(({ row }) => row));
    remember(table.title, [column, direction]);
  }
  table.columns.forEach((title, column) => {
    const heading = add(head, 'th', { className: side(column), scope: 'col' });
    add(heading, 'button', {
      title: 'sort by this column',
      onclick: () => sort(column, heading.getAttribute('aria-sort') === 'ascending' ? -1 : 1),
    }, title);
  });
  const chosen = recall(table.title);
  if (chosen && chosen[0] < table.columns.length) sort(...chosen);
  table.notes.forEach(note => add(section, 'p', { className: 'note' }, note));
}

function short(value, base) {
  if (value === null || value === undefined) return '–';
  if (base === 2 && value >= 1024 && value % 1024 === 0) return short(value / 1024 * 1000);  // 32k is 32,768
  for (const [unit, size] of [['T', 1e12], ['B', 1e9], ['M', 1e6], ['k', 1e3]])
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
  return `${+value.toPrecision(4)}`;
}

// The marks of a logarithmic axis: 1, 2, 5, 10, 20, …, or the powers of 2.
function roundMarks(low, high, base) {
  const first = Math.floor(Math.log(low) / Math.log(base));
  const powers = Array.from({ length: 64 }, (_, i) => base ** (first + i));
  const marks = base === 2 ? powers : powers.flatMap(power => [power, 2 * power, 5 * power]);
  const inside = marks.filter(mark => low <= mark && mark <= high);
  return inside.length ? inside : [low];
}

// The point of a series that is nearest to the pointer: runs are not measured at the same places.
function nearest(plot, series, index) {
  const [values, x] = [plot.data[series], plot.data[0]];
  let [left, right] = [index, index];
  while (left >= 0 && values[left] == null) left -= 1;
  while (right < values.length && values[right] == null) right += 1;
  if (left < 0) return right < values.length ? right : null;
  if (right >= values.length) return left;
  const distance = i => Math.abs(plot.valToPos(x[i], 'x') - plot.cursor.left);
  return distance(left) <= distance(right) ? left : right;
}

function drawChart(chart, place) {
  const figure = add(place, 'figure', { id: `chart-${chart.name}` });
  const canvas = add(figure, 'div');
  add(figure, 'figcaption', {}, chart.caption);
  const series = [{ label: chart.x_label, value: (plot, value) => short(value, chart.x_log) }];
  const columns = [];
  const bands = [];
  for (const curve of chart.curves) {
    columns.push([curve.x, curve.y]);
    const main = series.push({
      label: curve.label, stroke: curve.colour, width: 1.6, points: { show: curve.marked && curve.x.length < 60, size: 6 },
      ...(curve.joined ? {} : { paths: () => null }),
      value: (plot, value, of, index) => index == null || value == null ? '–'
        : `${+value.toPrecision(5)} at ${short(plot.data[0][index], chart.x_log)}`,
    });
    if (!curve.low || !curve.joined) continue;
    const ends = [curve.high, curve.low].map(values => {
      columns.push([curve.x, values]);
      return series.push({ label: '', class: 'band', width: 0, stroke: 'transparent', points: { show: false } }) - 1;
    });
    bands.push({ series: ends, fill: `${curve.colour}33`, of: main - 1 });
  }
  const axis = (label, log) => ({
    label, labelSize: 24, size: 52, values: (plot, marks) => marks.map(mark => mark === null ? '' : short(mark, log)),
    font: '12px system-ui, sans-serif', labelFont: '13px system-ui, sans-serif', grid: { stroke: '#ececec', width: 1 }, ticks: { stroke: '#ccc', width: 1 },
    ...(log ? { splits: (plot, index, low, high) => roundMarks(low, high, log), filter: (plot, marks) => marks } : { space: 36 }),
  });
  const options = {
    width: figure.clientWidth || 480, height: 320, series, bands,
    scales: {
      x: { time: false, distr: chart.x_log ? 3 : 1, log: chart.x_log || 10, range: (plot, low, high) => low < high ? [low, high] : [low / 2, low * 2] },
      y: { distr: chart.y_log ? 3 : 1 },
    },
    axes: [{ ...axis(chart.x_label, chart.x_log), size: 34, ...(chart.ticks && { splits: () => chart.ticks }) }, axis(chart.y_label, chart.y_log)],
    cursor: { dataIdx: (plot, of, index) => of === 0 ? index : nearest(plot, of, index), y: false },
    hooks: { setSeries: [(plot, of, change) => {
      if (change.show !== undefined) bands.filter(band => band.of === of).forEach(band =>
        band.series.forEach(one => plot.setSeries(one, { show: change.show })));
    }] },
  };
  const plot = new uPlot(options, uPlot.join(columns), canvas);
  new ResizeObserver(() => {
    if (figure.clientWidth) plot.setSize({ width: figure.clientWidth, height: 320 });
  }).observe(figure);
  return plot;
}

const about = document.getElementById('about');
about.textContent = `Written ${data.written}${data.refresh ? `; reloads every ${data.refresh} seconds` : ''}. Files: `;
data.files.forEach((name, i) => {
  if (i) about.append(', ');
  add(about, 'a', { href: name }, name);
});
drawTable(data.tables[0]);
const plots = {};
if (data.charts.length) {
  const section = add(main, 'section');
  add(section, 'h2', {}, 'Curves');
  add(section, 'p', { className: 'note' },
    'The pointer shows values. Drag to zoom, double-click to zoom out, click a name to hide its curve.');
  const place = add(section, 'div', { className: 'charts' });
  for (const chart of data.charts) plots[chart.name] = drawChart(chart, place);
  data.notes.forEach(note => add(section, 'p', { className: 'note' }, note));
}
data.tables.slice(1).forEach(drawTable);

if (data.refresh) {
  scrollTo(0, recall('scroll') || 0);
  setTimeout(() => { remember('scroll', scrollY); location.reload(); }, 1000 * data.refresh);
}
