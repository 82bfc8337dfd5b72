// Ranks by cause: what each lost, or made all lose; a heading sorts, a rank's name shows its node.

const PAGE = 24;
const PALE = 0.05; // of the time in steps: less is not drawn as if it were much

function heatMap() {
  const head = el('thead');
  const body = el('tbody');
  const more = el('button', { type: 'button', class: 'more' });
  const table = el('table', { class: 'heat' }, head, body);
  let [sorted, count, shown] = [-1, PAGE, ''];
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
    const key = [S.mode, S.node, S.cause, sorted, count].join(' ');
    if (key === shown) return;
    shown = key;
    const causes = S.cause >= 0 ? [S.cause] : columnsOf(S.mode);
    const by = amounts(S.mode, causes.includes(sorted) ? sorted : -1);
    const every = Array.from({ length: D.count }, (_, at) => at);
    const ranks = S.node >= 0 ? [...D.ranksOfNode[S.node]] : every;
    ranks.sort((one, other) => by[other] - by[one] || one - other);
    const all = [-1, ...causes].map((cause) => amounts(S.mode, cause));
    const most = all.map((ns) => Math.max(1, ns.reduce((high, one) => Math.max(high, one), 0)));
    const longest = D.ranks.in_step_ns.reduce((high, ns) => Math.max(high, ns), 0);
    const least = S.mode === 'felt' ? PALE * longest : 1;
    const scale = Math.max(1, least, ...most.slice(1));
    most[0] = Math.max(most[0], least);
    head.replaceChildren(el('tr', null, el('th', { scope: 'col' }, 'rank'),
      el('th', { scope: 'col' }, 'node'), heading(-1), ...causes.map(heading)));
    body.replaceChildren(...ranks.slice(0, count).map((at) => heatRow(at, all, scale, most[0])));
    more.hidden = ranks.length <= count;
    more.textContent = 'Show more of ' + plural(ranks.length, 'rank');
  });
  return el('div', null, el('div', { class: 'scroll' }, table), more);
}

function columnsOf(mode) {
  return [...(mode === 'felt' ? D.feltBy : D.causedBy).keys()].slice(0, 9);
}

function heatRow(at, all, scale, most) {
  const node = D.ranks.node[at];
  const choose = () => set({ node: S.node === node ? -1 : node });
  const name = el('button', { type: 'button', onclick: choose }, rankName(at));
  const cells = all.map((ns, column) => {
    const part = ns[at] / (column ? scale : most);
    const look = part > 0.6 ? 'cell deep' : 'cell';
    const cell = el('td', { class: look }, ns[at] ? human(ns[at]) : '-');
    cell.style.setProperty('--v', (100 * part).toFixed(0));
    return cell;
  });
  return el('tr', { class: S.node === node ? 'chosen' : null },
    el('th', { scope: 'row' }, name), el('td', null, D.nodes[node]), ...cells);
}
