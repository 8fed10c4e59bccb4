// Summary of a report: state, progress and figures of the runs, and the mean share of each stage.
'use strict';

const last = (run, name) => (run.series[name] && run.series[name].y.length ? run.series[name].y.at(-1) : null);
const bestLoss = run => {
  const values = namesOf(run, isValidation).flatMap(name => run.series[name].y);
  return values.length ? Math.min(...values) : null;
};
const shareDone = run =>
  known(run.status.batch) && run.status.total_batches ? Math.min(1, run.status.batch / run.status.total_batches) : null;
const costOf = (run, hours) => (known(hours) && known(run.cost.price) ? hours * run.cost.price : null);
const unitOf = run => (run.cost.gpu === 'cpu' ? 'CPU' : run.cost.gpu === '' ? 'device' : 'GPU');

function stateText(run) {
  const {state, silent_seconds, cause} = run.status;
  if (state === 'silent') return `silent, no batch for ${formatDuration(silent_seconds)}`;
  if (state !== 'ended') return state;
  const attempt = run.attempts.at(-1);
  return attempt ? `ended, ${attempt.reason.replace(/^ended /, '')}` : cause ? `ended, ${cause}` : 'ended';
}

function stateBadge(run) {
  const attempt = run.attempts.at(-1);
  const {state} = run.status;
  const kinds = {running: 'good', silent: 'bad'},
    ends = {done: 'good', preempted: 'plain'};
  const kind = state === 'ended' && attempt ? ends[attempt.cause] || 'bad' : kinds[state] || 'plain';
  return element('span', {class: `badge ${kind}`}, stateText(run));
}

function progressBar(run) {
  const share = shareDone(run);
  if (share === null) return null;
  const label = `${run.name}: ${formatPercent(share)} of the batches`;
  return element('progress', {max: 1, value: share, 'aria-label': label});
}

function tile(name, value, detail = '') {
  const below = detail ? element('dd', {class: 'detail'}, detail) : null;
  return element('div', {class: 'tile'}, element('dt', {}, name), element('dd', {}, value), below);
}

function summary() {
  const {runs} = page.data;
  return several() ? element('div', {}, runsTable(runs), recipeDifferences()) : singleSummary(runs[0]);
}

function singleSummary(run) {
  const {status, cost} = run,
    share = shareDone(run);
  const speed = last(run, 'throughput/samples_per_sec'),
    mfu = last(run, 'throughput/device/mfu'),
    activity = formatTime(status.last_activity),
    total = status.total_batches,
    ofTotal = `of ${formatNumber(total)}, ${formatPercent(share)}`;
  const pieces = [
    tile('Batch', formatNumber(status.batch), known(total) ? ofTotal : status.duration || ''),
    tile('Training loss', formatNumber(status.last_loss), 'last batch'),
    tile('Validation loss', formatNumber(bestLoss(run)), 'best so far'),
    tile(
      'Speed',
      formatNumber(known(speed) ? speed : status.batches_per_second),
      known(speed) ? 'images/s' : 'batches/s',
    ),
    known(mfu) ? tile('MFU', formatPercent(mfu), 'last window') : null,
    tile('Goodput', formatPercent(status.goodput), plural(run.attempts.length, 'attempt')),
    tile(
      `${unitOf(run) === 'device' ? 'Device' : unitOf(run)}-hours`,
      formatHours(cost.device_hours),
      known(costOf(run, cost.device_hours))
        ? formatDollars(costOf(run, cost.device_hours))
        : known(cost.devices)
          ? plural(cost.devices, unitOf(run))
          : '',
    ),
    status.state === 'running' && known(cost.hours_left)
      ? tile('Time left', formatDuration(3600 * cost.hours_left), 'without evaluations and saves')
      : tile('Last activity', activity.slice(11) || MISSING, activity.slice(0, 10)),
  ];
  return element('div', {}, element('dl', {class: 'tiles'}, pieces.filter(Boolean)));
}

function runsTable(runs) {
  const columns = [
    {title: 'Run', kind: 'text', head: true},
    {title: 'State', kind: 'long'},
    ...numbers(['Batch', 'Training loss', 'Best validation loss', 'Images/s', 'MFU', 'Goodput', 'Device-hours']),
  ];
  const losses = runs.map(bestLoss),
    best = Math.min(...losses.filter(known));
  const rows = runs.map((run, index) => {
    const {batch, total_batches, last_loss, goodput} = run.status,
      mfu = last(run, 'throughput/device/mfu');
    return [
      {sort: run.label, content: runName(run, index)},
      {sort: stateText(run), content: stateBadge(run)},
      {sort: batch, content: batchText(batch, total_batches)},
      last_loss,
      {sort: losses[index], content: losses[index], best: losses[index] === best},
      last(run, 'throughput/samples_per_sec'),
      {sort: mfu, content: formatPercent(mfu)},
      {sort: goodput, content: formatPercent(goodput)},
      {sort: run.cost.device_hours, content: formatHours(run.cost.device_hours)},
    ];
  });
  return card('', sortableTable('Runs', columns, rows));
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
  const rows = Object.entries(STAGES)
    .map(([stage, [label]]) => [label, runs.map(run => mean(run, stage))])
    .filter(([, values]) => values.some(value => value > 0.0005))
    .sort((a, b) => b[1][0] - a[1][0]);
  if (!rows.length) return null;
  const bar = value => {
    const meter = element('span', {class: 'bar', 'aria-hidden': 'true'});
    meter.style.width = `${Math.round(160 * (value || 0))}px`;
    return element('span', {class: 'meter'}, element('span', {class: 'number'}, formatPercent(value)), meter);
  };
  const title = 'Mean share of each stage';
  const titles = ['Stage', ...runs.map(run => (several() ? run.label : 'Share of the time'))];
  const cells = rows.map(([label, values]) => [label, ...values.map(bar)]);
  return card(title, plainTable(`${title} of a training step`, titles, cells, {label: title}));
}
