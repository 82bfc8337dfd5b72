// Ranks by cause: what each lost, or made all lose. A heading sorts, a rank's name shows its node.
// In a large job rows are sums by node, rack or group; each opens to its ranks.

const PAGE = 24;
const OPENED = 32; // ranks below an opened row
const PALE = 0.05; // of the time in steps: less is not drawn as if it were much

function kindsOfRows() {
  if (D.count <= LARGE || D.nodes.length < 2) return [['rank', 'Ranks']];
  const known = new Set(D.groups.map((group) => group.of));
  return [['node', 'By node'], ...(known.has('rack') ? [['rack', 'By rack']] : []),
    ...(known.has('group') ? [['group', 'By process group']] : []), ['rank', 'By rank']];
}

// Rows of a kind: a name, and places of ranks.
function itemsOf(kind) {
  if (kind === 'rank') return D.ranks.node.map((node, at) => ({ ranks: [at], at }));
  if (kind === 'node') {
    return D.nodes.map((name, node) => ({ name, node, ranks: D.ranksOfNode[node] }));
  }
  return D.groups.filter((group) => group.of === kind).map((group) => ({
    name: group.name,
    ranks: kind === 'rack' ? group.nodes.flatMap((node) => D.ranksOfNode[node]) : group.ranks,
  }));
}

function countRanks(ranks) {
  return ranks.reduce((sum, at) => sum + (D.ranks.counts[at] || 1), 0);
}

function sumOver(ranks, ns) {
  return ranks.reduce((sum, at) => sum + ns[at], 0);
}

function heatMap() {
  const head = el('thead');
  const body = el('tbody');
  const more = el('button', { type: 'button', class: 'more' });
  const table = el('table', { class: 'heat' }, head, body);
  const opened = new Set();
  let [sorted, count, shown, kind, items] = [-1, PAGE, '', '', []];
  more.addEventListener('click', () => { count += 4 * PAGE; redraw(); });
  const heading = (cause) => {
    const known = D.causes[cause];
    const box = known && swatch(known);
    const button = el('button', {
      type: 'button', 'aria-pressed': String(sorted === cause),
      onclick: () => { sorted = cause; redraw(); },
    }, known ? known.id : 'all');
    return el('th', { scope: 'col', class: 'n' }, box, box ? ' ' : null, button);
  };
  drawers.push(() => {
    const key = [S.by, S.mode, S.node, S.cause, sorted, count, ...opened].join(' ');
    if (key === shown) return;
    shown = key;
    if (kind !== S.by) {
      [kind, items, count] = [S.by, itemsOf(S.by), PAGE];
      opened.clear();
    }
    const causes = S.cause >= 0 ? [S.cause] : columnsOf(S.mode);
    const columns = [-1, ...causes].map((cause) => amounts(S.mode, cause));
    const by = amounts(S.mode, causes.includes(sorted) ? sorted : -1);
    const ofNode = (item) => S.node < 0 || item.ranks.some((at) => D.ranks.node[at] === S.node);
    const rows = items.filter(ofNode).map((item) => [sumOver(item.ranks, by), item]);
    rows.sort(([one], [other]) => other - one);
    const scales = scalesOf(items, columns);
    head.replaceChildren(el('tr', null, el('th', { scope: 'col' }, kind),
      el('th', { scope: 'col' }, kind === 'rank' ? 'node' : 'ranks'), heading(-1),
      ...causes.map(heading)));
    const toggle = (item) => {
      opened.has(item.name) ? opened.delete(item.name) : opened.add(item.name);
      redraw();
    };
    body.replaceChildren(...rows.slice(0, count).flatMap(([, item]) => {
      if (kind === 'rank') return [heatRow(item.at, columns, scales)];
      const open = opened.has(item.name) || (kind === 'node' && S.node === item.node);
      return [sumRow(item, open, toggle, columns, scales),
        ...(open ? ranksBelow(item, by, columns) : [])];
    }));
    more.hidden = rows.length <= count;
    more.textContent = 'Show more of ' + plural(rows.length, kind);
  });
  return el('div', null, el('div', { class: 'scroll' }, table), more);
}

// The amounts that are drawn in full: of the first column, and of all others.
function scalesOf(items, columns) {
  const most = columns.map((ns) => (
    items.reduce((high, item) => Math.max(high, sumOver(item.ranks, ns)), 1)
  ));
  const longest = items.reduce((high, item) => (
    Math.max(high, sumOver(item.ranks, D.ranks.in_step_ns))
  ), 0);
  const least = S.mode === 'lost' ? PALE * longest : 1;
  return [Math.max(most[0], least), Math.max(1, least, ...most.slice(1))];
}

function columnsOf(mode) {
  return [...(mode === 'lost' ? D.lostBy : D.causedBy).keys()].slice(0, 9);
}

function heatCells(ranks, columns, scales) {
  return columns.map((all, column) => {
    const ns = sumOver(ranks, all);
    const part = ns / scales[Math.min(column, 1)];
    const cell = el('td', { class: part > 0.6 ? 'cell deep' : 'cell' }, ns ? human(ns) : '-');
    cell.style.setProperty('--v', (100 * part).toFixed(0));
    return cell;
  });
}

function heatRow(at, columns, scales, below) {
  const node = D.ranks.node[at];
  const choose = () => set({ node: S.node === node ? -1 : node });
  const label = rankName(at);
  const name = below ? label : el('button', { type: 'button', onclick: choose }, label);
  const style = below ? 'below' : S.node === node ? 'chosen' : null;
  return el('tr', { class: style }, el('th', { scope: 'row' }, name),
    el('td', null, D.nodes[node]), ...heatCells([at], columns, scales));
}

function sumRow(item, open, toggle, columns, scales) {
  const button = el('button', {
    type: 'button', 'aria-expanded': String(open), onclick: () => toggle(item),
  }, (open ? '\u25be ' : '\u25b8 ') + item.name);
  return el('tr', { class: open ? 'chosen' : null }, el('th', { scope: 'row' }, button),
    el('td', { class: 'n' }, countRanks(item.ranks).toLocaleString('en-US')),
    ...heatCells(item.ranks, columns, scales));
}

function ranksBelow(item, by, columns) {
  const ranks = [...item.ranks].sort((one, other) => by[other] - by[one] || one - other);
  const scales = scalesOf(ranks.map((at) => ({ ranks: [at] })), columns);
  const rows = ranks.slice(0, OPENED).map((at) => heatRow(at, columns, scales, true));
  const rest = countRanks(ranks.slice(OPENED));
  if (rest) {
    rows.push(el('tr', { class: 'below' }, el('td', { colspan: 2 + columns.length },
      'and ' + plural(rest, 'rank') + ' more: choose rows by rank')));
  }
  return rows;
}
