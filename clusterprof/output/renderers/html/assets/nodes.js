// All nodes as a map: how much each lost, or made others lose; a click shows that node alone.

function nodeMap() {
  const box = el('div', { class: 'nodes', role: 'group', 'aria-label': 'Nodes by lost time' });
  const named = D.nodes.length <= 64;
  if (named) box.classList.add('named');
  const cell = named ? 128 : D.nodes.length > 400 ? 18 : 30;
  box.style.setProperty('--cell', cell + 'px');
  const buttons = D.nodes.map((name, node) => {
    const button = el('button', {
      type: 'button', tabindex: node ? -1 : 0, 'aria-pressed': 'false',
      onclick: () => set({ node: S.node === node ? -1 : node }),
    });
    if (named) button.append(el('span', null, name), el('span'));
    box.append(button);
    return button;
  });
  box.addEventListener('keydown', (event) => rove(event, buttons));
  let shown = '';
  drawers.push(() => {
    const key = [S.mode, S.cause, S.node].join(' ');
    if (key === shown) return;
    shown = key;
    const { shares, most } = nodeShares();
    const full = Math.max(most, S.mode === 'lost' ? PALE : 1e-9);
    const guilty = guiltyNodes();
    buttons.forEach((button, node) => {
      const part = shares[node] / full;
      button.style.setProperty('--v', (100 * part).toFixed(0));
      button.classList.toggle('deep', part > 0.6);
      button.classList.toggle('guilty', guilty.has(node));
      button.setAttribute('aria-pressed', String(S.node === node));
      const about = D.nodes[node] + ': ' + percent(shares[node]) + ' ' + shareOf()
        + (guilty.has(node) ? ', culprit' : '');
      button.setAttribute('aria-label', about);
      button.title = about;
      if (named) button.lastChild.textContent = percent(shares[node]);
    });
    box.dataset.most = percent(most);
    for (const one of document.querySelectorAll('.most')) {
      one.textContent = percent(full) + ' ' + shareOf();
    }
  });
  return box;
}

const LOST = D.ranks.lost_ns.reduce((sum, ns) => sum + ns, 0);

// By node: lost, of the time in steps of its ranks; or caused, of all that was lost.
function nodeShares() {
  const shares = new Float64Array(D.nodes.length);
  const whole = new Float64Array(D.nodes.length);
  const by = amounts(S.mode, S.cause);
  for (let at = 0; at < D.count; at++) {
    shares[D.ranks.node[at]] += by[at];
    whole[D.ranks.node[at]] += D.ranks.in_step_ns[at];
  }
  let most = 0;
  shares.forEach((ns, node) => {
    const all = S.mode === 'lost' ? whole[node] : LOST;
    shares[node] = all ? ns / all : 0;
    most = Math.max(most, shares[node]);
  });
  return { shares, most };
}

function shareOf() {
  return S.mode === 'lost' ? 'of the time in steps lost' : 'of all lost time caused';
}

function amounts(mode, cause) {
  if (cause < 0) return mode === 'lost' ? D.ranks.lost_ns : D.ranks.caused_ns;
  return (mode === 'lost' ? D.lostBy : D.causedBy).get(cause) || new Float64Array(D.count);
}

function guiltyNodes() {
  const found = new Set();
  for (const finding of D.findings) {
    if (!pointsAtFew(finding) || (S.cause >= 0 && finding.cause !== S.cause)) continue;
    for (const at of finding.culprits) found.add(D.ranks.node[at]);
  }
  return found;
}

// One stop for Tab, arrows within.
function rove(event, buttons) {
  const at = buttons.indexOf(document.activeElement);
  const wide = Math.max(1, buttons.filter((one) => one.offsetTop === buttons[0].offsetTop).length);
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[event.key];
  const to = event.key === 'Home' ? 0 : event.key === 'End' ? buttons.length - 1 : at + by;
  if (at < 0 || !buttons[to]) return;
  event.preventDefault();
  buttons[at].tabIndex = -1;
  buttons[to].tabIndex = 0;
  buttons[to].focus();
}
