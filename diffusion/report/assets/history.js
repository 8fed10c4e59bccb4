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
  const strip = element(
    'div',
    {
      class: 'strip',
      role: 'img',
      'aria-label': shares.map(([key, label]) => `${label} ${formatPercent(run.breakdown[key] / wall)}`).join(', '),
    },
    shares.map(([key]) => {
      const part = element('span', {class: `part ${key}`});
      part.style.width = `${(100 * run.breakdown[key]) / wall}%`;
      return part;
    }),
  );
  const keys = element(
    'ul',
    {class: 'keys'},
    shares.map(([key, label]) =>
      element(
        'li',
        {},
        element('span', {class: `block part ${key}`, 'aria-hidden': 'true'}),
        `${label} ${formatDuration(run.breakdown[key])} (${formatPercent(run.breakdown[key] / wall)})`,
      ),
    ),
  );
  const lost = Object.entries(run.lost);
  const columns = [
    {title: 'Attempt', kind: 'number', head: true},
    {title: 'Begin', kind: 'text'},
    {title: 'Duration', kind: 'number'},
    {title: 'Batches', kind: 'number'},
    {title: 'Devices', kind: 'number'},
    {title: 'End', kind: 'long'},
  ];
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
    strip,
    keys,
    sortableTable('Attempts', columns, rows),
  );
}

function costTable() {
  const {runs} = page.data;
  const dollars = (run, hours) => (known(run.cost.price) ? formatDollars(costOf(run, hours)) : MISSING);
  const total = run =>
    known(run.cost.device_hours) && known(run.cost.device_hours_left)
      ? run.cost.device_hours + run.cost.device_hours_left
      : null;
  const rows = [
    [
      'Devices',
      run =>
        known(run.cost.devices)
          ? `${formatNumber(run.cost.devices)} × ${run.cost.gpu === 'cpu' ? 'CPU' : run.cost.gpu || 'unknown device'}`
          : 'unknown',
    ],
    ['Device-hours so far', run => formatHours(run.cost.device_hours)],
    ['Dollars so far', run => dollars(run, run.cost.device_hours)],
    ['Time to come', run => (known(run.cost.hours_left) ? formatDuration(3600 * run.cost.hours_left) : MISSING)],
    ['Device-hours to come', run => formatHours(run.cost.device_hours_left)],
    ['Dollars to come', run => dollars(run, run.cost.device_hours_left)],
    ['Device-hours in all', run => formatHours(total(run))],
    ['Dollars in all', run => dollars(run, total(run))],
    [
      'Price per device-hour',
      run =>
        known(run.cost.price)
          ? `${formatDollars(run.cost.price)} (${run.cost.price_source})`
          : run.cost.gpu === 'cpu'
            ? 'none'
            : 'unknown; pass --price',
    ],
  ];
  return card(
    '',
    scrolling(
      element(
        'table',
        {class: 'values'},
        element('caption', {class: 'hidden'}, 'Cost'),
        several()
          ? element(
              'thead',
              {},
              element(
                'tr',
                {},
                element('td'),
                runs.map((run, index) => element('th', {scope: 'col'}, runName(run, index))),
              ),
            )
          : null,
        element(
          'tbody',
          {},
          rows.map(([name, value]) =>
            element(
              'tr',
              {},
              element('th', {scope: 'row'}, name),
              runs.map(run => element('td', {}, value(run))),
            ),
          ),
        ),
      ),
      'Cost',
    ),
    quiet('Time to come: the remaining batches at the recent speed, without evaluations, saves and failures.'),
  );
}

/** Return the card with the keys whose values differ between the recipes of several runs. */
function recipeDifferences() {
  const {runs, differences} = page.data;
  const columns = [{title: 'Key', kind: 'text', head: true}, ...runs.map(run => ({title: run.label, kind: 'long'}))];
  return card(
    'Differences of the recipes',
    differences.length
      ? sortableTable(
          'Differences of the recipes',
          columns,
          differences.map(row => [
            row.key,
            ...row.values.map(value => (value === null ? {sort: null, content: MISSING} : value)),
          ]),
        )
      : quiet('The recipes are the same, except for their names and folders.'),
  );
}

function recipeSection() {
  const {runs} = page.data,
    parts = [];
  for (const run of runs) {
    const columns = [
      {title: 'Batch', kind: 'number'},
      {title: 'Time', kind: 'text'},
      {title: 'Key', kind: 'text', head: true},
      {title: 'Change', kind: 'long'},
    ];
    if (run.changes.length)
      parts.push(
        card(
          `Changes on resume${several() ? `, ${run.label}` : ''}`,
          sortableTable(
            'Changes on resume',
            columns,
            run.changes.map(each => [
              each.batch,
              {sort: each.time, content: formatTime(each.time)},
              each.key,
              each.change,
            ]),
          ),
        ),
      );
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
  const columns = [
    {title: 'Batch', kind: 'number', head: true},
    {title: 'Saved', kind: 'text'},
    {title: 'Size', kind: 'number'},
    {title: 'Devices', kind: 'number'},
    {title: 'Kind', kind: 'text'},
    {title: 'State', kind: 'text'},
  ];
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
    ...['Saves', 'Last at batch', 'Mean time', 'Training stopped for', 'Failed'].map(title => ({
      title,
      kind: 'number',
    })),
  ];
  return [
    rows.length
      ? card(
          several() ? `Checkpoints of ${run.label}` : 'Checkpoints that the run keeps',
          sortableTable('Checkpoints', columns, rows),
        )
      : quiet(`${several() ? `${run.label}: ` : ''}No checkpoint yet.`),
    run.saves.length
      ? card(
          several() ? `Saves of ${run.label}` : 'Saves, by tier',
          sortableTable(
            'Saves',
            saves,
            run.saves.map(each => [
              each.place,
              each.saves,
              each.last_batch,
              {sort: each.mean_seconds, content: formatDuration(each.mean_seconds)},
              {sort: each.stall_seconds, content: formatDuration(each.stall_seconds)},
              each.failed,
            ]),
          ),
        )
      : null,
  ].filter(Boolean);
}
