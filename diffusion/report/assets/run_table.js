// Table of all runs in a folder or bucket.
'use strict';

const tableOrder = {column: 8, sign: -1}; // the newest first

function showTable(data, main) {
  const columns = columnsOf(
    {
      Run: 'long', State: 'long', Batch: 'number', Loss: 'number', 'Last evaluation': 'long', Goodput: 'number',
      'Device-hours': 'number', Dollars: 'number', 'Last activity': 'text',
    },
    'Run',
  );
  const barOf = row => {
    if (!known(row.total) || !known(row.batch)) return '';
    const value = Math.min(1, row.batch / row.total);
    return element('progress', {max: 1, value, 'aria-label': `${row.name}: share of the batches`});
  };
  const rows = data.rows.map(row => [
    {sort: row.name, content: row.link ? element('a', {href: row.link + page.query}, row.name) : row.name},
    {sort: row.state, content: element('span', {class: `badge ${row.kind}`}, row.state)},
    {sort: row.batch, content: element('span', {}, barOf(row), batchText(row.batch, row.total))},
    row.loss,
    {sort: row.evaluation, content: row.evaluation || MISSING},
    {sort: row.goodput, content: formatPercent(row.goodput)},
    {sort: row.device_hours, content: formatHours(row.device_hours)},
    {sort: row.dollars, content: formatDollars(row.dollars)},
    {sort: row.last_activity, content: formatTime(row.last_activity)},
  ]);
  document.getElementById('generated').textContent =
    ` · ${data.live ? 'read' : 'written'} ${formatTime(data.generated)}`;
  main.replaceChildren(
    element(
      'section',
      {class: 'part-of-page'},
      element('h2', {}, plural(rows.length, 'run')),
      element('section', {class: 'card dense'}, sortableTable('Runs', columns, rows, tableOrder)),
      data.rows.some(row => !row.link)
        ? quiet('Runs have a link if diffusion report RUN has written their page, and this table is in their parent folder.')
        : '',
      data.notes.length ? notesBox(data.notes, true) : '',
    ),
  );
}
