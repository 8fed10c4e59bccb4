// History of runs: attempts, cost, recipes with their changes, and checkpoints.
'use strict';

const PARTS = {
  productive: 'training that counts',
  starting: 'starting',
  redone: 'repeated batches',
  ending: 'ending',
  down: 'between attempts',
};

function attemptsOf(run) {
  if (!run.attempts.length) return quiet(`${several() ? `${run.label}: ` : ''}No attempts were recorded.`);
  const wall = run.breakdown.wall || 1;
  const shares = Object.entries(PARTS).filter(([key]) => run.breakdown[key] > 0);
  const text = shares.map(([key, label]) => `${label} ${formatPercent(run.breakdown[key] / wall)}`).join(', ');
  const parts = shares.map(([key]) => {
    const part = element('span', {class: `part ${key}`});
    part.style.width = `${(100 * run.breakdown[key]) / wall}%`;
    return part;
  });
  const keys = shares.map(([key, label]) => {
    const block = element('span', {class: `block part ${key}`, 'aria-hidden': 'true'});
    const share = formatPercent(run.breakdown[key] / wall);
    return element('li', {}, block, `${label} ${formatDuration(run.breakdown[key])} (${share})`);
  });
  const lost = Object.entries(run.lost);
  const columns = columnsOf(
    {Attempt: 'number', Begin: 'text', Duration: 'number', Batches: 'number', Devices: 'number', End: 'long'},
    'Attempt',
  );
  const rows = run.attempts.map(attempt => [
    attempt.number,
    {sort: attempt.begin, content: formatTime(attempt.begin)},
    {sort: attempt.end - attempt.begin, content: formatDuration(Math.max(0, attempt.end - attempt.begin))},
    {
      sort: attempt.first,
      content: known(attempt.first) ? `${formatNumber(attempt.first)} to ${formatNumber(attempt.last)}` : 'none',
    },
    attempt.devices,
    attempt.reason + (known(attempt.status) ? `, exit status ${attempt.status}` : ''),
  ]);
  return card(
    several() ? run.label : '',
    element(
      'p',
      {},
      element('strong', {}, `Goodput ${formatPercent(run.status.goodput)}`),
      ` of ${formatDuration(run.breakdown.wall)} in ${plural(run.attempts.length, 'attempt')}.`,
      lost.length
        ? ` Lost: ${lost.map(([cause, seconds]) => `${formatDuration(seconds)} (${cause})`).join(', ')}.`
        : '',
    ),
    element('div', {class: 'strip', role: 'img', 'aria-label': text}, parts),
    element('ul', {class: 'keys'}, keys),
    sortableTable('Attempts', columns, rows),
  );
}

function costTable() {
  const {runs} = page.data;
  const dollars = (run, hours) => formatDollars(costOf(run, hours));
  const total = ({cost}) =>
    known(cost.device_hours) && known(cost.device_hours_left) ? cost.device_hours + cost.device_hours_left : null;
  const devices = ({cost}) =>
    `${formatNumber(cost.devices)} × ${cost.gpu === 'cpu' ? 'CPU' : cost.gpu || 'unknown device'}`;
  const price = ({cost}) => (known(cost.price) ? `${formatDollars(cost.price)} (${cost.price_source})` : null);
  const rows = [
    ['Devices', run => (known(run.cost.devices) ? devices(run) : 'unknown')],
    ['Device-hours so far', run => formatHours(run.cost.device_hours)],
    ['Dollars so far', run => dollars(run, run.cost.device_hours)],
    ['Time to come', run => (known(run.cost.hours_left) ? formatDuration(3600 * run.cost.hours_left) : MISSING)],
    ['Device-hours to come', run => formatHours(run.cost.device_hours_left)],
    ['Dollars to come', run => dollars(run, run.cost.device_hours_left)],
    ['Device-hours in all', run => formatHours(total(run))],
    ['Dollars in all', run => dollars(run, total(run))],
    ['Price per device-hour', run => price(run) || (run.cost.gpu === 'cpu' ? 'none' : 'unknown; pass --price')],
  ];
  const values = rows.map(([name, value]) => [name, ...runs.map(value)]);
  return card(
    '',
    plainTable('Cost', several() ? ['', ...runs.map(runName)] : [], values, {style: 'values'}),
    quiet('Time to come: the remaining batches at the recent speed, without evaluations, saves and failures.'),
  );
}

/** Return the card with the keys whose values differ between the recipes of several runs. */
function recipeDifferences() {
  const {runs, differences} = page.data;
  const columns = [{title: 'Key', kind: 'text', head: true}, ...runs.map(run => ({title: run.label, kind: 'long'}))];
  const rows = differences.map(({key, values}) => [key, ...values]);
  return card(
    'Differences of the recipes',
    rows.length
      ? sortableTable('Differences of the recipes', columns, rows)
      : quiet('The recipes are the same, except for their names and folders.'),
  );
}

function recipeSection() {
  const {runs} = page.data,
    parts = [];
  for (const run of runs) {
    const columns = columnsOf({Batch: 'number', Time: 'text', Key: 'text', Change: 'long'}, 'Key');
    const timeOf = each => ({sort: each.time, content: formatTime(each.time)});
    const rows = run.changes.map(each => [each.batch, timeOf(each), each.key, each.change]);
    const title = `Changes on resume${several() ? `, ${run.label}` : ''}`;
    if (rows.length) parts.push(card(title, sortableTable('Changes on resume', columns, rows)));
    parts.push(
      run.recipe
        ? element(
            'details',
            {class: 'card recipe'},
            element('summary', {}, `Recipe${several() ? ` of ${run.label}` : ''}`),
            element('pre', {tabindex: '0', role: 'region', 'aria-label': `Recipe of ${run.name}`}, run.recipe),
          )
        : quiet(`${run.name}: no recipe.`),
    );
  }
  return element('div', {}, parts);
}

function checkpointsOf(run) {
  const columns = columnsOf(
    {Batch: 'number', Saved: 'text', Size: 'number', Devices: 'number', Kind: 'text', State: 'text'},
    'Batch',
  );
  const rows = run.checkpoints.map(each => [
    each.batch,
    {sort: each.saved, content: formatTime(each.saved)},
    {sort: each.bytes, content: formatBytes(each.bytes)},
    each.devices,
    each.kind || MISSING,
    `${each.state}${each.pinned ? ', pinned' : ''}`,
  ]);
  const saves = [
    {title: 'Saved into', kind: 'text', head: true},
    ...numbers(['Saves', 'Last at batch', 'Mean time', 'Training stopped for', 'Failed']),
  ];
  const tiers = run.saves.map(each => [
    each.place,
    each.saves,
    each.last_batch,
    {sort: each.mean_seconds, content: formatDuration(each.mean_seconds)},
    {sort: each.stall_seconds, content: formatDuration(each.stall_seconds)},
    each.failed,
  ]);
  const titles = several()
    ? [`Checkpoints of ${run.label}`, `Saves of ${run.label}`]
    : ['Checkpoints that the run keeps', 'Saves, by tier'];
  return [
    rows.length
      ? card(titles[0], sortableTable('Checkpoints', columns, rows))
      : quiet(`${several() ? `${run.label}: ` : ''}No checkpoint yet.`),
    ...(tiers.length ? [card(titles[1], sortableTable('Saves', saves, tiers))] : []),
  ];
}
