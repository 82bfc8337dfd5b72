// Mouse, touch and keys on the charts over time; what lies under the pointer is read out.

const tip = el('div', { class: 'tip', hidden: true });
const spoken = el('div', { class: 'spoken', 'aria-live': 'polite' });

function placeAt(event, canvas) {
  const box = canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const time = Math.max(S.from, Math.min(S.to, toTime(x)));
  const rows = rowsShown();
  const inRows = canvas === TL.canvas && y >= 0;
  const row = inRows ? rows[rowAt(y + TL.box.scrollTop)] : undefined;
  return { x, y, time, row: row === undefined ? -1 : row };
}

function attach(canvas) {
  let start = null;
  let marked = null;
  const pointers = new Map();
  canvas.addEventListener('pointerdown', (event) => {
    if (event.button > 1) return;
    const place = placeAt(event, canvas);
    pointers.set(event.pointerId, place.x);
    const pan = event.button === 1 || event.shiftKey || event.pointerType === 'touch';
    start = { ...place, from: S.from, to: S.to, pan, moved: false };
    canvas.setPointerCapture(event.pointerId);
    if (event.button === 1) event.preventDefault();
  });
  canvas.addEventListener('pointermove', (event) => {
    const place = placeAt(event, canvas);
    if (start && pointers.size === 2) {
      pinch(pointers, event, place);
      return;
    }
    if (!start) {
      set({ row: place.row, time: place.x < V.gutter ? -1 : place.time });
      showTip(event.clientX, event.clientY, place, canvas);
      return;
    }
    start.moved = start.moved || Math.abs(place.x - start.x) > 4;
    if (!start.moved) return;
    tip.hidden = true;
    if (start.pan) {
      const each = (start.to - start.from) / (V.width - V.gutter - V.right);
      panBy(start.from - (place.x - start.x) * each - S.from);
    } else {
      marked = marked || canvas.parentElement.appendChild(el('div', { class: 'marked' }));
      showMarked(marked, canvas, start.x, place.x);
    }
  });
  const end = (event) => {
    pointers.delete(event.pointerId);
    if (marked) marked.remove();
    marked = null;
    const begun = start;
    start = null;
    if (!begun || event.type === 'pointercancel') return;
    const place = placeAt(event, canvas);
    if (begun.moved && !begun.pan) {
      const [low, high] = [begun.time, place.time].sort((one, other) => one - other);
      zoomTo(low, high);
    } else if (!begun.moved && canvas === TL.canvas) click(place);
  };
  canvas.addEventListener('pointerup', end);
  canvas.addEventListener('pointercancel', end);
  canvas.addEventListener('pointerleave', () => {
    tip.hidden = true;
    if (document.activeElement !== TL.canvas) set({ row: -1, time: -1 });
  });
  canvas.addEventListener('dblclick', () => set({ from: 0, to: SPAN }));
  canvas.addEventListener('wheel', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) {
      event.preventDefault();
      zoomBy(Math.pow(1.0025, event.deltaY), placeAt(event, canvas).time);
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      panBy((event.deltaX || event.deltaY) / 800 * (S.to - S.from));
    }
  }, { passive: false });
}

function pinch(pointers, event, place) {
  const [one, other] = [...pointers.keys()].map((id) => pointers.get(id));
  const before = Math.max(20, Math.abs(one - other));
  const middle = toTime((one + other) / 2);
  pointers.set(event.pointerId, place.x);
  const [now, then] = [...pointers.values()];
  zoomBy(before / Math.max(20, Math.abs(now - then)), middle);
}

function showMarked(marked, canvas, one, other) {
  const left = Math.max(V.gutter, Math.min(one, other));
  const right = Math.min(V.width - V.right, Math.max(one, other));
  marked.style.left = left + 'px';
  marked.style.width = Math.max(0, right - left) + 'px';
  marked.style.height = canvas.clientHeight + 'px';
  marked.style.top = canvas.offsetTop + 'px';
}

// A click chooses the wait under it, or the node of the row.
function click(place) {
  const near = waitNear(place.x, place.y);
  if (near >= 0 && place.x > V.gutter) chooseWait(near);
  else if (place.row >= 0) chooseNodeOf(place.row);
}

function chooseNodeOf(row) {
  const node = D.rows.first[row];
  if (D.nodes.length > 1) set({ node: S.node === node ? -1 : node, row });
}

function keys(canvas) {
  canvas.addEventListener('keydown', (event) => {
    const rows = rowsShown();
    const at = Math.max(0, rows.indexOf(S.row));
    const view = S.to - S.from;
    const step = Math.max(D.H.stretch_s, view / 200);
    const now = S.time < 0 ? S.from : S.time;
    const acts = {
      ArrowLeft: () => moveTo(rows[at], now - step),
      ArrowRight: () => moveTo(rows[at], now + step),
      ArrowUp: () => moveTo(rows[Math.max(0, at - 1)], now),
      ArrowDown: () => moveTo(rows[Math.min(rows.length - 1, at + 1)], now),
      PageUp: () => panBy(-0.8 * view), PageDown: () => panBy(0.8 * view),
      Home: () => moveTo(rows[at], S.from), End: () => moveTo(rows[at], S.to),
      '+': () => zoomBy(0.5, now), '=': () => zoomBy(0.5, now), '-': () => zoomBy(2, now),
      0: () => set({ from: 0, to: SPAN }), Enter: () => chooseNodeOf(rows[at]),
      Escape: () => set({ from: 0, to: SPAN, node: -1, cause: -1, wait: -1 }),
    };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  });
  canvas.addEventListener('blur', () => { tip.hidden = true; });
}

// Put the cursor on a row and a time, bring both into view, and read out what is there.
function moveTo(row, time) {
  const to = Math.max(0, Math.min(SPAN - 1e-9, time));
  if (to < S.from) panBy(to - S.from);
  if (to > S.to) panBy(to - S.to);
  set({ row, time: to });
  const at = rowsShown().indexOf(row);
  const [top, bottom] = [TL.tops[at], TL.tops[at + 1]];
  if (top < TL.box.scrollTop) TL.box.scrollTop = top;
  if (bottom > TL.box.scrollTop + TL.height) TL.box.scrollTop = bottom - TL.height;
  const box = TL.canvas.getBoundingClientRect();
  const y = top - TL.box.scrollTop;
  const place = { x: -1, y, time: to, row };
  showTip(box.left + toX(to), box.top + y + bottom - top, place, TL.canvas);
  spoken.textContent = tip.textContent;
}

function showTip(x, y, place, canvas) {
  tip.replaceChildren(...readOut(place, canvas));
  tip.hidden = !tip.childNodes.length || (place.x >= 0 && place.x < V.gutter && place.row < 0);
  if (!tip.hidden) placeTip(x, y);
}

function placeTip(x, y) {
  const { offsetWidth: wide, offsetHeight: high } = tip;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - wide - 6)) + 'px';
  tip.style.top = (y + 16 + high > innerHeight ? Math.max(4, y - high - 12) : y + 16) + 'px';
}

function readOut(place, canvas) {
  if (canvas === TL.canvas && place.row < 0) return [];
  const i = Math.min(D.H.stretches - 1, Math.floor(place.time / D.H.stretch_s));
  const each = D.H.stretch_s;
  const when = clock(i * each, each) + ' to ' + clock((i + 1) * each, each) + wallClock(i * each);
  const name = place.row >= 0 ? rowName(place.row)
    : S.node >= 0 ? D.nodes[S.node] : 'all ranks';
  const lines = [el('b', null, name), el('div', null, when)];
  const parts = place.row >= 0
    ? D.H.planes.filter((plane) => plane.rows[place.row])
      .map((plane) => [plane.cause, plane.rows[place.row][i] / 255])
    : sharesShown().map(({ cause, shares }) => [cause, shares[i]]);
  const some = parts.filter(([, share]) => share > 0).sort((one, other) => other[1] - one[1]);
  if (place.row >= 0 && !D.H.inStep[place.row][i]) {
    return [...lines, el('div', null, 'not inside steps')];
  }
  const sum = some.reduce((all, [, share]) => all + share, 0);
  lines.push(el('div', null, el('span', null, 'lost'), el('span', null, percent(sum))));
  for (const [cause, share] of some.slice(0, 6)) {
    const known = D.causes[cause];
    const box = swatch(known);
    lines.push(el('div', null, box, el('span', null, known.id), el('span', null, percent(share))));
  }
  const near = canvas === TL.canvas && place.x >= 0 ? waitNear(place.x, place.y) : -1;
  if (near >= 0) lines.push(el('div', null, waitText(D.H.waits[near])));
  return lines;
}

function wallClock(seconds) {
  if (D.H.started_at_ms === null) return '';
  const date = new Date(D.H.started_at_ms + seconds * 1000);
  return ' (' + date.toISOString().slice(11, 19) + ' UTC)';
}

function waitText(wait) {
  const culprit = wait.culprit < 0 ? 'a rank that is not known' : fullRankName(wait.culprit);
  const cause = wait.cause < 0 ? '' : ' (' + D.causes[wait.cause].id + ')';
  const step = wait.step === null ? '' : ', step ' + wait.step.toLocaleString('en-US');
  return fullRankName(wait.victim) + ' waited for ' + culprit + cause + step;
}
