// The data block, unpacked: typed arrays over the bytes, nothing copied twice.

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

function wordsOf(text, size) {
  const view = new DataView(bytesOf(text).buffer);
  const count = view.byteLength / size;
  const made = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    made[i] = size === 2 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true);
  }
  return made;
}

const D = JSON.parse(document.getElementById('data').textContent);
D.count = D.ranks.node.length;
D.H = D.history.stretches ? D.history : null;

for (const name of ['lost_ns', 'caused_ns', 'in_step_ns']) {
  const view = new DataView(bytesOf(D.ranks[name]).buffer);
  D.ranks[name] = Float64Array.from({ length: D.count }, (_, at) => view.getFloat64(8 * at, true));
}

// ns by rank, for every cause that has any
function unpackMatrix(matrix) {
  return new Map(matrix.causes.map(({ cause, ranks, bytes }) => {
    const values = wordsOf(bytes, 2).map((word) => word / 65535 * matrix.full_ns);
    if (!ranks) return [cause, values];
    const all = new Float64Array(D.count);
    ranks.forEach((rank, at) => { all[rank] = values[at]; });
    return [cause, all];
  }));
}
D.lostBy = unpackMatrix(D.lost_by_cause);
D.causedBy = unpackMatrix(D.caused);

function rankName(at) {
  const [number, stands] = [D.ranks.rank[at], D.ranks.counts[at] || 1];
  if (stands > 1) return stands + ' other ranks';
  if (number !== null) return 'rank ' + number;
  return D.ranks.pid[at] ? 'pid ' + D.ranks.pid[at] : '1 other rank';
}

function fullRankName(at) {
  return rankName(at) + ' of ' + D.nodes[D.ranks.node[at]];
}

// rows, with their names and what their ranks lost
D.rowCount = D.rows.rank.length;
D.rowOfRank = new Int32Array(D.count).fill(-1);
D.rowLost = new Float64Array(D.rowCount);
D.rowCaused = new Float64Array(D.rowCount);
D.ranksOfNode = D.nodes.map(() => []);
D.ranks.node.forEach((node, at) => D.ranksOfNode[node].push(at));
for (let row = D.rowCount - 1; row >= 0; row--) {
  const one = D.rows.rank[row];
  if (one >= 0) D.rowOfRank[one] = row;
  for (let node = D.rows.first[row]; node <= D.rows.last[row]; node++) {
    for (const at of one >= 0 ? [one] : D.ranksOfNode[node]) {
      if (D.rowOfRank[at] < 0) D.rowOfRank[at] = row;
      D.rowLost[row] += D.ranks.lost_ns[at];
      D.rowCaused[row] += D.ranks.caused_ns[at];
    }
  }
}

function rowName(row) {
  const [first, last, at] = [D.rows.first[row], D.rows.last[row], D.rows.rank[row]];
  if (at >= 0) return rankName(at) + (D.nodes.length > 1 ? ' \u00b7 ' + D.nodes[first] : '');
  return first === last ? D.nodes[first] : D.nodes[first] + ' \u2026 ' + D.nodes[last];
}

if (D.H) {
  const H = D.H;
  const T = H.stretches;
  const all = bytesOf(H.in_step);
  H.inStep = Array.from({ length: D.rowCount }, (_, row) => all.subarray(row * T, (row + 1) * T));
  H.planes = H.lost.map((one) => {
    const bytes = bytesOf(one.bytes);
    const rows = new Array(D.rowCount).fill(null);
    one.rows.forEach((row, at) => { rows[row] = bytes.subarray(at * T, (at + 1) * T); });
    return { cause: one.cause, rows };
  });
  H.ofRow = H.inStep.map((_, row) => H.planes.filter((plane) => plane.rows[row])
    .map((plane) => ({ cause: plane.cause, bytes: plane.rows[row] })));
  const total = wordsOf(H.total.bytes, 2);
  H.totals = H.total.causes.map((cause, at) => ({
    cause, shares: total.subarray(at * T, (at + 1) * T).map((word) => word / 65535),
  }));
  H.marks = new Map(H.steps.map((one) => [
    one.row, wordsOf(one.bytes, 4).map((word) => word / 4294967295 * H.span_s),
  ]));
  H.waits = H.waits.map(([start, length, victim, culprit, cause, step]) => (
    { start, length, victim, culprit, cause, step }
  ));
}
