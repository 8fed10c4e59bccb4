// Evaluations: table of checkpoints, guidance sweeps and scores per category.
'use strict';

function evaluationTable() {
  const {runs, better} = page.data;
  const found = runs.flatMap((run, index) => run.evaluations.map(each => ({...each, run, index})));
  if (!found.length)
    return quiet('No evaluations yet: diffusion evaluate measures a checkpoint, diffusion watch all of them.');
  const names = [...new Set(found.flatMap(each => Object.keys(each.metrics)))];
  const withLoss = found.some(each => known(each.losses.loss));
  const value = (each, name) => (name === 'loss' ? each.losses.loss : each.metrics[name]);
  const shown = [...names, ...(withLoss ? ['loss'] : [])];
  const best = Object.fromEntries(
    shown
      .filter(name => better[name])
      .map(name => {
        const values = found.map(each => value(each, name)).filter(known);
        // Of equal values, none is the best.
        return [
          name,
          new Set(values).size < 2 ? null : better[name] === 'lower' ? Math.min(...values) : Math.max(...values),
        ];
      }),
  );
  const columns = [
    ...(several() ? [{title: 'Run', kind: 'text'}] : []),
    {title: 'Batch', kind: 'number', head: true},
    {title: 'Weights', kind: 'text'},
    ...(found.some(each => known(each.images)) ? [{title: 'Images', kind: 'number'}] : []),
    ...shown.map(name => ({
      title:
        name === 'loss'
          ? 'validation loss'
          : `${metricTitle(name)}${better[name] ? (better[name] === 'lower' ? ' ↓' : ' ↑') : ''}`,
      kind: 'number',
    })),
    {title: 'Evaluated', kind: 'text'},
  ];
  const rows = found.map(each => [
    ...(several() ? [{sort: each.run.label, content: runName(each.run, each.index)}] : []),
    each.batch,
    each.weights,
    ...(columns.some(column => column.title === 'Images') ? [each.images] : []),
    ...shown.map(name => ({
      sort: value(each, name),
      content: formatNumber(value(each, name)),
      best: known(value(each, name)) && value(each, name) === best[name],
    })),
    {sort: each.finished, content: formatTime(each.finished)},
  ]);
  return card(
    'Evaluated checkpoints',
    sortableTable('Evaluated checkpoints', columns, rows),
    quiet('↓ lower is better, ↑ higher is better, ★ best of these checkpoints.'),
  );
}

/** Return the plot of FID against CLIP score over guidance scales, and the table of all of them. */
function guidanceSweep() {
  const sweeps = page.data.runs.flatMap((run, index) =>
    run.evaluations.filter(each => each.guidance.length).map(each => ({...each, run, index})),
  );
  if (!sweeps.length) return [];
  const names = [...new Set(sweeps.flatMap(each => each.guidance.flatMap(row => Object.keys(row.metrics))))];
  const methods = sweeps.some(each => each.guidance.some(row => row.method));
  const rows = sweeps.flatMap(each =>
    each.guidance.map(row => [
      ...(several() ? [{sort: each.run.label, content: runName(each.run, each.index)}] : []),
      each.batch,
      ...(methods ? [row.method || 'cfg'] : []),
      {sort: row.scale, content: trimmed(row.scale)},
      ...names.map(name => row.metrics[name]),
    ]),
  );
  const columns = [
    ...(several() ? [{title: 'Run', kind: 'text'}] : []),
    {title: 'Batch', kind: 'number'},
    ...(methods ? [{title: 'Guidance', kind: 'text'}] : []),
    {title: methods ? 'Scale' : 'Guidance', kind: 'number'},
    ...names.map(name => ({title: metricTitle(name), kind: 'number'})),
  ];
  const quality = names.includes('fid') ? 'fid' : names.find(name => page.data.better[name] === 'lower');
  // Of several runs, the last sweep of each in the run's color; of one run, its last checkpoints.
  const lastOnes = several()
    ? page.data.runs.map((_, index) => sweeps.filter(each => each.index === index).at(-1)).filter(Boolean)
    : sweeps.slice(-6);
  const shown = lastOnes
    .flatMap(each =>
      [...new Set(each.guidance.map(row => row.method))].map(method => ({
        ...each,
        method,
        guidance: each.guidance.filter(row => row.method === method),
      })),
    )
    .map((each, position) => ({
      color: several() && !methods ? each.index : position,
      label: `${several() ? `${each.run.label}, ` : ''}batch ${formatNumber(each.batch)}${
        methods ? `, ${each.method || 'cfg'}` : ''
      }`,
      points: each.guidance
        .filter(row => known(row.metrics.clip_score) && known(row.metrics[quality]))
        .map(row => ({x: row.metrics.clip_score, y: row.metrics[quality], text: trimmed(row.scale)}))
        .sort((a, b) => Number(a.text) - Number(b.text)),
    }))
    .filter(each => each.points.length > 1);
  return [
    shown.length
      ? card(
          `${metricTitle(quality)} against CLIP score`,
          scatter(shown, 'CLIP score', metricTitle(quality)),
          quiet('Numbers at the points are guidance scales. Lower right is better.'),
        )
      : null,
    card('Guidance sweep', element('div', {class: 'tall'}, sortableTable('Guidance sweep', columns, rows))),
  ].filter(Boolean);
}

/** Return the scores of each run's last evaluation per category of prompts. */
function categoryTables() {
  return page.data.runs.flatMap((run, index) => {
    const each = run.evaluations.filter(found => Object.keys(found.categories).length).at(-1);
    if (!each) return [];
    const metrics = Object.keys(each.categories),
      names = [...new Set(metrics.flatMap(metric => Object.keys(each.categories[metric])))];
    const title = `Scores per category, ${several() ? `${run.label}, ` : ''}batch ${formatNumber(each.batch)}`;
    return [
      card(
        title,
        sortableTable(
          title,
          [
            {title: 'Category', kind: 'text', head: true},
            ...metrics.map(metric => ({title: metricTitle(metric), kind: 'number'})),
          ],
          names.map(name => [name, ...metrics.map(metric => each.categories[metric][name])]),
        ),
      ),
    ];
  });
}

/** Return an SVG of lines through labeled points. */
function scatter(groups, xTitle, yTitle) {
  const [width, height, left, right, top, bottom] =
    innerWidth < 520 ? [340, 280, 46, 30, 16, 44] : [560, 320, 64, 30, 16, 44];
  const all = groups.flatMap(group => group.points);
  const spread = key => {
    const values = all.map(point => point[key]),
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
  const ticks = (low, high) => Array.from({length: 4}, (_, i) => low + ((high - low) * (i + 0.5)) / 4);
  const marks = [
    ...ticks(xLow, xHigh).map(value =>
      text([x(value), height - bottom + 18], Number(value.toPrecision(4)), {'text-anchor': 'middle'}),
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
        svgElement('circle', {cx: x(point.x), cy: y(point.y), r: 4.5, fill: color}),
        ...(groups.length < 3 || index === groups.length - 1
          ? [text([x(point.x) + 8, y(point.y) - 6], point.text, {class: 'point'})]
          : []),
      ]),
    ];
  });
  const legend = element(
    'ul',
    {class: 'keys'},
    groups.map(group => {
      const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
      swatch.style.borderTopColor = colorOf(group.color);
      return element('li', {}, swatch, group.label);
    }),
  );
  const svg = svgElement(
    'svg',
    {
      viewBox: `0 0 ${width} ${height}`,
      role: 'img',
      'aria-label': `${yTitle} against ${xTitle}; the table beside it has the values`,
    },
    ...marks,
    ...lines,
  );
  return element('div', {}, svg, legend);
}
