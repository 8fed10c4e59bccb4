// Sections of a report other than charts and samples: summary, evaluations, attempts, cost, recipe, checkpoints.
'use strict';

const last = (run, name) => run.series[name] && run.series[name].y.length ? run.series[name].y.at(-1) : null;
const bestLoss = run => {
  const values = namesOf(run, isValidation).flatMap(name => run.series[name].y);
  return values.length ? Math.min(...values) : null;
};
const shareDone = run => known(run.status.batch) && run.status.total_batches ? Math.min(1, run.status.batch / run.status.total_batches) : null;
const costOf = (run, hours) => known(hours) && known(run.cost.price) ? hours * run.cost.price : null;
const unitOf = run => run.cost.gpu === 'cpu' ? 'CPU' : run.cost.gpu === '' ? 'device' : 'GPU';

function stateText(run) {
  const {state, silent_seconds, cause} = run.status;
  if (state === 'silent') return `silent, no batch for ${formatDuration(silent_seconds)}`;
  if (state !== 'ended') return state;
  const attempt = run.attempts.at(-1);
  return attempt ? `ended, ${attempt.reason}` : cause ? `ended, ${cause}` : 'ended';
}

function stateBadge(run) {
  const attempt = run.attempts.at(-1);
  const {state} = run.status;
  const kind = state === 'running' ? 'good' : state === 'silent' ? 'bad' : state === 'ended' && attempt ? (attempt.cause === 'done' ? 'good' : attempt.cause === 'preempted' ? 'plain' : 'bad') : 'plain';
  return element('span', {class: `badge ${kind}`}, stateText(run));
}

function progressBar(run) {
  const share = shareDone(run);
  if (share === null) return null;
  return element('progress', {max: 1, value: share, 'aria-label': `${run.name}: ${formatPercent(share)} of the batches`});
}

function tile(name, value, detail = '') {
  return element('div', {class: 'tile'}, element('dt', {}, name), element('dd', {}, value), detail ? element('dd', {class: 'detail'}, detail) : null);
}

function summary() {
  const {runs} = page.data;
  return several() ? runsTable(runs) : singleSummary(runs[0]);
}

function singleSummary(run) {
  const {status, cost} = run, share = shareDone(run);
  const speed = last(run, 'throughput/samples_per_sec'), mfu = last(run, 'throughput/device/mfu');
  const pieces = [
    tile('Batch', formatNumber(status.batch), known(status.total_batches) ? `of ${formatNumber(status.total_batches)}, ${formatPercent(share)}` : status.duration || ''),
    tile('Training loss', formatNumber(status.last_loss), 'last batch'),
    tile('Validation loss', formatNumber(bestLoss(run)), 'best so far'),
    tile('Speed', known(speed) ? `${formatNumber(speed)}` : known(status.batches_per_second) ? formatNumber(status.batches_per_second) : MISSING, known(speed) ? 'images/s' : 'batches/s'),
    known(mfu) ? tile('MFU', formatPercent(mfu), 'last window') : null,
    tile('Goodput', formatPercent(status.goodput), plural(run.attempts.length, 'attempt')),
    tile(`${unitOf(run) === 'device' ? 'Device' : unitOf(run)}-hours`, formatNumber(cost.device_hours), known(costOf(run, cost.device_hours)) ? formatDollars(costOf(run, cost.device_hours)) : known(cost.devices) ? plural(cost.devices, unitOf(run)) : ''),
    status.state === 'running' && known(cost.hours_left) ? tile('Time left', formatDuration(3600 * cost.hours_left), 'without evaluations and saves') : tile('Last activity', formatTime(status.last_activity).slice(11) || MISSING, formatTime(status.last_activity).slice(0, 10)),
  ];
  return element('div', {}, element('dl', {class: 'tiles'}, pieces.filter(Boolean)));
}

function runsTable(runs) {
  const columns = [{title: 'Run', kind: 'text', head: true}, {title: 'State', kind: 'long'}, ...['Batch', 'Training loss', 'Best validation loss', 'Images/s', 'MFU', 'Goodput', 'Device-hours'].map(title => ({title, kind: 'number'}))];
  const losses = runs.map(bestLoss), best = Math.min(...losses.filter(known));
  return card('', sortableTable('Runs', columns, runs.map((run, index) => [
    {sort: run.label, content: runName(run, index)}, {sort: stateText(run), content: stateBadge(run)}, {sort: run.status.batch, content: `${formatNumber(run.status.batch)}${known(run.status.total_batches) ? ` of ${formatNumber(run.status.total_batches)}` : ''}`},
    {sort: run.status.last_loss, content: formatNumber(run.status.last_loss)}, {sort: losses[index], content: formatNumber(losses[index]), best: losses[index] === best},
    last(run, 'throughput/samples_per_sec'), {sort: last(run, 'throughput/device/mfu'), content: formatPercent(last(run, 'throughput/device/mfu'))},
    {sort: run.status.goodput, content: formatPercent(run.status.goodput)}, run.cost.device_hours,
  ])));
}

function runName(run, index) {
  const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
  swatch.style.borderTopColor = colorOf(index);
  swatch.style.borderTopStyle = DASHES[index % 8].length ? 'dashed' : 'solid';
  return element('span', {class: 'run'}, swatch, run.label);
}

/** Return bars of the mean share of each stage of a step, one table column per run. */
function stageShares() {
  const {runs} = page.data;
  const mean = (run, stage) => {
    const curve = run.series[`time_share/${stage}`];
    const values = curve ? curve.my || curve.y : [];
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };
  const rows = Object.entries(STAGES).map(([stage, [label]]) => [label, runs.map(run => mean(run, stage))]).filter(([, values]) => values.some(value => value > 0.0005)).sort((a, b) => b[1][0] - a[1][0]);
  if (!rows.length) return null;
  const bar = value => {
    const meter = element('span', {class: 'bar', 'aria-hidden': 'true'});
    meter.style.width = `${Math.round(160 * (value || 0))}px`;
    return element('span', {class: 'meter'}, element('span', {class: 'number'}, formatPercent(value)), meter);
  };
  return card('Mean share of each stage', scrolling(element('table', {}, element('caption', {class: 'hidden'}, 'Mean share of each stage of a training step'),
    element('thead', {}, element('tr', {}, element('th', {scope: 'col'}, 'Stage'), runs.map(run => element('th', {scope: 'col'}, several() ? run.label : 'Share of the time')))),
    element('tbody', {}, rows.map(([label, values]) => element('tr', {}, element('th', {scope: 'row'}, label), values.map(value => element('td', {}, bar(value))))))), 'Mean share of each stage'));
}

function evaluationTable() {
  const {runs, better} = page.data;
  const found = runs.flatMap((run, index) => run.evaluations.map(each => ({...each, run, index})));
  if (!found.length) return quiet('No evaluations yet: diffusion evaluate measures a checkpoint, diffusion watch all of them.');
  const names = [...new Set(found.flatMap(each => Object.keys(each.metrics)))];
  const withLoss = found.some(each => known(each.losses.loss));
  const value = (each, name) => name === 'loss' ? each.losses.loss : each.metrics[name];
  const shown = [...names, ...(withLoss ? ['loss'] : [])];
  const best = Object.fromEntries(shown.filter(name => better[name]).map(name => {
    const values = found.map(each => value(each, name)).filter(known);
    // Of equal values, none is the best.
    return [name, new Set(values).size < 2 ? null : better[name] === 'lower' ? Math.min(...values) : Math.max(...values)];
  }));
  const columns = [...(several() ? [{title: 'Run', kind: 'text'}] : []), {title: 'Batch', kind: 'number', head: true}, {title: 'Weights', kind: 'text'},
    ...(found.some(each => known(each.images)) ? [{title: 'Images', kind: 'number'}] : []),
    ...shown.map(name => ({title: name === 'loss' ? 'validation loss' : `${metricTitle(name)}${better[name] ? (better[name] === 'lower' ? ' ↓' : ' ↑') : ''}`, kind: 'number'})), {title: 'Evaluated', kind: 'text'}];
  const rows = found.map(each => [...(several() ? [{sort: each.run.label, content: runName(each.run, each.index)}] : []), each.batch, each.weights,
    ...(columns.some(column => column.title === 'Images') ? [each.images] : []),
    ...shown.map(name => ({sort: value(each, name), content: formatNumber(value(each, name)), best: known(value(each, name)) && value(each, name) === best[name]})), {sort: each.finished, content: formatTime(each.finished)}]);
  return card('Evaluated checkpoints', sortableTable('Evaluated checkpoints', columns, rows), quiet('↓ lower is better, ↑ higher is better, ★ best of these checkpoints.'));
}

/** Return the plot of FID against CLIP score over guidance scales, and the table of all of them. */
function guidanceSweep() {
  const sweeps = page.data.runs.flatMap((run, index) => run.evaluations.filter(each => each.guidance.length).map(each => ({...each, run, index})));
  if (!sweeps.length) return [];
  const names = [...new Set(sweeps.flatMap(each => each.guidance.flatMap(row => Object.keys(row.metrics))))];
  const rows = sweeps.flatMap(each => each.guidance.map(row => [...(several() ? [{sort: each.run.label, content: runName(each.run, each.index)}] : []), each.batch, {sort: row.scale, content: trimmed(row.scale)}, ...names.map(name => row.metrics[name])]));
  const columns = [...(several() ? [{title: 'Run', kind: 'text'}] : []), {title: 'Batch', kind: 'number'}, {title: 'Guidance', kind: 'number'}, ...names.map(name => ({title: metricTitle(name), kind: 'number'}))];
  const quality = names.includes('fid') ? 'fid' : names.find(name => page.data.better[name] === 'lower');
  // Of several runs, the last sweep of each in the run's color; of one run, its last checkpoints.
  const lastOnes = several() ? page.data.runs.map((_, index) => sweeps.filter(each => each.index === index).at(-1)).filter(Boolean) : sweeps.slice(-6);
  const shown = lastOnes.map((each, position) => ({
    color: several() ? each.index : position,
    label: `${several() ? `${each.run.label}, ` : ''}batch ${formatNumber(each.batch)}`,
    points: each.guidance.filter(row => known(row.metrics.clip_score) && known(row.metrics[quality])).map(row => ({x: row.metrics.clip_score, y: row.metrics[quality], text: trimmed(row.scale)})).sort((a, b) => Number(a.text) - Number(b.text)),
  })).filter(each => each.points.length > 1);
  return [shown.length ? card(`${metricTitle(quality)} against CLIP score`, scatter(shown, 'CLIP score', metricTitle(quality)), quiet('Numbers at the points are guidance scales. Lower right is better.')) : null,
    card('Guidance sweep', element('div', {class: 'tall'}, sortableTable('Guidance sweep', columns, rows)))].filter(Boolean);
}

/** Return the scores of each run's last evaluation per category of prompts. */
function categoryTables() {
  return page.data.runs.flatMap((run, index) => {
    const each = run.evaluations.filter(found => Object.keys(found.categories).length).at(-1);
    if (!each) return [];
    const metrics = Object.keys(each.categories), names = [...new Set(metrics.flatMap(metric => Object.keys(each.categories[metric])))];
    const title = `Scores per category, ${several() ? `${run.label}, ` : ''}batch ${formatNumber(each.batch)}`;
    return [card(title, sortableTable(title, [{title: 'Category', kind: 'text', head: true}, ...metrics.map(metric => ({title: metricTitle(metric), kind: 'number'}))],
      names.map(name => [name, ...metrics.map(metric => each.categories[metric][name])])))];
  });
}

/** Return an SVG of lines through labeled points. */
function scatter(groups, xTitle, yTitle) {
  const [width, height, left, right, top, bottom] = innerWidth < 520 ? [340, 280, 46, 30, 16, 44] : [560, 320, 64, 30, 16, 44];
  const all = groups.flatMap(group => group.points);
  const spread = key => {
    const values = all.map(point => point[key]), low = Math.min(...values), high = Math.max(...values), margin = 0.08 * (high - low) || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  };
  const [xLow, xHigh] = spread('x'), [yLow, yHigh] = spread('y');
  const x = value => left + (width - left - right) * (value - xLow) / (xHigh - xLow), y = value => height - bottom - (height - top - bottom) * (value - yLow) / (yHigh - yLow);
  const text = (at, content, options = {}) => { const node = svgElement('text', {x: at[0], y: at[1], class: 'axis', ...options}); node.textContent = content; return node; };
  const ticks = (low, high) => Array.from({length: 4}, (_, i) => low + (high - low) * (i + 0.5) / 4);
  const marks = [
    ...ticks(xLow, xHigh).map(value => text([x(value), height - bottom + 18], Number(value.toPrecision(4)), {'text-anchor': 'middle'})),
    ...ticks(yLow, yHigh).flatMap(value => [svgElement('line', {x1: left, x2: width - right, y1: y(value), y2: y(value), class: 'gridline'}), text([left - 8, y(value) + 4], Number(value.toPrecision(3)), {'text-anchor': 'end'})]),
    text([(left + width - right) / 2, height - 6], xTitle, {'text-anchor': 'middle'}), text([12, top + 2], yTitle),
  ];
  const lines = groups.flatMap((group, index) => {
    const color = colorOf(group.color), path = svgElement('polyline', {points: group.points.map(point => `${x(point.x)},${y(point.y)}`).join(' '), fill: 'none', stroke: color, 'stroke-width': 2, 'stroke-dasharray': DASHES[group.color % 8].join(' ')});
    return [path, ...group.points.flatMap(point => [svgElement('circle', {cx: x(point.x), cy: y(point.y), r: 4.5, fill: color}), ...(groups.length < 3 || index === groups.length - 1 ? [text([x(point.x) + 8, y(point.y) - 6], point.text, {class: 'point'})] : [])])];
  });
  const legend = element('ul', {class: 'keys'}, groups.map(group => {
    const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
    swatch.style.borderTopColor = colorOf(group.color);
    return element('li', {}, swatch, group.label);
  }));
  const svg = svgElement('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${yTitle} against ${xTitle}; the table beside it has the values`}, ...marks, ...lines);
  return element('div', {}, svg, legend);
}

const PARTS = {productive: 'training that counts', starting: 'starting', redone: 'repeated batches', ending: 'ending', down: 'between attempts'};

function attemptsOf(run) {
  if (!run.attempts.length) return quiet(`${several() ? `${run.label}: ` : ''}No attempts were recorded.`);
  const wall = run.breakdown.wall || 1;
  const shares = Object.entries(PARTS).filter(([key]) => run.breakdown[key] > 0);
  const strip = element('div', {class: 'strip', role: 'img', 'aria-label': shares.map(([key, label]) => `${label} ${formatPercent(run.breakdown[key] / wall)}`).join(', ')}, shares.map(([key]) => {
    const part = element('span', {class: `part ${key}`});
    part.style.width = `${100 * run.breakdown[key] / wall}%`;
    return part;
  }));
  const keys = element('ul', {class: 'keys'}, shares.map(([key, label]) => element('li', {}, element('span', {class: `block part ${key}`, 'aria-hidden': 'true'}), `${label} ${formatDuration(run.breakdown[key])} (${formatPercent(run.breakdown[key] / wall)})`)));
  const lost = Object.entries(run.losses);
  const columns = [{title: 'Attempt', kind: 'number', head: true}, {title: 'Begin', kind: 'text'}, {title: 'Duration', kind: 'number'}, {title: 'Batches', kind: 'number'}, {title: 'Devices', kind: 'number'}, {title: 'End', kind: 'long'}];
  const rows = run.attempts.map(attempt => [attempt.number + 1, {sort: attempt.begin, content: formatTime(attempt.begin)}, {sort: attempt.end - attempt.begin, content: formatDuration(Math.max(0, attempt.end - attempt.begin))},
    {sort: attempt.first, content: known(attempt.first) ? `${formatNumber(attempt.first)} to ${formatNumber(attempt.last)}` : 'none'}, attempt.devices, attempt.reason + (known(attempt.status) ? `, exit status ${attempt.status}` : '')]);
  return card(several() ? run.label : '', element('p', {}, element('strong', {}, `Goodput ${formatPercent(run.status.goodput)}`), ` of ${formatDuration(run.breakdown.wall)} in ${plural(run.attempts.length, 'attempt')}.`,
    lost.length ? ` Lost: ${lost.map(([cause, seconds]) => `${formatDuration(seconds)} (${cause})`).join(', ')}.` : ''), strip, keys, sortableTable('Attempts', columns, rows));
}

function costTable() {
  const {runs} = page.data;
  const dollars = (run, hours) => known(run.cost.price) ? formatDollars(costOf(run, hours)) : MISSING;
  const total = run => known(run.cost.device_hours) && known(run.cost.device_hours_left) ? run.cost.device_hours + run.cost.device_hours_left : null;
  const rows = [
    ['Devices', run => known(run.cost.devices) ? `${formatNumber(run.cost.devices)} × ${run.cost.gpu === 'cpu' ? 'CPU' : run.cost.gpu || 'unknown device'}` : 'unknown'],
    ['Device-hours so far', run => formatNumber(run.cost.device_hours)], ['Dollars so far', run => dollars(run, run.cost.device_hours)],
    ['Time to come', run => known(run.cost.hours_left) ? formatDuration(3600 * run.cost.hours_left) : MISSING], ['Device-hours to come', run => formatNumber(run.cost.device_hours_left)],
    ['Dollars to come', run => dollars(run, run.cost.device_hours_left)], ['Device-hours in all', run => formatNumber(total(run))], ['Dollars in all', run => dollars(run, total(run))],
    ['Price per device-hour', run => known(run.cost.price) ? `${formatDollars(run.cost.price)} (${run.cost.price_source})` : run.cost.gpu === 'cpu' ? 'none' : 'unknown; pass --price'],
  ];
  return card('', scrolling(element('table', {class: 'values'}, element('caption', {class: 'hidden'}, 'Cost'), several() ? element('thead', {}, element('tr', {}, element('td'), runs.map((run, index) => element('th', {scope: 'col'}, runName(run, index))))) : null,
    element('tbody', {}, rows.map(([name, value]) => element('tr', {}, element('th', {scope: 'row'}, name), runs.map(run => element('td', {}, value(run))))))), 'Cost'),
  quiet('Time to come: the remaining batches at the recent speed, without evaluations, saves and failures.'));
}

function recipeSection() {
  const {runs, differences} = page.data, parts = [];
  if (several()) {
    const columns = [{title: 'Key', kind: 'text', head: true}, ...runs.map(run => ({title: run.label, kind: 'long'}))];
    parts.push(differences.length ? card('Differences', sortableTable('Differences of the recipes', columns, differences.map(row => [row.key, ...row.values.map(value => value === null ? {sort: null, content: MISSING} : value)])))
      : card('Differences', quiet('The recipes are the same, except for their names and folders.')));
  }
  for (const run of runs) {
    const columns = [{title: 'Batch', kind: 'number'}, {title: 'Time', kind: 'text'}, {title: 'Key', kind: 'text', head: true}, {title: 'Change', kind: 'long'}];
    if (run.changes.length) parts.push(card(`Changes on resume${several() ? `, ${run.label}` : ''}`, sortableTable('Changes on resume', columns, run.changes.map(each => [each.batch, {sort: each.time, content: formatTime(each.time)}, each.key, each.change]))));
    parts.push(run.recipe ? element('details', {class: 'card recipe'}, element('summary', {}, `Recipe${several() ? ` of ${run.label}` : ''}`), element('pre', {tabindex: '0', role: 'region', 'aria-label': `Recipe of ${run.name}`}, run.recipe)) : quiet(`${run.name}: no recipe.`));
  }
  return element('div', {}, parts);
}

function checkpointsOf(run) {
  const columns = [{title: 'Batch', kind: 'number', head: true}, {title: 'Saved', kind: 'text'}, {title: 'Size', kind: 'number'}, {title: 'Devices', kind: 'number'}, {title: 'Kind', kind: 'text'}, {title: 'State', kind: 'text'}];
  const rows = run.checkpoints.map(each => [each.batch, {sort: each.saved, content: formatTime(each.saved)}, {sort: each.bytes, content: formatBytes(each.bytes)}, each.devices, each.kind || MISSING, `${each.state}${each.pinned ? ', pinned' : ''}`]);
  const saves = [{title: 'Saved into', kind: 'text', head: true}, ...['Saves', 'Last at batch', 'Mean time', 'Training stopped for', 'Failed'].map(title => ({title, kind: 'number'}))];
  return [rows.length ? card(several() ? `Checkpoints of ${run.label}` : 'Checkpoints that the run keeps', sortableTable('Checkpoints', columns, rows)) : quiet(`${several() ? `${run.label}: ` : ''}No checkpoint yet.`),
    run.saves.length ? card(several() ? `Saves of ${run.label}` : 'Saves, by tier', sortableTable('Saves', saves, run.saves.map(each => [each.place, each.saves, each.last_batch,
      {sort: each.mean_seconds, content: formatDuration(each.mean_seconds)}, {sort: each.stall_seconds, content: formatDuration(each.stall_seconds)}, each.failed]))) : null].filter(Boolean);
}
