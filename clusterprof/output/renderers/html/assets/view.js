// Time and place: seconds of the run to pixels, and the stretches that a pixel shows.

const V = { gutter: 150, width: 800, right: 8 };

function measure(width) {
  V.width = width;
  V.gutter = width < 560 ? 74 : 160;
}

function toX(time) {
  return V.gutter + (time - S.from) / (S.to - S.from) * (V.width - V.gutter - V.right);
}

function toTime(x) {
  return S.from + (x - V.gutter) / (V.width - V.gutter - V.right) * (S.to - S.from);
}

// Runs of neighbouring device pixels that show the same stretches: {x0, x1, a, b}.
function runs(ratio) {
  const found = [];
  const low = Math.round(V.gutter * ratio);
  const high = Math.round((V.width - V.right) * ratio);
  const each = (S.to - S.from) / (high - low) / D.H.stretch_s;
  const start = S.from / D.H.stretch_s;
  let last = null;
  for (let x = low; x < high; x++) {
    const a = Math.min(D.H.stretches - 1, Math.floor(start + (x - low) * each + 1e-9));
    const b = Math.min(D.H.stretches, Math.max(a + 1, Math.floor(start + (x - low + 1) * each)));
    if (last && last.a === a && last.b === b) last.x1 = x + 1;
    else found.push(last = { x0: x, x1: x + 1, a, b });
  }
  return found;
}

function meanOf(bytes, a, b) {
  let sum = 0;
  for (let i = a; i < b; i++) sum += bytes[i];
  return sum / (b - a);
}

// Rows in view: of the chosen node, in the chosen order.
function rowsShown() {
  const key = S.node + ' ' + S.sort;
  if (rowsShown.key !== key) {
    const all = [];
    for (let row = 0; row < D.rowCount; row++) {
      const inside = D.rows.first[row] <= S.node && S.node <= D.rows.last[row];
      if (S.node < 0 || inside) all.push(row);
    }
    const by = { lost: D.rowLost, caused: D.rowCaused }[S.sort];
    const each = (row) => by[row] / (D.rows.rank[row] >= 0 ? 1 : membersOf(row));
    if (by) all.sort((one, other) => each(other) - each(one) || one - other);
    rowsShown.key = key;
    rowsShown.rows = all;
  }
  return rowsShown.rows;
}

function membersOf(row) {
  let count = 0;
  for (let node = D.rows.first[row]; node <= D.rows.last[row]; node++) {
    count += D.ranksOfNode[node].length;
  }
  return Math.max(count, 1);
}

// Shares of the whole job, or of the chosen node, by cause and stretch.
function sharesShown() {
  if (S.node < 0) return D.H.totals;
  if (sharesShown.node !== S.node) {
    const rows = rowsShown().filter((row) => D.rows.by === 'rank' || D.rows.rank[row] < 0);
    sharesShown.node = S.node;
    sharesShown.made = D.H.planes.map(({ cause, rows: planes }) => {
      const shares = new Float64Array(D.H.stretches);
      for (const row of rows) {
        if (!planes[row]) continue;
        planes[row].forEach((byte, i) => { shares[i] += byte / 255 / rows.length; });
      }
      return { cause, shares };
    }).filter(({ shares }) => shares.some((share) => share > 0));
  }
  return sharesShown.made;
}

function drawTicks(context, height, labels) {
  const step = tickStep(S.to - S.from, (V.width - V.gutter) / 80);
  context.font = '11px system-ui, sans-serif';
  context.textAlign = 'center';
  context.textBaseline = 'top';
  for (let at = Math.ceil(S.from / step - 1e-9); at * step <= S.to + 1e-9; at++) {
    const x = Math.round(toX(at * step)) + 0.5;
    context.strokeStyle = C.lineCss;
    context.globalAlpha = 0.6;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, height);
    context.stroke();
    context.globalAlpha = 1;
    context.fillStyle = C.softCss;
    if (!labels) continue;
    const text = clock(at * step, step);
    const half = context.measureText(text).width / 2;
    context.fillText(text, Math.min(x, V.width - half - 1), height + 4);
  }
}
