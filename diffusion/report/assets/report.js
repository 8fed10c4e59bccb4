// Assembly of a report page: toolbar, sections, and live updates when the page is served.
'use strict';

const page = {data: null, explored: '', sampled: null, query: '', signatures: new Map()};

const SECTIONS = [
  ['summary', 'Summary', () => [summary(), notes()], []],
  ['training', 'Training', () => [], trainingCharts, 'No batch yet.'],
  [
    'speed',
    'Speed',
    () => [stageShares()],
    speedCharts,
    'No speed was logged: the callback breakdown logs images per second, MFU and the share of each stage.',
  ],
  [
    'health',
    'Health',
    () => [],
    healthCharts,
    'No GPU or data health was logged: the callback node_health logs that of GPUs, and replaced samples are logged when there are any.',
  ],
  ['samples', 'Samples', () => [card('', samplesOverTime()), ...generatedImages()], []],
  [
    'evaluations',
    'Evaluations',
    () => {
      const [table, ...plots] = samplingSweep();
      return [evaluationTable(), ...plots, ...categoryTables(), ...costCards(), table, ...publishedCards(), ...exampleCards()];
    },
    evaluationCharts,
  ],
  ['attempts', 'Attempts and goodput', () => page.data.runs.map(attemptsOf), []],
  ['cost', 'Cost', () => [costTable()], []],
  ['recipe', 'Recipe', () => [recipeSection()], []],
  ['checkpoints', 'Checkpoints', () => page.data.runs.flatMap(checkpointsOf), []],
  ['metrics', 'All metrics', () => [explorer()], []],
];

function notes() {
  const all = page.data.runs.flatMap(run => run.notes.map(note => (several() ? `${run.label}: ${note}` : note)));
  return all.length ? notesBox(all, all.length < 5) : null;
}

/** Return what a section shows apart from charts, as a text; the section is built again when it changes. */
function signatureOf(id) {
  const {runs, differences, better} = page.data;
  const parts = {
    summary: run => [run.status, run.cost, run.notes, differences, bestLoss(run), last(run, 'throughput/samples_per_sec')],
    speed: run => Object.keys(STAGES).map(stage => last(run, `time_share/${stage}`)),
    samples: run => [run.sheets, run.generated],
    evaluations: run => run.evaluations,
    attempts: run => [run.attempts, run.breakdown],
    cost: run => run.cost,
    recipe: run => [run.recipe, run.changes],
    checkpoints: run => [run.checkpoints, run.saves],
    metrics: run => Object.keys(run.series),
  };
  return JSON.stringify([runs.map(parts[id] || (() => null)), better]);
}

function showSection([id, title, build, specs, emptyText]) {
  const list = typeof specs === 'function' ? specs() : [];
  const signature = `${list.map(([name]) => name)} ${signatureOf(id)}`;
  if (page.signatures.get(id) === signature) {
    for (const [name, spec] of list) chartCard(name, spec);
    if (id === 'metrics' && page.explored) chartCard('explorer', exploredChart());
    return;
  }
  page.signatures.set(id, signature);
  const focused = document.activeElement && document.activeElement.id;
  const section = document.getElementById(id);
  const cards = list.map(([name, spec]) => chartCard(name, spec));
  const rest = build().filter(Boolean);
  const charted = typeof specs === 'function';
  const wide = charted && id !== 'evaluations' ? 0 : charted ? 1 : rest.length; // blocks of the whole width, before the others
  const stages = list.findIndex(([name]) => name === 'stages');
  const grid = [...cards];
  grid.splice(stages < 0 ? grid.length : stages + 1, 0, ...rest.slice(wide));
  section.replaceChildren(
    element('h2', {}, title),
    ...rest.slice(0, wide),
    grid.length ? element('div', {class: 'cards'}, grid) : emptyText ? quiet(emptyText) : '',
  );
  if (focused && section.querySelector(`#${CSS.escape(focused)}`)) document.getElementById(focused).focus();
}

function showData(data) {
  data.images = data.images || (page.data && page.data.images);
  const counts = new Map();
  for (const run of data.runs) counts.set(run.name, (counts.get(run.name) || 0) + 1);
  data.runs.forEach((run, index) => {
    run.label = counts.get(run.name) > 1 ? `${run.name} (${index + 1})` : run.name;
  });
  page.data = data;
  for (const section of SECTIONS) showSection(section);
  const [run] = data.runs;
  document
    .getElementById('state')
    .replaceChildren(...(several() ? [] : [stateBadge(run), progressBar(run)].filter(Boolean)));
  document.getElementById('generated').textContent =
    ` · ${page.live ? 'read' : 'written'} ${formatTime(data.generated)}`;
}

function choice(name, label, options, chosen, change) {
  return element(
    'fieldset',
    {class: 'choice'},
    element('legend', {class: 'hidden'}, label),
    options.map(([value, text, disabled]) => {
      const id = `${name}-${value}`,
        onchange = () => change(value);
      return [
        element('input', {type: 'radio', id, name, value, checked: value === chosen, disabled, onchange}),
        element('label', {for: id}, text),
      ];
    }),
  );
}

function toolbar() {
  const hours = page.data.runs.some(run => run.hours);
  const smooth = () => {
    settings.smoothing = Number(smoothing.value);
    output.textContent = `${settings.smoothing}%`;
    cancelAnimationFrame(page.frame);
    page.frame = requestAnimationFrame(redrawCharts);
  };
  const range = {type: 'range', id: 'smoothing', min: 0, max: 10, step: 0.5, value: settings.smoothing};
  const smoothing = element('input', {...range, oninput: smooth});
  const output = element('output', {for: 'smoothing'}, `${settings.smoothing}%`);
  const title = 'Width of the average, in percent of the curve';
  const label = element('label', {for: 'smoothing', title}, 'Smoothing');
  const changeAxis = () => {
    settings.logX = !settings.logX;
    redrawCharts();
    return settings.logX;
  };
  return [
    choice('axis', 'Horizontal axis', [['batches', 'Batches'], ['hours', 'Hours', !hours]], settings.axis, value => {
      settings.axis = value;
      redrawCharts();
    }),
    toggleButton(settings.logX, changeAxis, 'Log axis'),
    element('span', {class: 'range'}, label, smoothing, output),
    // Draw again what has colors of the theme.
    themeChoice(() => {
      page.signatures.clear();
      showData(page.data);
    }),
  ];
}

function themeChoice(changed) {
  const stored = storedTheme();
  setTheme(stored);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', changed);
  return choice('theme', 'Colors', [['auto', 'Auto'], ['light', 'Light'], ['dark', 'Dark']], stored, value => {
    setTheme(value);
    try {
      localStorage.setItem('theme', value);
    } catch {
      /* storage is refused to this page */
    }
    changed();
  });
}

function storedTheme() {
  try {
    return localStorage.getItem('theme') || 'auto';
  } catch {
    return 'auto';
  }
}

function setTheme(theme) {
  settings.theme = theme;
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

/** Ask the server for newer data every few seconds while the page is visible. */
async function follow(seconds, show) {
  let tag = '';
  for (;;) {
    await new Promise(resolve => setTimeout(resolve, 1000 * seconds));
    if (document.hidden) continue;
    const status = document.getElementById('live');
    try {
      const answer = await fetch(`data.json${page.query}`, {headers: tag ? {'If-None-Match': tag} : {}});
      if (answer.status === 200) {
        tag = answer.headers.get('ETag') || '';
        show(await answer.json());
      }
      const isLive = answer.ok || answer.status === 304;
      status.textContent = isLive ? 'live' : `the server answers ${answer.status}`;
      status.className = isLive ? 'badge good' : 'badge bad';
    } catch {
      status.textContent = 'not connected';
      status.className = 'badge bad';
    }
  }
}

function start() {
  const data = JSON.parse(document.getElementById('data').textContent);
  page.live = data.live;
  page.query = location.search;
  const main = document.querySelector('main'),
    isTable = data.kind === 'table';
  page.data = data;
  if (isTable) {
    document.getElementById('toolbar').append(themeChoice(() => {}));
    showTable(data, main);
  } else {
    for (const run of data.runs) run.label = run.name;
    document.getElementById('toolbar').append(...toolbar());
    main.append(...SECTIONS.map(([id]) => element('section', {id, class: 'part-of-page'})));
    document.getElementById('contents').append(...SECTIONS.map(([id, title]) => element('a', {href: `#${id}`}, title)));
    showData(data);
  }
  document.body.dataset.ready = 'true';
  if (data.live) {
    document.getElementById('live').hidden = false;
    follow(data.live, isTable ? newer => showTable(newer, main) : showData);
  }
}

start();
