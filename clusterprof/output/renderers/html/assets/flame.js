// The flame graph of lost device time: zoom, filter, compare one rank with the others, search.

const FRAME_HEIGHT = 21;
const FG = { zoomed: 0, at: 0, rank: -1, compare: false, words: '', boxes: [], times: null };

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function where() {
  const body = document.getElementById('where-body');
  if (!body || !F) return;
  const change = (changes) => {
    Object.assign(FG, changes);
    redraw();
  };
  const causes = [['-1', 'All causes'], ...F.causes.map((at) => [String(at), D.causes[at].id])];
  const known = (cause) => String(F.causes.includes(cause) ? cause : -1);
  const ranks = [['-1', 'All ranks'], ...F.ranks.map((at) => [String(at),
    D.nodes.length > 1 ? fullRankName(at) : rankName(at)])];
  const compare = el('button', {
    type: 'button', onclick: () => change({ compare: !FG.compare }),
  }, 'Compare with others');
  const whole = el('button', {
    type: 'button', onclick: () => change({ zoomed: 0, at: 0 }),
  }, 'Whole graph');
  const search = el('input', {
    type: 'search', id: 'frames', placeholder: 'Search function or file',
    'aria-label': 'Search function or file', spellcheck: 'false', autocomplete: 'off',
    oninput: () => change({ words: search.value.trim().toLowerCase() }),
  });
  const matched = el('span', { class: 'range', 'aria-live': 'polite' });
  const graph = shape('svg', {
    class: 'flame', tabindex: 0, role: 'application',
    'aria-label': 'Flame graph of lost device time. Arrows move between frames, Enter zooms into '
      + 'the frame, Escape shows the whole graph.',
  });
  const box = el('div', { class: 'flames' }, graph);
  const about = el('p', { class: 'about', 'aria-live': 'polite' });
  const hints = el('p', { class: 'hint' });
  body.replaceChildren(el('div', { class: 'controls' },
    choice('Cause', causes, () => known(S.cause), (at) => set({ cause: Number(at) })),
    D.count > 1 ? choice('Rank', ranks, () => String(FG.rank), (at) => change({
      rank: Number(at), compare: FG.compare && Number(at) >= 0,
    })) : null,
    D.count > 1 ? compare : null, whole, search, matched), box, about, hints);
  frameEvents(graph, change);
  let shown = '';
  drawers.push(() => {
    const wide = Math.max(200, box.clientWidth);
    const cause = Number(known(S.cause));
    const key = [cause, S.node, FG.rank, FG.compare, FG.zoomed, FG.words, FG.at, wide].join(' ');
    if (key === shown) return;
    shown = key;
    const { rank } = FG;
    FG.times = frameTimes(cause, S.node, rank, FG.compare);
    if (!FG.times.width[FG.zoomed]) FG.zoomed = 0;
    if (!FG.times.width[FG.at]) FG.at = FG.zoomed;
    FG.boxes = layOutFrames(FG.zoomed, FG.times, wide);
    drawFrames(graph, wide);
    compare.disabled = rank < 0;
    compare.setAttribute('aria-pressed', String(FG.compare));
    whole.disabled = FG.zoomed === 0;
    const part = matchedWidth(FG.zoomed, FG.words, FG.times.width)
      / Math.max(1, FG.times.width[FG.zoomed]);
    matched.textContent = FG.words ? percent(part) + ' matched' : '';
    about.replaceChildren(...aboutFrame(FG.at));
    hints.textContent = frameHint();
  });
  new ResizeObserver(redraw).observe(box);
}

function drawFrames(graph, wide) {
  const rows = FG.boxes.reduce((most, frame) => Math.max(most, frame.depth + 1), 1);
  const high = rows * FRAME_HEIGHT;
  graph.setAttribute('viewBox', '0 0 ' + wide + ' ' + high);
  graph.setAttribute('width', wide);
  graph.setAttribute('height', high);
  graph.replaceChildren(...FG.boxes.map(drawFrame));
  if (!FG.times.width[0]) {
    graph.append(shape('text', { x: 6, y: 15 }, 'No time was lost here.'));
  }
}

function drawFrame({ at, depth, x, wide, isAbove }) {
  const made = shape('g', { class: frameClass(at, isAbove), 'data-at': at });
  const y = depth * FRAME_HEIGHT;
  const size = { x: x.toFixed(2), y, width: Math.max(0.5, wide - 0.8).toFixed(2) };
  made.append(shape('rect', { ...size, height: FRAME_HEIGHT - 1, rx: 2 }));
  if (FG.compare) made.style.setProperty('--v', differenceOf(at).toFixed(0));
  const room = Math.floor((wide - 8) / letterWidth());
  if (room >= 3) {
    const text = shape('text', { x: (x + 4).toFixed(2), y: y + 14.5 });
    const name = at ? functionOf(at) : 'all: ' + human(FG.times.width[0]);
    text.append(name.length > room ? name.slice(0, room - 1) + '\u2026' : name);
    const line = lineOf(at);
    if (line && name.length + line.length + 2 <= room) {
      text.append(shape('tspan', { class: 'line', dx: 8 }, line));
    }
    made.append(text);
  }
  return made;
}

function frameClass(at, isAbove) {
  const { own, others, chief } = FG.times;
  const names = ['frame'];
  if (FG.compare) {
    names.push(own[at] >= others[at] ? 'more' : 'fewer');
    if (differenceOf(at) > 65) names.push('deep');
  } else if (at && chief[at] >= 0) {
    const cause = D.causes[chief[at]];
    names.push('k-' + cause.family, 'tone' + cause.tone);
  } else names.push('all');
  if (isLibrary(at)) names.push('library');
  if (isAbove) names.push('above');
  if (at === FG.at) names.push('at');
  if (FG.words) names.push(isMatch(at, FG.words) ? 'hit' : 'miss');
  return names.join(' ');
}

// 0 to 100: how different the rank is from the mean of the others, of the two together.
function differenceOf(at) {
  const { own, others, width } = FG.times;
  return width[at] ? 100 * Math.abs(own[at] - others[at]) / width[at] : 0;
}

function letterWidth() {
  if (!letterWidth.is) {
    const context = document.createElement('canvas').getContext('2d');
    context.font = '12px ' + getComputedStyle(document.querySelector('.flame text')
      || document.querySelector('code') || document.body).fontFamily;
    letterWidth.is = context.measureText('MMMMMMMMMM').width / 10;
  }
  return letterWidth.is;
}

function aboutFrame(at) {
  const { own, others, self, samples, width, chief } = FG.times;
  const part = percent(own[at] / Math.max(1, own[0]));
  const facts = FG.compare
    ? [rankName(FG.rank) + ': ' + human(own[at]), (D.count === 2 ? 'the other rank'
      : 'mean of the other ' + (D.count - 1) + ' ranks') + ': ' + human(others[at])]
    : [human(own[at]), part + ' of what is shown',
      at ? human(self[at]) + ' of it in this line itself' : null,
      chief[at] < 0 ? null : 'mainly ' + D.causes[chief[at]].id, plural(samples[at], 'sample')];
  if (!width[at]) return [];
  const line = lineOf(at);
  const named = [el('b', null, functionOf(at)), line ? ' ' : null, line ? el('code', {
    title: pathOf(at),
  }, line) : null].filter((item) => item !== null);
  return [...named, ' \u00b7 ' + facts.filter(Boolean).join(' \u00b7 ')];
}

function frameHint() {
  const view = FG.compare
    ? 'Width: this rank and the mean of the others together. Red: this rank lost more in the '
      + 'frame than the others do on average; blue: less. '
    : 'Width: device time lost while the frame was running, in it or in what it called; not CPU '
      + 'time. The color is that of the cause that lost most; strong: your code, pale: libraries. ';
  const reduced = F.reduced ? 'The ' + plural(F.reduced, 'smallest stack') + ' are shown by their '
    + 'outermost frame. ' : '';
  return view + reduced + 'Click or Enter zooms in, Escape zooms out; arrows move.';
}

function frameEvents(graph, change) {
  const under = (event) => {
    const frame = event.target.closest('g[data-at]');
    return frame ? Number(frame.dataset.at) : -1;
  };
  graph.addEventListener('click', (event) => {
    const at = under(event);
    if (at >= 0) change({ at, zoomed: at === FG.zoomed ? Math.max(0, F.parent[at]) : at });
  });
  graph.addEventListener('pointermove', (event) => {
    const at = under(event);
    tip.hidden = at < 0 || event.pointerType === 'touch';
    if (tip.hidden) return;
    tip.replaceChildren(...aboutFrame(at));
    placeTip(event.clientX, event.clientY);
  });
  graph.addEventListener('pointerleave', () => { tip.hidden = true; });
  graph.addEventListener('keydown', (event) => {
    const to = nextFrame(event.key);
    if (to === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    change(to);
    graph.querySelector('[data-at="' + FG.at + '"]')?.scrollIntoView({ block: 'nearest' });
  });
}

// What a key changes; null where it has no meaning.
function nextFrame(key) {
  const frame = FG.boxes.find((box) => box.at === FG.at) || FG.boxes[0];
  if (!frame) return null;
  const inRow = (depth) => FG.boxes.filter((box) => box.depth === depth);
  const row = inRow(frame.depth);
  const place = row.indexOf(frame);
  const goTo = (box) => (box ? { at: box.at } : {});
  const acts = {
    ArrowUp: () => (frame.at ? { at: F.parent[frame.at] } : {}),
    ArrowDown: () => goTo(inRow(frame.depth + 1).find((box) => (
      box.isAbove || box.at === FG.zoomed || F.parent[box.at] === frame.at))),
    ArrowLeft: () => goTo(row[place - 1]),
    ArrowRight: () => goTo(row[place + 1]),
    Home: () => goTo(row[0]), End: () => goTo(row[row.length - 1]),
    Enter: () => ({ zoomed: frame.at }),
    Escape: () => ({ zoomed: 0 }),
  };
  return acts[key] ? acts[key]() : null;
}
