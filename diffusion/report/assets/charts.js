// Line charts by uPlot, with a legend of buttons, smoothing, log axes, a table, and a cursor that the keyboard moves.
'use strict';

const charts = new Map(); // by id

class Chart {
  /** Args:
        spec: `title`, `series`, and optionally `format`, `log`, `stacked`, `xTitle`, `yTitle`, `note`, `marks`. A series has `label`,
          `color` (function), `curve` (x, y, mx, my), and optionally `run`, `dash`, `points` and `rough`; the curve of a
          rough series is drawn faintly behind its average. `ends` has the interval of each point, and `levels` has
          values with labels that are drawn as dashed lines.
  */
  constructor(id, spec) {
    this.id = id;
    this.hidden = new Set();
    this.log = Boolean(spec.log);
    this.plot = null;
    this.values = [];
    this.box = element('div', {class: 'plot', tabindex: '0', role: 'group', onkeydown: event => this.key(event)});
    this.legend = element('div', {class: 'legend'});
    this.position = element('output', {class: 'position'});
    const changeScale = () => {
      this.log = !this.log;
      this.draw();
      return this.log;
    };
    this.logButton = toggleButton(this.log, changeScale, 'log', element('span', {class: 'hidden'}, ' scale'));
    const attributes = {class: 'data', ontoggle: () => this.fillTable()};
    this.table = element('details', attributes, element('summary', {}, 'Table'), element('div'));
    this.heading = element('h3');
    this.note = element('p', {class: 'quiet'});
    const head = element('div', {class: 'head'}, this.heading, this.position, this.logButton);
    const parts = [head, this.box, this.legend, this.note, this.table];
    this.card = element('section', {class: 'card chart', id: `chart-${id}`}, parts);
    new ResizeObserver(() => this.resize()).observe(this.box);
    this.update(spec);
  }

  update(spec) {
    this.spec = spec;
    this.heading.textContent = spec.title;
    this.logButton.hidden = Boolean(spec.stacked);
    this.note.textContent = spec.note || '';
    this.note.hidden = !spec.note;
    this.draw();
  }

  get format() {
    return this.spec.format || formatNumber;
  }
  get shown() {
    return this.spec.series.filter(series => !this.hidden.has(series.label));
  }

  /** Return the x values of a series on the chosen axis, null where unknown. */
  axisOf(series, batches) {
    return settings.axis === 'hours' && series.run && !this.spec.xTitle
      ? batches.map(batch => hoursAt(series.run, batch))
      : batches;
  }

  /** Return points of a curve that can be drawn: on a log axis, only positive ones. */
  points(series, batches, values) {
    const x = this.axisOf(series, batches),
      logX = settings.logX && !this.spec.xTitle;
    const kept = [];
    for (let i = 0; i < x.length; i++) {
      if (x[i] === null || (logX && x[i] <= 0) || (this.log && !(values[i] > 0))) continue;
      if (kept.length && x[i] <= x[kept[kept.length - 1]]) continue; // uPlot needs increasing x
      kept.push(i);
    }
    return [kept.map(i => x[i]), kept.map(i => values[i])];
  }

  /** Return tables and uPlot series of all shown curves. */
  curves() {
    const tables = [],
      lines = [];
    const add = (series, data, options) => {
      if (data[0].length) {
        tables.push(data);
        lines.push({
          label: series.label,
          spanGaps: true,
          stroke: series.color(),
          width: 1.75,
          dash: series.dash,
          points: {show: Boolean(series.points) || data[0].length < 3, size: 6, fill: series.color()},
          ...options,
        });
      }
    };
    if (this.spec.stacked) return this.stackedCurves();
    for (const series of this.shown) {
      const {x, y, mx, my} = series.curve;
      const raw = this.points(series, x, y);
      const mean = mx ? this.points(series, mx, my) : raw;
      const length = mean[0].length;
      if (!series.rough || length < 30 || settings.smoothing === 0) {
        add(series, settings.smoothing === 0 || !mx || !series.rough ? raw : mean, {});
        continue;
      }
      const extent = mean[0][length - 1] - mean[0][0];
      add(series, raw, {width: 1, alpha: 0.22, rough: true, points: {show: false}});
      add(series, [mean[0], smoothed(mean[0], mean[1], Math.max(1e-12, (extent * settings.smoothing) / 200))], {
        width: 2,
      });
    }
    return {tables, lines, bands: []};
  }

  stackedCurves() {
    const used = this.shown.map(series => {
      const {x, y, mx, my} = series.curve;
      return {series, x: mx || x, y: my || y};
    });
    const length = Math.min(...used.map(each => each.x.length));
    if (!used.length || !length) return {tables: [], lines: [], bands: []};
    const [x] = this.points(used[0].series, used[0].x.slice(0, length), new Array(length).fill(1));
    const offset = length - x.length;
    const totals = new Array(x.length).fill(0),
      columns = [],
      lines = [],
      bands = [];
    for (const {series, y} of used) {
      columns.push(x.map((_, i) => (totals[i] += y[i + offset])));
      lines.push({
        label: series.label,
        stroke: series.color(),
        width: 1,
        fill: `${series.color()}d9`,
        points: {show: x.length < 3},
      });
    }
    for (let i = columns.length - 1; i > 0; i--) bands.push({series: [i + 1, i]});
    return {tables: [[x, ...columns]], lines, bands};
  }

  draw() {
    const {tables, lines, bands} = this.curves();
    this.fillLegend();
    const width = Math.floor(this.box.clientWidth);
    if (this.plot) this.plot.destroy();
    this.plot = null;
    const empty = !tables.length;
    this.box.classList.toggle('empty', empty);
    this.box.textContent = empty ? 'No values to show.' : '';
    if (empty || width < 50) return;
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const grid = {stroke: cssColor('--grid'), width: 1},
      axis = {stroke: cssColor('--muted'), grid, ticks: grid, font: '12px system-ui, sans-serif'};
    const logX = settings.logX && !this.spec.xTitle;
    const short = values =>
      values.map(value =>
        value === null ? '' : this.spec.format === formatPercent ? `${trimmed(100 * value)}%` : shortNumber(value),
      );
    this.plot = new uPlot(
      {
        width,
        height: this.height(),
        legend: {show: false},
        padding: [10, 22, 0, 0],
        scales: {
          x: {time: false, distr: logX ? 3 : 1},
          y: {
            distr: this.log ? 3 : 1,
            range: this.spec.stacked ? [0, 1] : this.log ? undefined : this.range.bind(this),
          },
        },
        axes: [
          {
            ...axis,
            size: 34,
            ...this.axisTitle(this.xTitle),
            values: (_, values) => values.map(value => (value === null ? '' : shortNumber(value))),
            space: 60,
          },
          {
            ...axis,
            size: this.axisWidth.bind(this),
            ...this.axisTitle(this.spec.yTitle),
            values: (_, values) => short(values),
          },
        ],
        cursor: {
          sync: {key: this.spec.xTitle ? this.id : 'x', scales: ['x', null]},
          drag: {x: true, y: false},
          points: {size: 7},
        },
        series: [{}, ...lines],
        bands,
        hooks: {drawAxes: [plot => this.drawLevels(plot)], draw: [plot => this.drawMarks(plot)], setCursor: [plot => this.showCursor(plot)]},
      },
      data,
      this.box,
    );
    this.describe();
    this.showCursor(this.plot);
  }

  get xTitle() {
    return this.spec.xTitle || (settings.axis === 'hours' ? 'hours' : 'batch');
  }

  axisTitle(label) {
    return label ? {label, labelSize: 18, labelGap: 0, labelFont: '12px system-ui, sans-serif'} : {};
  }

  range(_, low, high) {
    if (!known(low) || !known(high)) return [0, 1];
    // Averages of equal values differ by rounding, which is not to fill the chart.
    const more = this.shown.flatMap(({ends = [], levels = []}) => [...ends.flat(), ...levels.map(each => each.score)]);
    [low, high] = [Math.min(low, ...more), Math.max(high, ...more)];
    const margin = high - low > 1e-6 * Math.abs(high) ? 0.05 * (high - low) : Math.abs(high) * 0.1 || 1;
    const top = this.spec.format === formatPercent && high <= 1 ? Math.min(1, high + margin) : high + margin;
    return [low >= 0 && low - margin < 0.15 * high ? Math.min(0, low) : low - margin, top];
  }

  axisWidth(plot, values, index, cycle) {
    if (cycle > 1 || !values) return plot.axes[index]._size || 50;
    plot.ctx.save();
    plot.ctx.font = plot.axes[index].font[0] || plot.axes[index].font;
    const widest = Math.max(...values.map(value => plot.ctx.measureText(value || '').width)) / devicePixelRatio;
    plot.ctx.restore();
    return Math.ceil(widest) + 20;
  }

  height() {
    return (this.box.clientWidth < 420 ? 215 : 265) + (this.shown.some(series => series.levels) ? 75 : 0);
  }

  resize() {
    const width = Math.floor(this.box.clientWidth);
    if (!this.plot) {
      if (width >= 50) this.draw();
      return;
    }
    if (Math.abs(width - this.plot.width) > 1) this.plot.setSize({width, height: this.height()});
  }

  /** Draw vertical lines where the run resumed, and triangles at values that are NaN or infinite. */
  drawMarks(plot) {
    const {ctx, bbox} = plot,
      ratio = devicePixelRatio;
    ctx.save();
    for (const mark of this.spec.xTitle ? [] : this.spec.marks || []) {
      const at = settings.axis === 'hours' ? hoursAt(mark.run, mark.batch) : mark.batch;
      const x = at === null ? NaN : plot.valToPos(at, 'x', true);
      if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
      ctx.strokeStyle = cssColor('--muted');
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.lineWidth = ratio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    for (const series of this.shown) this.drawIntervals(plot, series);
    ctx.fillStyle = cssColor('--bad');
    for (const series of this.shown) {
      for (const batch of series.curve.nonfinite || []) {
        const [at] = this.axisOf(series, [batch]);
        const x = at === null ? NaN : plot.valToPos(at, 'x', true),
          y = bbox.top + bbox.height;
        if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
        ctx.beginPath();
        ctx.moveTo(x - 5 * ratio, y);
        ctx.lineTo(x + 5 * ratio, y);
        ctx.lineTo(x, y - 9 * ratio);
        ctx.fill();
      }
    }
    ctx.restore();
  }

  drawIntervals({ctx, valToPos}, series) {
    const cap = 4 * devicePixelRatio;
    ctx.strokeStyle = series.color();
    ctx.lineWidth = 1.25 * devicePixelRatio;
    ctx.beginPath();
    this.axisOf(series, series.curve.x).forEach((at, i) => {
      if (at === null || !series.ends?.[i]?.length) return;
      const x = valToPos(at, 'x', true),
        [low, high] = series.ends[i].map(end => valToPos(end, 'y', true));
      for (const [x0, y0, x1, y1] of [[x, low, x, high], [x - cap, low, x + cap, low], [x - cap, high, x + cap, high]]) {
        ctx.moveTo(x0, y0);
        ctx.lineTo(x1, y1);
      }
    });
    ctx.stroke();
  }

  /** Draw dashed lines with labels, in two columns; equal values share one, and labels that do not fit are left out. */
  drawLevels({ctx, bbox, valToPos}) {
    const levels = this.shown.flatMap(series => series.levels || []),
      ratio = devicePixelRatio,
      columns = [[bbox.left + 6 * ratio, -Infinity], [bbox.left + bbox.width * 0.55, -Infinity]];
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = 'left';
    ctx.strokeStyle = cssColor('--muted');
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    const scores = [...new Set(levels.map(each => each.score))].sort((a, b) => b - a),
      heights = scores.map(score => valToPos(score, 'y', true));
    ctx.beginPath();
    for (const y of heights) {
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
    }
    ctx.stroke();
    scores.forEach((score, i) => {
      const [first, ...others] = levels.filter(each => each.score === score).map(each => each.model),
        text = `${first}${others.length ? ` +${others.length}` : ''} ${trimmed(score)}`,
        width = ctx.measureText(text).width,
        column = columns.find(([x, above]) => heights[i] - above >= 14 * ratio && x + width < bbox.left + bbox.width);
      if (!column) return;
      column[1] = heights[i];
      ctx.fillStyle = cssColor('--card');
      ctx.fillRect(column[0] - 2 * ratio, heights[i] - 6 * ratio, width + 4 * ratio, 12 * ratio);
      ctx.fillStyle = cssColor('--muted');
      ctx.fillText(text, column[0], heights[i] + 4 * ratio);
    });
    ctx.restore();
  }

  fillLegend() {
    this.values = [];
    const buttons = this.spec.series.map(series => {
      const value = element('span', {class: 'value'});
      const swatch = element('span', {class: 'swatch', 'aria-hidden': 'true'});
      swatch.style.borderTopColor = series.color();
      swatch.style.borderTopStyle = series.dash && series.dash.length ? 'dashed' : 'solid';
      this.values.push([series, value]);
      const press = event => {
        if (!this.hidden.delete(series.label)) this.hidden.add(series.label);
        const index = [...this.legend.children].indexOf(event.currentTarget);
        this.draw();
        this.legend.children[index].focus();
      };
      const attributes = {type: 'button', 'aria-pressed': String(!this.hidden.has(series.label)), onclick: press};
      return element('button', attributes, swatch, element('span', {class: 'name'}, series.label), value);
    });
    this.legend.replaceChildren(...buttons);
  }

  /** Show the values at the cursor in the legend, or the last ones. */
  showCursor(plot) {
    const index = plot.cursor.idx,
      inside = known(index) && plot.cursor.left >= 0;
    const at = inside ? plot.data[0][index] : null;
    this.position.textContent = inside
      ? `${this.spec.xTitle || (settings.axis === 'hours' ? 'hour' : 'batch')} ${formatNumber(Number(at.toPrecision(6)))}`
      : '';
    let stackedBelow = 0;
    for (const [series, box] of this.values) {
      if (this.hidden.has(series.label) || series.levels) {
        box.textContent = '';
        continue;
      }
      let value = null;
      // The last column of a series is its average; the one before it, the values themselves.
      for (let i = plot.series.length - 1; i > 0 && value === null; i--) {
        if (plot.series[i].label !== series.label) continue;
        value = nearestValue(plot.data[0], plot.data[i], inside ? index : plot.data[0].length - 1);
      }
      if (this.spec.stacked && value !== null) [value, stackedBelow] = [value - stackedBelow, value];
      box.textContent = this.format(value);
    }
  }

  /** Move the cursor by arrow keys; Escape shows the whole curve again. */
  key(event) {
    if (!this.plot) return;
    const count = this.plot.data[0].length;
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      PageUp: -Math.ceil(count / 20),
      PageDown: Math.ceil(count / 20),
      Home: -count,
      End: count,
    };
    if (event.key === 'Escape') {
      this.plot.setScale('x', {min: this.plot.data[0][0], max: this.plot.data[0][count - 1]});
      this.plot.setCursor({left: -10, top: -10});
    } else if (event.key in steps) {
      const now = this.plot.cursor.idx;
      const from = known(now) && this.plot.cursor.left >= 0 ? now : event.key === 'ArrowRight' ? -1 : count;
      const index = Math.min(count - 1, Math.max(0, from + steps[event.key]));
      this.plot.setCursor({left: this.plot.valToPos(this.plot.data[0][index], 'x'), top: 10});
      event.preventDefault();
    }
  }

  describe() {
    const texts = this.shown
      .filter(series => series.curve.y.length)
      .slice(0, 8)
      .map(series => {
        const {x, y} = series.curve;
        return `${series.label} from ${this.format(y[0])} at ${formatNumber(x[0])} to ${this.format(y[y.length - 1])} at ${formatNumber(x[x.length - 1])}`;
      });
    const label = `Chart of ${this.spec.title}: ${texts.join('; ')}. Arrow keys move the cursor.`;
    this.box.setAttribute('aria-label', label);
    this.fillTable();
  }

  /** Fill the table below the chart, while it is open, with about 40 rows. */
  fillTable() {
    if (!this.table.open || !this.plot) return;
    const {data} = this.plot;
    const columns = this.shown.filter(series => !series.levels).map(series => {
      const index = this.plot.series.reduce((found, each, i) => (i && each.label === series.label ? i : found), 0);
      return [series.label, data[index]];
    });
    const count = data[0].length,
      rows = Math.min(40, count);
    const body = Array.from({length: rows}, (_, row) => {
      const index = rows > 1 ? Math.round((row * (count - 1)) / (rows - 1)) : 0;
      return [
        formatNumber(Number(data[0][index].toPrecision(6))),
        ...columns.map(([, values]) => (values ? this.format(nearestValue(data[0], values, index)) : MISSING)),
      ];
    });
    const head = [this.spec.xTitle || settings.axis, ...columns.map(([label]) => label)];
    const caption = `${this.spec.title}${this.spec.stacked ? ', cumulated' : ''}`;
    this.table.lastElementChild.replaceChildren(
      plainTable(caption, head, body, {kind: 'number', label: `Table of ${this.spec.title}`}),
    );
  }
}

/** Return the card of a chart, which is created on first use and updated later. */
function chartCard(id, spec) {
  const chart = charts.get(id);
  if (chart) chart.update(spec);
  else charts.set(id, new Chart(id, spec));
  return charts.get(id).card;
}

const redrawCharts = () => charts.forEach(chart => chart.draw());
