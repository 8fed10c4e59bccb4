// The charts of a report: which metrics each one shows.
'use strict';

const TRAIN = 'loss/train/total';
const STAGES = {
  backward: ['backward', '#0067a5'],
  forward: ['forward', '#4f9fd6'],
  encode: ['encode', '#7a5bb8'],
  optimizer: ['optimizer', '#00805e'],
  ema: ['EMA', '#4fb894'],
  h2d: ['copies to the device', '#9aa83a'],
  data_wait: ['data wait', '#c8500a'],
  checkpoint: ['checkpoint', '#8c2d19'],
  evaluation: ['evaluation', '#d0a02a'],
  logging: ['logging', '#a8407c'],
  other: ['other', '#8a9099'],
};
const HEALTH = {
  gpu_temperature: ['GPU temperature, hottest (°C)'],
  gpu_utilization: ['GPU utilization, lowest', formatPercent],
  gpu_clock: ['GPU clock, slowest (of maximum)', formatPercent],
  gpu_memory_used: ['GPU memory in use, most', formatPercent],
};

const isValidation = name => /^metrics\/.*\/loss$/.test(name);
const levelOf = name => {
  const found = /^metrics\/(.*)\/loss_t(\d+)$/.exec(name);
  return found ? Number(found[2]) : null;
};
const namesOf = (run, test) => Object.keys(run.series).filter(test);
const several = () => page.data.runs.length > 1;

/** Return a series of a chart for a metric of a run, or null if the run has not logged it. */
function seriesOf(run, name, label, color, options = {}) {
  const curve = run.series[name];
  return curve
    ? {run, curve, label, color: () => (typeof color === 'function' ? color() : colorOf(color)), ...options}
    : null;
}

/** Return one series per run of a metric; for a single run with `label`, for several with the runs' names. */
function perRun(names, label, color, options = {}) {
  return page.data.runs.flatMap((run, index) => {
    const name = [names].flat().find(each => run.series[each]);
    if (!name) return [];
    const dash = several() ? DASHES[index % 8] : [];
    return [seriesOf(run, name, several() ? run.label : label, several() ? index : color, {dash, ...options})];
  });
}

function marksOf() {
  if (several()) return [];
  const [run] = page.data.runs;
  return run.attempts.filter(attempt => attempt.first > 0).map(attempt => ({run, batch: attempt.first}));
}

function trainingCharts() {
  const {runs} = page.data,
    specs = [],
    marks = marksOf();
  const times = marks.length === 1 ? 'line: the run was resumed' : `lines: the run was resumed ${marks.length} times`;
  const resumed = marks.length ? `Dashed ${times}.` : '';
  const train = perRun(TRAIN, 'training', 0, {rough: true});
  const validation = runs.flatMap((run, index) =>
    namesOf(run, isValidation).map(name =>
      seriesOf(
        run,
        name,
        several() ? run.label : name === 'metrics/eval/loss' ? 'validation' : `validation ${name.split('/')[1]}`,
        several() ? index : 1,
        {points: true, dash: several() ? DASHES[index % 8] : []},
      ),
    ),
  );
  if (several()) {
    specs.push(['loss', {title: 'Training loss', yTitle: 'loss', series: train, note: gapNote(train)}]);
    if (validation.length) specs.push(['validation', {title: 'Validation loss', yTitle: 'loss', series: validation}]);
  } else if (train.length || validation.length) {
    const note = [resumed, gapNote(train)].filter(Boolean).join(' ');
    specs.push(['loss', {title: 'Loss', yTitle: 'loss', series: [...train, ...validation], marks, note}]);
  }
  const terms = several() ? [] : namesOf(runs[0], name => name.startsWith('loss/train/') && name !== TRAIN);
  const parts = terms.map((name, index) => seriesOf(runs[0], name, name.slice(11), index, {rough: true}));
  if (parts.length) specs.push(['terms', {title: 'Terms of the loss', yTitle: 'loss', marks, series: parts}]);
  specs.push(...noiseLevelCharts(runs, marks));
  const rates = several()
    ? perRun(namesOf(runs.find(run => namesOf(run, isRate).length) || runs[0], isRate).slice(0, 1), '', 0)
    : namesOf(runs[0], isRate).map((name, index) => seriesOf(runs[0], name, name.slice(3), index));
  if (rates.length) specs.push(['rate', {title: 'Learning rate', yTitle: 'learning rate', series: rates, marks}]);
  const norm = perRun(['grad_norm/total', 'l2_norm/grad/global'], 'norm of the gradient', 0, {rough: true});
  if (norm.length)
    specs.push(['gradient', {title: 'Gradient norm', yTitle: 'norm', series: norm, marks, log: true, note: gapNote(norm)}]);
  return specs;
}

const isRate = name => name.startsWith('lr-');

function gapNote(series) {
  const count = series.reduce((sum, each) => sum + (each.curve.nonfinite_count || 0), 0);
  const text = `${plural(count, 'value')} that ${count === 1 ? 'is' : 'are'} NaN or infinite`;
  return count ? `Triangles on the axis: ${text}.` : '';
}

function noiseLevelCharts(runs, marks) {
  if (!several()) {
    const names = namesOf(runs[0], name => levelOf(name) !== null).sort((a, b) => levelOf(a) - levelOf(b));
    const series = names.map((name, index) =>
      seriesOf(runs[0], name, `t = ${levelOf(name)}`, () => levelColor(index, names.length), {
        points: runs[0].series[name].count < 60,
      }),
    );
    const note = 't is the timestep of the noise schedule: 0 is almost no noise, 1000 is noise alone.';
    const spec = {title: 'Validation loss per noise level', yTitle: 'loss', series, marks, note};
    return series.length ? [['levels', spec]] : [];
  }
  const series = runs.flatMap((run, index) => {
    const found = namesOf(run, name => levelOf(name) !== null && run.series[name].y.length);
    const names = found.sort((a, b) => levelOf(a) - levelOf(b));
    const curve = {x: names.map(levelOf), y: names.map(name => run.series[name].y.at(-1))};
    return names.length
      ? [{curve, label: run.label, color: () => colorOf(index), dash: DASHES[index % 8], points: true}]
      : [];
  });
  return series.length ? [['levels', {title: 'Last validation loss per noise level', xTitle: 'timestep', yTitle: 'loss', series}]] : [];
}

function speedCharts() {
  const {runs} = page.data,
    marks = marksOf(),
    specs = [];
  const add = (id, title, names, label, options = {}) => {
    const series = perRun(names, label, 0, {rough: true});
    if (series.length) specs.push([id, {title, series, marks, ...options}]);
  };
  add('throughput', 'Images per second', ['throughput/samples_per_sec'], 'all devices', {yTitle: 'images/s'});
  add('mfu', 'Model FLOPs utilization (MFU)', ['throughput/device/mfu'], 'MFU', {format: formatPercent, yTitle: 'MFU'});
  if (!several()) {
    const series = Object.entries(STAGES)
      .map(([stage, [label, color]]) => seriesOf(runs[0], `time_share/${stage}`, label, () => color))
      .filter(each => each && each.curve.y.some(value => value > 0.0005));
    if (series.length)
      specs.push(['stages', {title: 'Share of each stage', yTitle: 'share of the time', series, marks, stacked: true, format: formatPercent}]);
  }
  add('memory', 'Peak GPU memory', ['memory/peak_gib'], 'largest of all devices', {yTitle: 'GiB'});
  if (runs.some(run => run.cost.devices !== 1))
    add('slowest', 'Step time of the slowest rank', ['throughput/slowest_rank_step_seconds'], 'slowest rank', {yTitle: 'seconds'});
  return specs;
}

function healthCharts() {
  const {runs} = page.data,
    specs = [],
    marks = marksOf();
  for (const [name, [title, format]] of Object.entries(HEALTH)) {
    const series = perRun([`health/${name}`], 'worst of all ranks', 0);
    if (series.length) specs.push([name, {title, series, marks, format}]);
  }
  const counts = [
    ['health/gpu_throttled', 'throttled by heat or power'],
    ['health/gpu_ecc_errors', 'memory errors'],
    ['health/gpu_remapped_rows', 'remapped rows'],
    ['health/gpu_xid_errors', 'critical errors (Xid)'],
    ['data/replaced_samples', 'replaced samples'],
    ['loss_guard/skipped_updates', 'skipped updates'],
    ['checkpoint/failed_saves', 'failed saves'],
  ];
  const events = several()
    ? []
    : counts.map(([name, label], index) => seriesOf(runs[0], name, label, index)).filter(Boolean);
  if (events.length) specs.push(['events', {title: 'Errors and events', yTitle: 'count', series: events, marks}]);
  for (const [name, label] of several() ? counts : []) {
    const series = perRun([name], label, 0);
    if (series.length)
      specs.push([`count-${name.replace('/', '-')}`, {title: label[0].toUpperCase() + label.slice(1), yTitle: 'count', series}]);
  }
  const slow = perRun(['straggler/slowest_factor'], 'slowest rank', 0);
  if (slow.length) specs.push(['straggler', {title: 'Time of the slowest rank', yTitle: '1 = median', series: slow, marks}]);
  return specs;
}

function evaluationCharts() {
  const {runs} = page.data;
  const names = [...new Set(runs.flatMap(run => run.evaluations.flatMap(each => Object.keys(each.metrics))))];
  return names.flatMap(name => {
    const series = runs.flatMap((run, index) => {
      const points = run.evaluations.filter(each => known(each.metrics[name]));
      const curve = {x: points.map(each => each.batch), y: points.map(each => each.metrics[name])};
      const label = several() ? run.label : metricTitle(name),
        ends = points.map(each => each.intervals[name]?.[''] || []),
        color = () => colorOf(several() ? index : 0),
        dash = several() ? DASHES[index % 8] : [];
      return points.length ? [{run, curve, label, ends, color, dash, points: true}] : [];
    });
    if (!series.some(each => each.curve.x.length > 1)) return [];
    const levels = page.data.published[name],
      published = {levels, curve: {x: [], y: []}, label: 'published scores', color: () => cssColor('--muted'), dash: [2, 3]};
    const better = page.data.better[name];
    const spec = {
      title: `${metricTitle(name)}${better ? `, ${better} is better` : ''}`,
      yTitle: metricTitle(name.split('/')[0]),
      series: levels ? [...series, published] : series,
      note: series.some(each => each.ends.flat().length) ? 'Bars are 95% intervals.' : '',
    };
    return [[`metric-${name}`, spec]];
  });
}

const METRIC_TITLES = {
  fid: 'FID',
  kid: 'KID',
  clip_fid: 'CLIP-FID',
  cmmd: 'CMMD',
  dino_mmd: 'DINO MMD',
  clip_score: 'CLIP score',
  pick_score: 'PickScore',
  hpsv3: 'HPSv3',
  hpsv2: 'HPSv2',
  image_reward: 'ImageReward',
  aesthetic: 'aesthetic score',
  geneval_hf: 'GenEval (HF)',
  word_accuracy_rapidocr: 'word accuracy (RapidOCR)',
  ned_rapidocr: 'similarity of words (RapidOCR)',
  dpg: 'DPG-Bench',
  tifa: 'TIFA',
  judge_score: 'judge score',
  retrieval_top1: 'retrieval top-1',
  efficientnet_distance: 'EfficientNet distance',
};
/** Return the title of a metric; the name of a judge's metric has the judge after a slash. */
const metricTitle = name => {
  const [base, ...judge] = name.split('/');
  return judge.length && METRIC_TITLES[base] ? `${METRIC_TITLES[base]} (${judge.join(', ')})` : METRIC_TITLES[name] || name;
};

/** Return the card that shows any metric of the runs. */
function explorer() {
  const names = [...new Set(page.data.runs.flatMap(run => Object.keys(run.series)))].sort();
  if (!names.length) return quiet('No metrics yet.');
  if (!names.includes(page.explored)) page.explored = names.includes(TRAIN) ? TRAIN : names[0];
  const groups = new Map();
  for (const name of names) {
    const group = name.includes('/') ? name.slice(0, name.indexOf('/')) : 'other';
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  const option = name => element('option', {value: name, selected: name === page.explored}, name);
  const options = [...groups].map(([group, members]) => element('optgroup', {label: group}, members.map(option)));
  const choose = () => {
    page.explored = select.value;
    chartCard('explorer', exploredChart());
  };
  const select = element('select', {id: 'explored', onchange: choose}, options);
  const label = element('p', {}, element('label', {for: 'explored'}, 'Metric '), select);
  return element('div', {}, label, chartCard('explorer', exploredChart()));
}

const exploredChart = () => ({
  title: page.explored,
  marks: marksOf(),
  series: perRun([page.explored], page.explored, 0, {rough: true}),
});
