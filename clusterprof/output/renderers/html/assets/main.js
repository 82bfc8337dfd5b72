// Put together and start.

function choice(label, options, get, change) {
  const select = el('select', { 'aria-label': label, onchange: () => change(select.value) },
    ...options.map(([value, text]) => el('option', { value }, text)));
  drawers.push(() => { select.value = get(); });
  return select;
}

function when() {
  const body = document.getElementById('when-body');
  if (!D.H) {
    body.replaceChildren(el('p', { class: 'note' }, 'Not in this report: ' + D.history.why + '.'));
    return;
  }
  const button = (text, label, act) => (
    el('button', { type: 'button', 'aria-label': label, onclick: act }, text)
  );
  const links = el('button', { type: 'button', onclick: () => set({ links: !S.links }) }, 'Waits');
  const orders = [['', D.rows.by === 'rank' ? 'Ranks in order' : 'Nodes in order'],
    ['lost', 'Most lost first'], ...(D.compared ? [['caused', 'Most caused first']] : [])];
  const range = el('span', { class: 'range wide', 'aria-live': 'off' });
  drawers.push(() => {
    const step = (S.to - S.from) / 20;
    const [from, to, whole] = [S.from, S.to, SPAN].map((time) => clock(time, step));
    range.textContent = from + ' to ' + to + ' of ' + whole;
    links.setAttribute('aria-pressed', String(S.links));
  });
  const canvas = (label, focus) => el('canvas', {
    role: focus ? 'application' : 'img', 'aria-label': label, tabindex: focus ? 0 : null,
  });
  const mini = canvas('The whole run, and the part in view', false);
  const loss = canvas('Lost time by cause over the run', false);
  const what = D.rows.by === 'rank' ? 'Every rank' : 'Every node';
  const lines = canvas(what + ' over the run. Arrows move, plus and minus zoom, '
    + 'Enter picks the node, Escape shows everything.', true);
  const space = el('div', null, lines);
  const rows = el('div', { class: 'rows' }, space);
  const charts = el('div', { class: 'chart' },
    el('div', { class: 'mini' }, mini), el('h3', null, 'Lost, of all time'),
    el('div', { class: 'loss' }, loss), el('h3', null, what), rows);
  body.replaceChildren(
    ...(D.history.why ? [el('p', { class: 'note' }, D.history.why + '.')] : []),
    causeChips(),
    el('div', { class: 'controls' }, button('+', 'Zoom in', () => zoomBy(0.5)),
      button('\u2212', 'Zoom out', () => zoomBy(2)),
      button('\u2190', 'Earlier', () => panBy((S.from - S.to) / 2)),
      button('\u2192', 'Later', () => panBy((S.to - S.from) / 2)),
      button('Whole run', 'Show the whole run', () => set({ from: 0, to: SPAN })), range,
      links, choice('Order of rows', orders, () => S.sort, (sort) => set({ sort }))),
    charts, el('p', { class: 'hint' }, hint()),
    el('div', { class: 'pair' }, waitList(), stepList()));
  miniChart(mini);
  lossChart(loss);
  timeline(rows, space, lines);
  attach(loss);
  attach(lines);
  keys(lines);
  const fit = () => { measure(rows.clientWidth || charts.clientWidth); redraw(); };
  new ResizeObserver(fit).observe(rows);
  fit();
}

function hint() {
  return 'Drag to zoom in, Ctrl and wheel to zoom, Shift and drag to move, double click for the '
    + 'whole run; with the keyboard: arrows, + and \u2212, Page Up and Down, Enter, Escape. '
    + 'High rows have bars, low rows the color of what cost most there; both are full from '
    + percent(fullShare()) + ' on. '
    + '\u25c6 marks culprits, \u25bc slow steps. Shares in charts are rounded to '
    + percent(1 / 255) + '.'
    + (D.H.waits_left_out ? ' Shorter waits, left out: ' + D.H.waits_left_out + '.' : '');
}

function who() {
  const body = document.getElementById('who-body');
  if (!D.count) {
    body.replaceChildren(el('p', { class: 'note' }, 'No rank was recorded.'));
    return;
  }
  const modes = [['lost', 'What each lost itself'], ['caused', 'What each made all lose']];
  const kinds = kindsOfRows();
  const most = el('span', { class: 'most' });
  body.replaceChildren(
    el('div', { class: 'controls' },
      D.compared ? choice('Amounts', modes, () => S.mode, (mode) => set({ mode })) : null,
      kinds.length > 1 ? choice('Rows', kinds, () => S.by, (by) => set({ by })) : null,
      el('span', { class: 'scale' }, '0 %', el('i'), most, '\u25c6 culprit')),
    ...(D.nodes.length > 1 ? [nodeMap()] : []),
    heatMap());
  if (D.nodes.length < 2) body.querySelector('.scale').remove();
}

measure(800);
readColours();
document.getElementById('tools').append(themeButton());
document.querySelector('main').prepend(filters());
document.body.append(tip, spoken);
when();
who();
where();
findingButtons();
copyButtons();
lightForPrint();
addEventListener('hashchange', readAddress);
if (D.rows.by === 'node' && D.compared) S.sort = 'caused';
readAddress();
draw();
document.documentElement.dataset.ready = '';
performance.mark('drawn');
