// Every rank, or node, over the run: what it lost most to, how much, its steps, and who waited.

const TL = { tops: [0], height: 400 };
const TALLEST = 584;

function timeline(box, space, canvas) {
  const raster = new Raster(canvas);
  Object.assign(TL, { box, canvas });
  fullShare();
  drawers.push(() => {
    const rows = rowsShown();
    layOut(rows);
    space.style.height = TL.tops[rows.length] + 'px';
    canvas.style.height = TL.height + 'px';
    canvas.style.width = V.width + 'px';
    raster.fit(V.width, TL.height);
    paintRows(raster, rows);
    const context = raster.show();
    drawTicks(context, TL.height, false);
    drawNames(context, rows);
    drawWaits(context);
    drawCell(context);
    drawCursor(context, TL.height);
  });
  box.addEventListener('scroll', redraw);
}

// Tops of the rows, and the end of the last. There is room for all; a rank among nodes is higher.
function layOut(rows) {
  if (TL.of === rows) return;
  TL.of = rows;
  const each = Math.max(3, Math.min(rows.length > 8 ? 30 : 48, Math.floor(560 / rows.length)));
  TL.tops = new Float64Array(rows.length + 1);
  rows.forEach((row, at) => {
    const alone = D.rows.by === 'node' && D.rows.rank[row] >= 0;
    TL.tops[at + 1] = TL.tops[at] + (alone ? Math.max(16, each) : each);
  });
  TL.height = Math.min(TALLEST, TL.tops[rows.length]);
}

function rowHeight(at) {
  return TL.tops[at + 1] - TL.tops[at];
}

// The place among the rows shown of a height below the top of the first.
function rowAt(y) {
  let [low, high] = [0, TL.tops.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (TL.tops[middle + 1] <= y) low = middle + 1;
    else high = middle;
  }
  return low;
}

// First and last place in sight.
function inSight(rows) {
  const top = TL.box.scrollTop;
  return [rowAt(top), Math.min(rows.length, rowAt(top + TL.height) + 1)];
}

// The share from which on a colour is full: nearly the largest there is.
function fullShare() {
  if (TL.scale) return TL.scale;
  const sums = [];
  for (let row = 0; row < D.rowCount; row++) {
    for (let i = 0; i < D.H.stretches; i += 3) {
      let sum = 0;
      for (const plane of D.H.ofRow[row]) sum += plane.bytes[i];
      if (sum) sums.push(sum);
    }
  }
  const sorted = Uint16Array.from(sums).sort();
  const high = sums.length ? sorted[Math.floor(0.98 * (sorted.length - 1))] / 255 : 1;
  TL.scale = Math.max(0.05, Math.min(1, high));
  return TL.scale;
}

function paintRows(raster, rows) {
  const ratio = raster.ratio;
  const top = TL.box.scrollTop;
  const [first, last] = inSight(rows);
  const all = runs(ratio);
  const brushes = inks();
  for (let at = first; at < last; at++) {
    const gap = rowHeight(at) >= 8 ? 1 : 0;
    const y0 = Math.round((TL.tops[at] - top) * ratio);
    const y1 = Math.round((TL.tops[at + 1] - gap - top) * ratio);
    if (rowHeight(at) >= 16) {
      for (const run of all) paintStack(raster, rows[at], run, y0, y1, brushes);
    } else {
      const line = Math.max(0, y0);
      for (const run of all) paintShade(raster, rows[at], run, line, brushes);
      raster.repeat(y0, y1);
    }
    paintMarks(raster, rows[at], y0, y1, ratio);
  }
}

// Bars, as high as the loss (full from `TL.scale` on), each cause with its colour and pattern.
function paintStack(raster, row, run, y0, y1, brushes) {
  if (!meanOf(D.H.inStep[row], run.a, run.b)) return;
  raster.fill(run.x0, run.x1, y0, y1, C.track32);
  let sum = 0;
  let y = y1;
  for (const { cause, bytes } of D.H.ofRow[row]) {
    const share = meanOf(bytes, run.a, run.b) / 255;
    if (!share) continue;
    sum += share;
    const part = Math.min(1, sum / TL.scale);
    const next = Math.max(y0, y1 - Math.max(1, Math.round(part * (y1 - y0))));
    const ink = brushes[cause];
    if (ink.mask && !ink.pale) {
      raster.fillPattern(run.x0, run.x1, next, y, ink.pixel, ink.stroke, ink.mask);
    } else raster.fill(run.x0, run.x1, next, y, ink.pixel);
    y = Math.min(y, next);
  }
}

// Low rows: the colour of what cost most there, the stronger the more was lost.
function paintShade(raster, row, run, line, brushes) {
  if (!meanOf(D.H.inStep[row], run.a, run.b)) return;
  let [most, sum, best] = [0, 0, -1];
  for (const { cause, bytes } of D.H.ofRow[row]) {
    const share = meanOf(bytes, run.a, run.b) / 255;
    if (S.cause >= 0 && S.cause !== cause) continue;
    sum += share;
    if (share > most) [most, best] = [share, cause];
  }
  const shade = Math.round(Math.min(1, sum / TL.scale) * SHADES);
  const ink = best < 0 ? C.track32 : brushes[best].shades[shade];
  raster.fill(run.x0, run.x1, line, line + 1, ink);
}

// Ends of steps, as soon as they are far enough apart to be distinguished.
function paintMarks(raster, row, y0, y1, ratio) {
  const marks = D.H.marks.get(row) || D.H.marks.get(-1);
  if (!marks || y1 - y0 < 4 * ratio) return;
  let low = 0;
  for (let high = marks.length; low < high;) {
    const middle = (low + high) >> 1;
    if (marks[middle] < S.from) low = middle + 1;
    else high = middle;
  }
  let end = low;
  while (end < marks.length && marks[end] <= S.to) end++;
  if ((end - low) * 6 > V.width - V.gutter) return;
  const ink = pixel(mix(C.text, C.track, 0.7));
  for (let i = low; i < end; i++) {
    const x = Math.round(toX(marks[i]) * ratio);
    raster.fill(x, x + 1, y0, y0 + Math.round((y1 - y0) * 0.55), ink);
  }
}

function guiltyRows() {
  const key = S.cause;
  if (guiltyRows.key !== key) {
    guiltyRows.key = key;
    guiltyRows.rows = new Set();
    for (const finding of D.findings) {
      if (!pointsAtFew(finding) || (key >= 0 && finding.cause !== key)) continue;
      for (const at of finding.culprits) guiltyRows.rows.add(D.rowOfRank[at]);
    }
  }
  return guiltyRows.rows;
}

// A cause of nearly all ranks marks no culprit.
function pointsAtFew(finding) {
  return !finding.outside && finding.culprit_count <= Math.max(2, D.count / 4);
}

function drawNames(context, rows) {
  const top = TL.box.scrollTop;
  context.font = '11.5px system-ui, sans-serif';
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  const guilty = guiltyRows();
  const [first, last] = inSight(rows);
  const middle = (at) => {
    const y = (TL.tops[at] + TL.tops[at + 1]) / 2 - top;
    return Math.max(7, Math.min(TL.height - 7, y));
  };
  const marked = (at) => guilty.has(rows[at]) || rows[at] === S.row;
  const free = [];
  const write = (at, name) => {
    const y = middle(at);
    if (free.some((other) => Math.abs(other - y) < 12)) return;
    free.push(y);
    context.fillStyle = marked(at) ? C.textCss : C.softCss;
    context.fillText(shortened(context, name), V.gutter - 18, y);
  };
  for (let at = first; at < last; at++) {
    if (guilty.has(rows[at])) diamond(context, V.gutter - 8, middle(at), rowHeight(at));
    if (marked(at)) write(at, rowName(rows[at]));
  }
  for (let at = first; at < last; at++) if (!marked(at)) write(at, rowName(rows[at]));
}

function diamond(context, x, y, height) {
  const size = Math.min(5, Math.max(2.5, height / 2));
  context.fillStyle = C.textCss;
  context.beginPath();
  context.moveTo(x, y - size);
  context.lineTo(x + size, y);
  context.lineTo(x, y + size);
  context.lineTo(x - size, y);
  context.fill();
}

function shortened(context, text) {
  const room = V.gutter - 24;
  const key = room + text;
  if (shortened.known.has(key)) return shortened.known.get(key);
  let shown = text;
  // Of a rank with its node the rank alone: cut names would look alike.
  if (context.measureText(shown).width > room) shown = text.split(' \u00b7 ')[0];
  while (shown.length > 4 && context.measureText(shown).width > room) {
    shown = shown.slice(0, Math.floor(shown.length * 0.9) - 1) + '\u2026';
  }
  shortened.known.set(key, shown);
  return shown;
}
shortened.known = new Map();

function drawCell(context) {
  const at = rowsShown().indexOf(S.row);
  if (at < 0 || S.time < 0) return;
  const start = Math.floor(S.time / D.H.stretch_s) * D.H.stretch_s;
  const x0 = Math.max(V.gutter, toX(start));
  const wide = Math.max(3, toX(start + D.H.stretch_s) - x0);
  context.strokeStyle = C.focusCss;
  context.lineWidth = 2;
  const y = TL.tops[at] - TL.box.scrollTop;
  context.strokeRect(x0, y, wide, Math.max(3, rowHeight(at) - 1));
  context.lineWidth = 1;
}
