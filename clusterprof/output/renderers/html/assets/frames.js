// Stacks of lost time as a tree of frames, and what the shown causes and ranks lost in each.

const F = unpackFrames(D.code);

// Frame 0 is all of it; a parent has a smaller number than its children.
function unpackFrames(code) {
  if (!code || !code.times.length) return null;
  const count = code.frames.length + 1;
  const parent = new Int32Array(count).fill(-1);
  const place = new Int32Array(count).fill(-1);
  const children = Array.from({ length: count }, () => []);
  code.frames.forEach(([above, of], at) => {
    parent[at + 1] = above;
    place[at + 1] = of;
    children[above].push(at + 1);
  });
  const ranks = [...new Set(code.times.map((time) => time[2]))].sort((one, other) => one - other);
  const causes = [...new Set(code.times.map((time) => time[1]))].sort((one, other) => one - other);
  return { ...code, count, parent, place, children, ranks, causes };
}

function functionOf(at) {
  if (!at) return 'all lost device time';
  if (F.place[at] < 0) return F.place[at] === -2 ? 'smaller stacks' : 'stack not known';
  return F.places[F.place[at]][2];
}

function lineOf(at) {
  if (!at || F.place[at] < 0) return '';
  const [file, line] = F.places[F.place[at]];
  return F.files[file] + (line > 0 ? ':' + line : '');
}

function pathOf(at) {
  return !at || F.place[at] < 0 ? '' : F.paths[F.places[F.place[at]][0]];
}

function isLibrary(at) {
  return at > 0 && F.place[at] >= 0 && F.places[F.place[at]][3] === 1;
}

// Lost ns by frame, inner frames included. rank: the compared one, or -1; then `others` is the
// mean of all other ranks of the job.
function frameTimes(cause, node, rank, compare) {
  const own = new Float64Array(F.count);
  const others = new Float64Array(F.count);
  const samples = new Float64Array(F.count);
  const byCause = new Map();
  for (const [at, of, by, ns, taken] of F.times) {
    if (cause >= 0 && of !== cause) continue;
    if (rank < 0 && node >= 0 && D.ranks.node[by] !== node) continue;
    if (rank >= 0 && by !== rank) {
      if (compare) others[at] += ns / Math.max(1, D.count - 1);
      else continue;
    } else {
      own[at] += ns;
      samples[at] += taken;
    }
    if (!byCause.has(of)) byCause.set(of, new Float64Array(F.count));
    byCause.get(of)[at] += ns;
  }
  const self = own.slice();
  for (const sums of [own, others, samples, ...byCause.values()]) sumUp(sums);
  const chief = new Int32Array(F.count).fill(-1);
  const most = new Float64Array(F.count);
  for (const [of, sums] of byCause) {
    for (let at = 0; at < F.count; at++) {
      if (sums[at] > most[at]) [most[at], chief[at]] = [sums[at], of];
    }
  }
  const width = own.map((ns, at) => ns + others[at]);
  return { own, others, samples, self, chief, width, compare };
}

function sumUp(sums) {
  for (let at = F.count - 1; at > 0; at--) sums[F.parent[at]] += sums[at];
}

function isMatch(at, words) {
  if (!words || !at) return false;
  return (functionOf(at) + ' ' + lineOf(at) + ' ' + pathOf(at)).toLowerCase().includes(words);
}

// Width of all frames below one that match, each stack counted once.
function matchedWidth(at, words, width) {
  if (isMatch(at, words)) return width[at];
  return F.children[at].reduce((sum, child) => sum + matchedWidth(child, words, width), 0);
}

// Frames from top to bottom: those above the zoomed one at full width, then what is inside it.
function layOutFrames(zoomed, times, pixels) {
  const boxes = [];
  const above = [];
  for (let at = F.parent[zoomed]; at >= 0; at = F.parent[at]) above.unshift(at);
  above.forEach((at, depth) => boxes.push({ at, depth, x: 0, wide: pixels, isAbove: true }));
  const scale = pixels / Math.max(1, times.width[zoomed]);
  const add = (at, depth, x) => {
    const wide = times.width[at] * scale;
    if (wide < 0.6) return;
    boxes.push({ at, depth, x, wide, isAbove: false });
    let next = x;
    const inner = [...F.children[at]];
    inner.sort((one, other) => times.width[other] - times.width[one] || one - other);
    for (const child of inner) {
      add(child, depth + 1, next);
      next += times.width[child] * scale;
    }
  };
  if (times.width[zoomed] > 0) add(zoomed, above.length, 0);
  return boxes;
}
