// Sampled images over time with a slider, and generated images beside real ones.
'use strict';

const imageSource = image => (page.data.images ? page.data.images[image.key] : `images/${image.key}.webp${page.query}`);

function picture(image, text) {
  const node = element('img', {src: imageSource(image), alt: text, width: image.width, height: image.height});
  node.classList.toggle('pixels', image.width < 128);
  return node;
}

/** Return the last sheet of a run at or before a batch; its first one if there is none. */
const sheetAt = (run, batch) => run.sheets.filter(sheet => sheet.batch <= batch).at(-1) || run.sheets[0];

/** Return the slider over the batches of all sheets, and the images at the chosen batch. */
function samplesOverTime() {
  const runs = page.data.runs.filter(run => run.sheets.length);
  if (!runs.length) return quiet('No image grids: add the callback image_grid to the recipe.');
  const batches = [...new Set(runs.flatMap(run => run.sheets.map(sheet => sheet.batch)))].sort((a, b) => a - b);
  const last = batches.length - 1;
  let index = page.sampled === null ? last : batches.filter(batch => batch <= page.sampled).length - 1;
  index = Math.max(0, index);
  const grid = element('div');
  const output = element('output', {for: 'samples-slider', id: 'samples-batch'});
  const range = {type: 'range', id: 'samples-slider', min: 0, max: last, step: 1, value: index};
  const slider = element('input', {...range, oninput: () => show(Number(slider.value))});
  const step = (text, change) => {
    const move = () => show(Math.min(last, Math.max(0, Number(slider.value) + change)));
    return element('button', {type: 'button', class: 'small', onclick: move}, text);
  };
  function show(at) {
    slider.value = at;
    // At the end, the slider follows a run that continues.
    page.sampled = at === last ? null : batches[at];
    output.textContent = `batch ${formatNumber(batches[at])} (${at + 1} of ${batches.length})`;
    slider.setAttribute('aria-valuetext', output.textContent);
    grid.replaceChildren(...sampleGrid(runs, batches[at]));
  }
  show(index);
  const left = runs.map(run => run.total_sheets - run.sheets.length).reduce((sum, count) => sum + count, 0);
  const label = element('label', {for: 'samples-slider'}, 'Samples at ');
  const bar = element('div', {class: 'slider'}, label, output, step('Previous', -1), step('Next', 1), slider);
  return element('div', {}, bar, grid, left ? quiet(`${plural(left, 'grid')} between these are left out.`) : null);
}

function sampleGrid(runs, batch) {
  const sheets = runs.map(run => sheetAt(run, batch));
  const whole = sheets.some(sheet => sheet.figures.some(figure => !figure.caption));
  if (whole) {
    return runs.map((run, index) => {
      const {batch, figures} = sheets[index];
      const text = several() ? element('figcaption', {}, `${run.label}, batch ${formatNumber(batch)}`) : null;
      const pictures = figures.flatMap(({images}) => images.map(image => picture(image, `Samples at batch ${batch}`)));
      return element('figure', {class: 'whole'}, text, pictures);
    });
  }
  if (!several() || runs.length === 1) {
    const figures = sheets[0].figures.map(({images, caption}) => {
      const pictures = images.map(image => picture(image, `${caption}, batch ${sheets[0].batch}`));
      return element('figure', {}, pictures, element('figcaption', {}, caption));
    });
    return [element('div', {class: 'grid'}, figures)];
  }
  const captions = [...new Set(sheets.flatMap(sheet => sheet.figures.map(figure => figure.caption)))];
  const prompts = captions.map(caption => {
    const figures = runs.map((run, index) => {
      const {batch, figures} = sheets[index];
      const figure = figures.find(each => each.caption === caption);
      if (!figure) return null;
      const pictures = figure.images.map(image => picture(image, `${caption}, ${run.label}, batch ${batch}`));
      const text = element('figcaption', {}, run.label, element('br'), `batch ${formatNumber(batch)}`);
      return element('figure', {}, pictures, text);
    });
    return element('div', {class: 'prompt'}, element('h4', {}, caption), element('div', {class: 'beside'}, figures));
  });
  return [element('div', {class: 'grid wide'}, prompts)];
}

/** Return generated images beside the real ones of the same captions, of the last evaluation. */
function generatedImages() {
  const title = 'Generated and real images';
  const figureOf = ({images, caption}) => {
    const textOf = index => (caption ? `${caption}, ${index ? 'real' : 'generated'}` : title);
    const pictures = images.map((image, index) => picture(image, textOf(index)));
    const text = caption ? element('figcaption', {}, caption) : null;
    return element('figure', {class: caption ? 'pair' : 'whole'}, element('div', {class: 'beside'}, pictures), text);
  };
  return page.data.runs
    .filter(run => run.generated)
    .map(run =>
      card(
        several() ? `${title}, ${run.label}` : title,
        quiet('Of each caption: the image that the last evaluation generated, and the real one.'),
        element('div', {class: 'grid'}, run.generated.figures.map(figureOf)),
      ),
    );
}
