// Elements of the page and texts of numbers. Text from a run's files goes through `textContent`, never through HTML.
'use strict';

/** Return a new element with attributes, listeners (`on...`) and children. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

/** Return a new SVG element with attributes and children. */
function svgElement(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const known = value => value !== null && value !== undefined && !Number.isNaN(value);
const MISSING = '–';

/** Return a number with about four significant digits. */
function formatNumber(value) {
  if (!known(value)) return MISSING;
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString('en-US');
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace('e+', 'e');
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return value.toLocaleString('en-US', {maximumFractionDigits: digits, minimumFractionDigits: digits});
}

/** Return device-hours; a test run has too few for a number that says something. */
const formatHours = hours => (known(hours) && hours > 0 && hours < 0.01 ? 'under 0.01' : formatNumber(hours));

const formatPercent = value => (known(value) ? `${(100 * value).toFixed(1)}%` : MISSING);

function formatDuration(seconds) {
  if (!known(seconds)) return MISSING;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

function formatBytes(bytes) {
  if (!known(bytes)) return MISSING;
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];
  const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function formatDollars(dollars) {
  if (!known(dollars)) return MISSING;
  const digits = dollars < 100 ? 2 : 0;
  return `$${dollars.toLocaleString('en-US', {minimumFractionDigits: digits, maximumFractionDigits: digits})}`;
}

/** Return a time as `2026-11-25 02:24`, in the reader's time zone; the time is in seconds since 1970 or ISO 8601. */
function formatTime(time) {
  if (!known(time) || time === '' || time === 0) return MISSING;
  const date = new Date(typeof time === 'number' ? 1000 * time : time);
  if (Number.isNaN(date.getTime())) return String(time);
  const two = number => String(number).padStart(2, '0');
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

const batchText = (batch, total) => formatNumber(batch) + (known(total) ? ` of ${formatNumber(total)}` : '');
const plural = (count, word) => `${formatNumber(count)} ${word}${count === 1 ? '' : 's'}`;

/** Return a table whose columns are sorted by a click or the Enter key on their heads.

    Args:
      caption: Description of the table, for screen readers.
      columns: `{title, kind}` with kind `text`, `long` (text of several lines) or `number`.
      order: Object with the `column` by which rows are sorted, -1 for none, and the `sign`; it is changed by clicks.
      rows: Arrays of cells; a cell is a text, a number, or `{sort, content, best, below}`, whose content may be an element.
*/
function sortableTable(caption, columns, rows, order = {column: -1, sign: 1}) {
  const body = element('tbody');
  const heads = columns.map((column, index) => {
    const sort = () => {
      order.sign = order.column === index ? -order.sign : 1;
      order.column = index;
      fill();
    };
    const arrow = element('span', {'aria-hidden': 'true', class: 'arrow'});
    const button = element('button', {type: 'button', class: 'sort', onclick: sort}, column.title, arrow);
    return element('th', {scope: 'col', class: column.kind === 'number' ? 'number' : null}, button);
  });
  const key = cell => (cell !== null && typeof cell === 'object' ? cell.sort : cell);
  function compare(left, right) {
    const [a, b] = [key(left[order.column]), key(right[order.column])];
    if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : 0; // missing values last
    const difference = typeof a === 'number' && typeof b === 'number' ? a - b : null;
    return order.sign * (difference ?? String(a).localeCompare(String(b), 'en', {numeric: true}));
  }
  function fill() {
    heads.forEach((head, index) => {
      const mine = index === order.column;
      head.setAttribute('aria-sort', mine ? (order.sign > 0 ? 'ascending' : 'descending') : 'none');
      head.querySelector('.arrow').textContent = mine ? (order.sign > 0 ? ' ▲' : ' ▼') : '';
    });
    const sorted = order.column < 0 ? rows : [...rows].sort(compare);
    const cells = row => row.map((cell, index) => tableCell(cell, columns[index]));
    body.replaceChildren(...sorted.map(row => element('tr', {}, cells(row))));
  }
  fill();
  const head = element('thead', {}, element('tr', {}, heads));
  return scrolling(element('table', {}, element('caption', {class: 'hidden'}, caption), head, body), caption);
}

function tableCell(cell, column) {
  const rich = cell !== null && typeof cell === 'object' && !(cell instanceof Node);
  let content = rich ? cell.content : cell;
  if (typeof content === 'number' || !known(content)) content = formatNumber(content);
  const best = rich && cell.best;
  const style = [column.kind === 'text' ? '' : column.kind, best ? 'best' : ''].join(' ').trim() || null;
  return element(
    column.head ? 'th' : 'td',
    {scope: column.head ? 'row' : null, class: style},
    content,
    best && element('span', {class: 'star', title: 'best'}, ' ★', element('span', {class: 'hidden'}, ' best')),
    rich && cell.below,
  );
}

/** Return a table of names with values, below the `titles` of the columns, if any; `kind` is the class of the cells. */
function plainTable(caption, titles, rows, {style = null, kind = null, label = caption} = {}) {
  const head = titles.map(title => (title ? element('th', {scope: 'col', class: kind}, title) : element('td')));
  const body = rows.map(([name, ...values]) => {
    const cells = values.map(value => element('td', {class: kind}, value));
    return element('tr', {}, element('th', {scope: 'row', class: kind}, name), cells);
  });
  const table = element(
    'table',
    {class: style},
    element('caption', {class: 'hidden'}, caption),
    head.length ? element('thead', {}, element('tr', {}, head)) : null,
    element('tbody', {}, body),
  );
  return scrolling(table, label);
}

/** Return the columns of a table from their kinds by title; `head` is the title of the column that names the rows. */
const columnsOf = (kinds, head) => Object.entries(kinds).map(([title, kind]) => ({title, kind, head: title === head}));
const numbers = titles => titles.map(title => ({title, kind: 'number'}));

/** Return a button that turns something on and off; `change` does so and returns the new state. */
function toggleButton(pressed, change, ...content) {
  const press = () => button.setAttribute('aria-pressed', String(change()));
  const attributes = {type: 'button', class: 'small', 'aria-pressed': String(pressed), onclick: press};
  const button = element('button', attributes, ...content);
  return button;
}

/** Return a block that scrolls sideways on small screens, also by keyboard. */
const scrolling = (content, label) =>
  element('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': label}, content);

const card = (title, ...content) =>
  element('section', {class: 'card'}, title ? element('h3', {}, title) : null, ...content);
const quiet = text => element('p', {class: 'quiet'}, text);

const notesBox = (notes, open) =>
  element(
    'details',
    {class: 'notes', open},
    element('summary', {}, plural(notes.length, 'note')),
    element('ul', {}, notes.map(note => element('li', {}, note))),
  );
