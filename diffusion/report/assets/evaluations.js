// Evaluations: tables of checkpoints and settings of sampling, scores per category, examples, cost, published scores.
'use strict';

const directedTitle = name => {
  const better = page.data.better[name];
  return `${metricTitle(name)}${better ? (better === 'lower' ? ' ↓' : ' ↑') : ''}`;
};

/** Return the best of the values of a metric; null if its direction is unknown or all are equal. */
function bestOf(name, all) {
  const values = all.filter(known),
    better = page.data.better[name];
  if (!better || new Set(values).size < 2) return null;
  return better === 'lower' ? Math.min(...values) : Math.max(...values);
}

const rangeText = ends => (ends?.length ? ends.map(formatNumber).join(' to ') : '');

/** Return a cell with a value and its interval, if any. */
const scoreCell = (value, ends, best) => ({
  sort: value,
  content: formatNumber(value),
  below: ends?.length ? element('div', {class: 'interval'}, rangeText(ends)) : null,
  best: known(value) && value === best,
});

function evaluationTable() {
  const {runs} = page.data;
  const found = runs.flatMap((run, index) => run.evaluations.map(each => ({...each, run, index})));
  if (!found.length)
    return quiet('No evaluations yet: diffusion evaluate measures a checkpoint, diffusion watch all of them.');
  const names = [...new Set(found.flatMap(each => Object.keys(each.metrics)))];
  const withLoss = found.some(each => known(each.losses.loss));
  const value = (each, name) => (name === 'loss' ? each.losses.loss : each.metrics[name]);
  const shown = [...names, ...(withLoss ? ['loss'] : [])];
  const best = Object.fromEntries(shown.map(name => [name, bestOf(name, found.map(each => value(each, name)))]));
  const columns = [
    ...(several() ? [{title: 'Run', kind: 'text'}] : []),
    {title: 'Batch', kind: 'number', head: true},
    {title: 'Weights', kind: 'text'},
    ...(found.some(each => known(each.images)) ? [{title: 'Images', kind: 'number'}] : []),
    ...shown.map(name => ({title: name === 'loss' ? 'validation loss' : directedTitle(name), kind: 'number'})),
    {title: 'Evaluated', kind: 'text'},
  ];
  const rows = found.map(each => [
    ...(several() ? [{sort: each.run.label, content: runName(each.run, each.index)}] : []),
    each.batch,
    each.weights,
    ...(columns.some(column => column.title === 'Images') ? [each.images] : []),
    ...shown.map(name => scoreCell(value(each, name), each.intervals[name]?.[''], best[name])),
    {sort: each.finished, content: formatTime(each.finished)},
  ]);
  return card(
    'Evaluated checkpoints',
    sortableTable('Evaluated checkpoints', columns, rows),
    quiet('↓ lower is better, ↑ higher is better, ★ best of these checkpoints. Ranges are 95% intervals.'),
  );
}

/** Key, title and value of each setting of sampling in a row of a sweep. */
const SWEPT = [
  ['method', 'Guidance', row => row.method || 'cfg'],
  ['scale', 'Scale', row => row.scale],
  ['sampler', 'Sampler', row => row.sampler || null],
  ['shift', 'Shift', row => row.shift],
  ['steps', 'Steps', row => row.steps],
];
const isText = key => key === 'method' || key === 'sampler';

/** Return the table of all settings of sampling, and the plots of quality against guidance and against steps. */
function samplingSweep() {
  const sweeps = page.data.runs.flatMap((run, index) =>
    run.evaluations.filter(each => each.guidance.length).map(each => ({...each, run, index})),
  );
  if (!sweeps.length) return [];
  const all = sweeps.flatMap(each => each.guidance);
  const names = [...new Set(all.flatMap(row => Object.keys(row.metrics)))];
  const given = SWEPT.filter(([key]) => key === 'scale' || all.some(row => known(row[key]) && row[key] !== ''));
  const columns = [
    ...(several() ? [{title: 'Run', kind: 'text'}] : []),
    {title: 'Batch', kind: 'number'},
    ...given.map(([key, title]) => ({title, kind: isText(key) ? 'text' : 'number'})),
    ...names.map(name => ({title: directedTitle(name), kind: 'number'})),
  ];
  const rows = sweeps.toReversed().flatMap(each => {
    const best = names.map(name => bestOf(name, each.guidance.map(row => row.metrics[name])));
    return each.guidance.map(row => [
      ...(several() ? [{sort: each.run.label, content: runName(each.run, each.index)}] : []),
      each.batch,
      ...given.map(([key, , value]) => ({sort: value(row), content: settingText(key, value(row))})),
      ...names.map((name, index) => scoreCell(row.metrics[name], row.intervals[name], best[index])),
    ]);
  });
  const quality = names.includes('fid') ? 'fid' : names.find(name => page.data.better[name] === 'lower');
  const benchmark = names.find(name => all.some(row => row.intervals[name])) || quality || names[0];
  // Of several runs, the last sweep of each in the run's color; of one run, its last checkpoints.
  const lastOnes = several()
    ? page.data.runs.map((_, index) => sweeps.filter(each => each.index === index).at(-1)).filter(Boolean)
    : sweeps.slice(-6);
  const different = given.filter(([, , value]) => new Set(all.map(value)).size > 1);
  /** Return lines of points over one setting: one for each checkpoint and values of the other settings. */
  const linesOver = (swept, pointOf) => {
    const nameOf = row =>
      different
        .filter(([key, , value]) => key !== swept && known(value(row)))
        .map(([key, title, value]) => `${isText(key) ? '' : `${title.toLowerCase()} `}${settingText(key, value(row))}`)
        .join(', ');
    return lastOnes
      .flatMap(each =>
        [...new Set(each.guidance.map(nameOf))].map(name => ({
          each,
          name,
          points: each.guidance
            .filter(row => nameOf(row) === name)
            .map(row => ({...pointOf(row), order: row[swept]}))
            .filter(point => known(point.x) && known(point.y))
            .sort((a, b) => a.order - b.order),
        })),
      )
      .filter(({points}) => new Set(points.map(point => point.order)).size > 1)
      .slice(-8)
      .map(({each, name, points}, position, found) => ({
        color: several() && found.length === lastOnes.length ? each.index : position,
        label: `${several() ? `${each.run.label}, ` : ''}batch ${formatNumber(each.batch)}${name && `, ${name}`}`,
        points,
      }));
  };
  const overScale = linesOver('scale', ({metrics, scale}) => ({x: metrics.clip_score, y: metrics[quality], text: trimmed(scale)}));
  const overSteps = linesOver('steps', ({metrics, steps, intervals}) => ({
    x: known(steps) ? Math.log2(steps) : null,
    y: metrics[benchmark],
    ends: intervals[benchmark],
    text: '',
  }));
  const steps = [...new Set(overSteps.flatMap(line => line.points.map(point => point.order)))];
  return [
    tableCard('Settings of sampling', columns, rows, '★ best of its checkpoint.'),
    overScale.length
      ? card(
          `${metricTitle(quality)} against CLIP score`,
          scatter(overScale, 'CLIP score', metricTitle(quality)),
          quiet('Numbers at the points are guidance scales. Lower right is better.'),
        )
      : null,
    overSteps.length
      ? card(
          `${metricTitle(benchmark)} against steps`,
          scatter(overSteps, 'sampling steps', metricTitle(benchmark), steps.map(each => [Math.log2(each), each])),
        )
      : null,
  ];
}

const settingText = (key, value) => (!known(value) ? MISSING : isText(key) ? value : trimmed(value));

/** Return the scores of each run's last evaluation per category of prompts. */
function categoryTables() {
  return page.data.runs.flatMap((run, index) => {
    const each = run.evaluations.filter(found => Object.keys(found.categories).length).at(-1);
    if (!each) return [];
    const metrics = Object.keys(each.categories),
      names = [...new Set(metrics.flatMap(metric => Object.keys(each.categories[metric])))];
    const title = `Scores per category, ${several() ? `${run.label}, ` : ''}batch ${formatNumber(each.batch)}`;
    const columns = [{title: 'Category', kind: 'text', head: true}, ...numbers(metrics.map(metricTitle))];
    const rows = names.map(name => [
      name,
      ...metrics.map(metric => scoreCell(each.categories[metric][name], each.intervals[metric]?.[name])),
    ]);
    return [card(title, sortableTable(title, columns, rows))];
  });
}

/** Return an SVG of lines through labeled points; `marked` has the positions and labels of the ticks below. */
function scatter(groups, xTitle, yTitle, marked = null) {
  const [width, height, left, right, top, bottom] =
    innerWidth < 520 ? [340, 280, 46, 30, 16, 44] : [560, 320, 64, 30, 16, 44];
  const all = groups.flatMap(group => group.points);
  const spread = key => {
    const values = all.flatMap(point => [point[key], ...((key === 'y' && point.ends) || [])]),
      low = Math.min(...values),
      high = Math.max(...values),
      margin = 0.08 * (high - low) || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  };
  const [xLow, xHigh] = spread('x'),
    [yLow, yHigh] = spread('y');
  const x = value => left + ((width - left - right) * (value - xLow)) / (xHigh - xLow),
    y = value => height - bottom - ((height - top - bottom) * (value - yLow)) / (yHigh - yLow);
  const text = (at, content, options = {}) => {
    const node = svgElement('text', {x: at[0], y: at[1], class: 'axis', ...options});
    node.textContent = content;
    return node;
  };
  const ticks = (low, high) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / 5)),
      step = power * [1, 2, 5, 10].find(each => 5 * each * power >= high - low);
    return Array.from({length: 6}, (_, i) => (Math.ceil(low / step) + i) * step).filter(value => value <= high);
  };
  const marks = [
    ...(marked || ticks(xLow, xHigh).map(value => [value, Number(value.toPrecision(4))])).map(([value, label]) =>
      text([x(value), height - bottom + 18], label, {'text-anchor': 'middle'}),
    ),
    ...ticks(yLow, yHigh).flatMap(value => [
      svgElement('line', {x1: left, x2: width - right, y1: y(value), y2: y(value), class: 'gridline'}),
      text([left - 8, y(value) + 4], Number(value.toPrecision(3)), {'text-anchor': 'end'}),
    ]),
    text([(left + width - right) / 2, height - 6], xTitle, {'text-anchor': 'middle'}),
    text([12, top + 2], yTitle),
  ];
  const lines = groups.flatMap((group, index) => {
    const color = colorOf(group.color),
      path = svgElement('polyline', {
        points: group.points.map(point => `${x(point.x)},${y(point.y)}`).join(' '),
        fill: 'none',
        stroke: color,
        'stroke-width': 2,
        'stroke-dasharray': DASHES[group.color % 8].join(' '),
      });
    return [
      path,
      ...group.points.flatMap(point => [
        ...[point.ends || []].filter(ends => ends.length).map(([low, high]) =>
          svgElement('line', {x1: x(point.x), x2: x(point.x), y1: y(low), y2: y(high), stroke: color}),
        ),
        svgElement('circle', {cx: x(point.x), cy: y(point.y), r: 4.5, fill: color}),
        ...(groups.length < 3 || index === groups.length - 1
          ? [text([x(point.x) + 8, y(point.y) - 6], point.text, {class: 'point'})]
          : []),
      ]),
    ];
  });
  const keys = groups.map(group => {
    const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
    swatch.style.borderTopColor = colorOf(group.color);
    return element('li', {}, swatch, group.label);
  });
  const label = `${yTitle} against ${xTitle}; the table beside it has the values`;
  const attributes = {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label};
  return element('div', {}, svgElement('svg', attributes, ...marks, ...lines), element('ul', {class: 'keys'}, keys));
}

/** Return the images of each run's last evaluation of the prompts with the lowest and highest scores, by kind. */
function exampleCards() {
  return page.data.runs.flatMap(run => {
    const each = run.evaluations.find(found => Object.keys(found.examples).length);
    return Object.entries(each ? each.examples : {}).map(([metric, kinds]) =>
      card(
        `Worst and best prompts by ${metricTitle(metric)}, ${several() ? `${run.label}, ` : ''}batch ${formatNumber(each.batch)}`,
        ...Object.entries(kinds).map(([kind, both]) => {
          // A judge's scores have kinds of questions, not of prompts: a single kind of prompts has the score of all.
          const single = Object.keys(kinds).length === 1,
            ends = rangeText(each.intervals[metric]?.[single ? '' : kind]),
            mean = single ? each.metrics[metric] : each.categories[metric]?.[kind],
            text = known(mean) ? ` ${formatNumber(mean)}${ends && ` (${ends})`}` : '';
          const name = kind === 'none' ? 'all prompts' : kind.replaceAll('_', ' ');
          const heading = element('h4', {}, name, element('span', {class: 'quiet'}, text));
          const shown = ['worst', 'best'].filter(side => both[side].length);
          const sides = shown.map(side => exampleGrid(side, both[side]));
          return element('div', {class: 'kind'}, heading, element('div', {class: 'sides'}, sides));
        }),
      ),
    );
  });
}

function exampleGrid(side, images) {
  const figures = images.map(({image, prompt, why, score}) => {
    const shown = image ? picture(image, `${prompt}, ${side}`) : element('div', {class: 'lacking'}, 'no image');
    const text = why || `score ${settingText('', score)}`;
    return element('figure', {}, shown, element('figcaption', {}, element('b', {}, prompt), element('br'), text));
  });
  return element('div', {}, quiet(side), element('div', {class: 'grid'}, figures));
}

/** Return a card with a table, of limited height, and a text below. */
const tableCard = (title, columns, rows, text) =>
  card(title, element('div', {class: 'tall'}, sortableTable(title, columns, rows)), quiet(text));

/** Return, by benchmark, what training had cost at each evaluated checkpoint, in all and per point of the score. */
function costCards() {
  const {runs} = page.data;
  const names = new Set(runs.flatMap(run => run.evaluations.flatMap(each => Object.keys(each.intervals))));
  return [...names].map(name => {
    const point = runs.some(run => run.evaluations.some(each => each.metrics[name] > 1)) ? 1 : 0.01;
    const rows = runs.flatMap((run, index) => {
      const text = hours =>
        !(hours > 0) ? MISSING : known(run.cost.price) ? formatDollars(costOf(run, hours)) : `${formatHours(hours)} h`;
      let before = null;
      const evaluated = run.evaluations.filter(each => known(each.metrics[name]) && run.cost.devices && known(hoursAt(run, each.batch)));
      return evaluated.map(each => {
        const hours = hoursAt(run, each.batch) * run.cost.devices,
          score = each.metrics[name],
          added = before && score > before.score ? ((hours - before.hours) / (score - before.score)) * point : null;
        before = {score, hours};
        return [
          ...(several() ? [{sort: run.label, content: runName(run, index)}] : []),
          each.batch,
          {sort: hours, content: formatHours(hours)},
          {sort: costOf(run, hours), content: formatDollars(costOf(run, hours))},
          scoreCell(score, each.intervals[name]?.['']),
          {sort: added, content: text(added)},
          {sort: hours / score, content: text((hours / score) * point)},
        ];
      });
    });
    const titles = ['Batch', 'Device-hours', 'Dollars', 'Score', 'Per added point', 'Per point'];
    return rows.length
      ? tableCard(
          `Training cost of ${metricTitle(name)}`,
          [...(several() ? [{title: 'Run', kind: 'text'}] : []), ...numbers(titles)],
          rows,
          `A point is ${point} of the score. Per added point: training since the previous checkpoint, – if the score did not rise.`,
        )
      : null;
  });
}

/** Return, by benchmark, the published scores and that of each run's last evaluation. */
function publishedCards() {
  return Object.entries(page.data.published).map(([name, published]) => {
    const own = page.data.runs.flatMap(run => {
      const each = run.evaluations.filter(found => known(found.metrics[name])).at(-1);
      const model = each && element('b', {}, `${run.label}, batch ${formatNumber(each.batch)}`);
      return each ? [{...each, model, score: each.metrics[name], steps: each.guidance[0]?.steps, source: 'this page'}] : [];
    });
    return tableCard(
      `Published scores beside ${metricTitle(name)}`,
      [...numbers(['Score']), {title: 'Model', kind: 'text', head: true}, {title: 'Prompts', kind: 'long'}, ...numbers(['Steps']), {title: 'Source', kind: 'long'}],
      [...published, ...own]
        .sort((a, b) => b.score - a.score)
        .map(row => [
          {sort: row.score, content: trimmed(row.score)},
          {sort: row.model.textContent || row.model, content: row.model},
          row.prompts,
          {sort: Number(row.steps) || null, content: row.steps || MISSING},
          row.source,
        ]),
      'Detectors, judges, prompts and steps differ; the sources say how.',
    );
  });
}
