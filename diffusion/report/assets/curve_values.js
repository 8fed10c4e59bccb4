// Values, colors and axis texts of curves.
'use strict';

const settings = {axis: 'batches', logX: false, smoothing: 2, theme: 'auto'};

const PALETTE = {
  light: ['#0067a5', '#c8500a', '#00805e', '#a8407c', '#94650a', '#4a5fc4', '#6b6f76', '#8c2d19'],
  dark: ['#56b0ea', '#f59352', '#34c79b', '#e694c4', '#dcae52', '#9aaaf5', '#a9afb8', '#e8836d'],
};
const DASHES = [[], [], [], [], [8, 4], [8, 4], [8, 4], [2, 3]];
// Viridis, without its ends that vanish before the background.
const LEVELS = {
  light: ['#440154', '#46327e', '#365c8d', '#277f8e', '#1b9177', '#3a9a4a', '#6f9a1f', '#98860f'],
  dark: ['#8f7fe0', '#7c93e3', '#5eaad6', '#49bcc0', '#4bcb9f', '#7cd771', '#b4de4b', '#f0e04a'],
};

function isDark() {
  return settings.theme === 'dark' || (settings.theme === 'auto' && matchMedia('(prefers-color-scheme: dark)').matches);
}
const colorOf = index => PALETTE[isDark() ? 'dark' : 'light'][index % 8];
const levelColor = (index, count) =>
  LEVELS[isDark() ? 'dark' : 'light'][count > 1 ? Math.round((7 * index) / (count - 1)) : 0];
const cssColor = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Return hours of a run at a batch, or null if it has no times. */
function hoursAt(run, batch) {
  if (!run.hours) return null;
  const [x, y] = run.hours;
  let low = 0,
    high = x.length - 1;
  if (batch <= x[0]) return y[0];
  if (batch >= x[high]) return batch > x[high] + 0.02 * (x[high] - x[0]) + 1 ? null : y[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= batch) low = middle;
    else high = middle;
  }
  return y[low] + ((y[high] - y[low]) * (batch - x[low])) / (x[high] - x[low]);
}

/** Return the weighted average around each value, with exponential weights by the distance along x to both sides. */
function smoothed(x, y, scale) {
  const count = x.length,
    out = new Array(count);
  const before = new Array(count),
    weights = new Array(count);
  let total = 0,
    weight = 0;
  for (let i = 0; i < count; i++) {
    const keep = i ? Math.exp((x[i - 1] - x[i]) / scale) : 0;
    total = keep * total + y[i];
    weight = keep * weight + 1;
    before[i] = total;
    weights[i] = weight;
  }
  total = weight = 0;
  for (let i = count - 1; i >= 0; i--) {
    const keep = i < count - 1 ? Math.exp((x[i] - x[i + 1]) / scale) : 0;
    total = keep * total + y[i];
    weight = keep * weight + 1;
    out[i] = (before[i] + total - y[i]) / (weights[i] + weight - 1);
  }
  return out;
}

/** Return the value of a column at an index or, where it has none, the nearest one within 3% of the columns before it. */
function nearestValue(x, values, index) {
  const reach = 0.03 * (x[x.length - 1] - x[0]) || 1;
  for (let i = index; i >= 0 && (index === x.length - 1 || x[index] - x[i] <= reach); i--)
    if (known(values[i])) return values[i];
  for (let i = index; i < values.length && x[i] - x[index] <= reach; i++) if (known(values[i])) return values[i];
  return null;
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${trimmed(value / 1e9)}B`;
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  if (size && size < 1e-3) return value.toExponential(1).replace('.0e', 'e');
  return trimmed(value);
}
const trimmed = value => String(Number(value.toPrecision(4)));
