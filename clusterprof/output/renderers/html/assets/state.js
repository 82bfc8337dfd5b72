// What is shown: one object, also in the address (#node=...&t=a-b&finding=...), drawn once a frame.

const LARGE = 512; // ranks above which rows of tables are sums of ranks
const SPAN = D.H ? D.H.span_s : 0;
const S = {
  node: -1, from: 0, to: SPAN, cause: -1, wait: -1, row: -1, time: -1,
  sort: '', by: D.count > LARGE && D.nodes.length > 1 ? 'node' : 'rank',
  mode: D.compared ? 'caused' : 'lost', links: true,
};
const drawers = [];
let asked = false;

function draw() {
  asked = false;
  const start = performance.now();
  for (const drawer of drawers) drawer();
  performance.clearMeasures('draw');
  performance.measure('draw', { start }); // for the bench
}

function redraw() {
  if (!asked) {
    asked = true;
    requestAnimationFrame(draw);
  }
}

function set(changes) {
  Object.assign(S, changes);
  if ('node' in changes || 'cause' in changes || 'from' in changes) writeAddress();
  redraw();
}

// Keep at least a few stretches in view, and stay within the run.
function zoomTo(from, to) {
  const least = Math.min(SPAN, Math.max(1e-4, D.H.stretch_s / 50));
  const length = Math.min(SPAN, Math.max(least, to - from));
  const start = Math.min(Math.max(0, (from + to - length) / 2), SPAN - length);
  set({ from: start, to: start + length });
}

function zoomBy(factor, around) {
  const at = around === undefined ? (S.from + S.to) / 2 : around;
  zoomTo(at - (at - S.from) * factor, at + (S.to - at) * factor);
}

function panBy(seconds) {
  const by = Math.min(Math.max(seconds, -S.from), SPAN - S.to);
  set({ from: S.from + by, to: S.to + by });
}

function address() {
  const parts = [];
  if (S.node >= 0) parts.push('node=' + encodeURIComponent(D.nodes[S.node]));
  if (D.H && (S.from > 0 || S.to < SPAN)) {
    const digits = Math.max(0, Math.min(6, 3 - Math.floor(Math.log10(S.to - S.from))));
    parts.push('t=' + Number(S.from.toFixed(digits)) + '-' + Number(S.to.toFixed(digits)));
  }
  if (S.cause >= 0) parts.push('finding=' + encodeURIComponent(D.causes[S.cause].id));
  return '#' + parts.join('&');
}

let writing = 0;
function writeAddress() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    try { history.replaceState(null, '', address()); } catch (error) { /* a sandbox forbids it */ }
  }, 150);
}

function decoded(text) {
  try { return decodeURIComponent(text); } catch (error) { return ''; }
}

function readAddress() {
  const text = location.hash.slice(1);
  if (!text.includes('=')) return;
  const said = Object.fromEntries(text.split('&').map((part) => {
    const at = part.indexOf('=');
    return at < 0 ? [part, ''] : [part.slice(0, at), decoded(part.slice(at + 1))];
  }));
  const times = /^([0-9.]+)-([0-9.]+)$/.exec(said.t || '');
  S.node = D.nodes.indexOf(said.node);
  S.cause = D.causes.findIndex((cause) => cause.id === said.finding);
  [S.from, S.to] = [0, SPAN];
  if (D.H && times && Number(times[2]) > Number(times[1])) {
    zoomTo(Number(times[1]), Number(times[2]));
  }
  redraw();
}
