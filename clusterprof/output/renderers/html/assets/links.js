// Who waited for whom: a bar over the victim's wait, an arrow to the culprit's row.

const MOST_LINKS = 40;

// Places of the waits in view that may be drawn, the longest first.
function waitsShown() {
  if (!S.links) return S.wait >= 0 ? [S.wait] : [];
  const found = [];
  D.H.waits.forEach((wait, at) => {
    if (wait.start > S.to || wait.start + wait.length < S.from) return;
    if (S.cause >= 0 && wait.cause !== S.cause && at !== S.wait) return;
    if (!ofNode(wait)) return;
    found.push(at);
  });
  const longest = (one, other) => D.H.waits[other].length - D.H.waits[one].length;
  return found.sort(longest).slice(0, MOST_LINKS);
}

function ofNode(wait) {
  if (S.node < 0) return true;
  const node = D.ranks.node;
  return node[wait.victim] === S.node || (wait.culprit >= 0 && node[wait.culprit] === S.node);
}

function rowMiddle(places, rank) {
  const at = places.get(D.rowOfRank[rank]);
  return at === undefined ? null : (TL.tops[at] + TL.tops[at + 1]) / 2 - TL.box.scrollTop;
}

function drawWaits(context) {
  const places = new Map(rowsShown().map((row, at) => [row, at]));
  const shown = waitsShown().filter((at) => at !== S.wait).reverse();
  if (S.wait >= 0) shown.push(S.wait);
  context.save();
  context.beginPath();
  context.rect(V.gutter, 0, V.width - V.gutter - V.right, TL.height);
  context.clip();
  for (const at of shown) drawWait(context, D.H.waits[at], places, at === S.wait);
  context.restore();
}

function drawWait(context, wait, places, chosen) {
  const victim = rowMiddle(places, wait.victim);
  const culprit = wait.culprit < 0 ? null : rowMiddle(places, wait.culprit);
  const [x0, x1] = [toX(wait.start), toX(wait.start + wait.length)];
  context.strokeStyle = C.textCss;
  context.fillStyle = C.textCss;
  context.globalAlpha = chosen ? 1 : S.wait >= 0 ? 0.15 : 0.4;
  context.lineWidth = chosen ? 2 : 1;
  if (victim !== null) {
    context.beginPath();
    context.moveTo(x0, victim);
    context.lineTo(Math.max(x1, x0 + 2), victim);
    context.moveTo(x0, victim - 3);
    context.lineTo(x0, victim + 3);
    context.stroke();
  }
  if (culprit !== null) {
    const from = seenFrom(victim, culprit, chosen);
    const bend = Math.min(26, 6 + Math.abs(culprit - from) / 8);
    context.beginPath();
    context.moveTo(x1, from);
    context.quadraticCurveTo(x1 + bend, (from + culprit) / 2, x1, culprit);
    context.stroke();
    const side = culprit > from ? -1 : 1;
    context.beginPath();
    context.moveTo(x1, culprit);
    context.lineTo(x1 + 6, culprit + side * 5);
    context.lineTo(x1 - 1, culprit + side * 7);
    context.fill();
    if (chosen) label(context, 'came last', x1, culprit);
  }
  if (chosen && victim !== null) label(context, 'waited ' + human(wait.length * 1e9), x0, victim);
  context.globalAlpha = 1;
  context.lineWidth = 1;
}

// A link to a row out of sight begins near the culprit: many such would hide all else.
function seenFrom(victim, culprit, chosen) {
  const outside = victim === null || victim < 0 || victim > TL.height;
  if (!outside || (chosen && victim !== null)) return victim;
  const up = victim === null ? culprit > TL.height / 2 : victim < culprit;
  return culprit + (up ? -18 : 18);
}

function label(context, text, x, y) {
  context.font = '600 11.5px system-ui, sans-serif';
  const wide = context.measureText(text).width + 10;
  const left = Math.max(V.gutter, Math.min(x, V.width - V.right - wide));
  const top = Math.max(1, Math.min(TL.height - 19, y < 24 ? y + 8 : y - 24));
  context.fillStyle = C.cardCss;
  context.fillRect(left, top, wide, 17);
  context.strokeRect(left + 0.5, top + 0.5, wide, 17);
  context.fillStyle = C.textCss;
  context.textAlign = 'left';
  context.textBaseline = 'middle';
  context.fillText(text, left + 5, top + 9);
}

// The wait that is drawn nearest to a place of the timeline, -1 when none is near.
function waitNear(x, y) {
  const places = new Map(rowsShown().map((row, at) => [row, at]));
  let [best, nearest] = [-1, 7];
  for (const at of waitsShown()) {
    const wait = D.H.waits[at];
    const victim = rowMiddle(places, wait.victim);
    const [x0, x1] = [toX(wait.start), toX(wait.start + wait.length)];
    if (victim === null || x < x0 - 6 || x > x1 + 6) continue;
    const far = Math.abs(victim - y);
    if (far < nearest) [best, nearest] = [at, far];
  }
  return best;
}

function chooseWait(at) {
  const wait = D.H.waits[at];
  set({ wait: S.wait === at ? -1 : at, row: D.rowOfRank[wait.victim], time: wait.start });
  if (S.wait < 0) return;
  const around = Math.max(wait.length * 3, D.H.stretch_s * 2);
  zoomTo(wait.start - around, wait.start + wait.length + around);
  const places = rowsShown();
  const rows = [wait.victim, wait.culprit].filter((one) => one >= 0)
    .map((one) => places.indexOf(D.rowOfRank[one])).filter((one) => one >= 0);
  if (rows.length) {
    const middle = rows.reduce((sum, one) => sum + TL.tops[one], 0) / rows.length;
    TL.box.scrollTop = Math.max(0, middle - TL.height / 2);
  }
}
