// The longest waits and the slowest steps as lists: a click goes there.

const MOST_LISTED = 8;

function waitList() {
  const list = el('ul', { class: 'pick', id: 'waits' });
  let shown = '';
  drawers.push(() => {
    const key = [S.node, S.cause, S.wait].join(' ');
    if (key === shown) return;
    shown = key;
    const all = D.H.waits.map((wait, at) => [wait, at])
      .filter(([wait]) => ofNode(wait) && (S.cause < 0 || wait.cause === S.cause))
      .sort(([one], [other]) => other.length - one.length);
    list.replaceChildren(...all.slice(0, MOST_LISTED).map(([wait, at]) => el('li', null,
      el('button', {
        type: 'button', 'aria-pressed': String(S.wait === at), onclick: () => chooseWait(at),
      }, el('b', null, human(wait.length * 1e9)), el('span', null, waitText(wait))))));
    const none = D.H.waits.length ? 'None of the longest is one of these.' :
      'No rank was seen waiting for another.';
    if (!all.length) list.append(el('li', { class: 'note' }, none));
  });
  return el('div', null, el('h3', null, 'Longest waits'), list);
}

function stepList() {
  const made = D.H.slow_steps.slice(0, MOST_LISTED).map((step) => {
    const last = step.rank === null ? '' : ', last: ' + fullRankName(step.rank);
    const cause = step.lost.length ? ', ' + D.causes[step.lost[0][0]].id : '';
    const goThere = () => {
      const around = step.length_s;
      zoomTo(step.start_s - around, step.start_s + step.length_s + around);
    };
    return el('li', null, el('button', { type: 'button', onclick: goThere },
      el('b', null, human(step.length_s * 1e9)),
      el('span', null, 'step ' + step.step.toLocaleString('en-US') + last + cause)));
  });
  if (!made.length) made.push(el('li', { class: 'note' }, 'None is known.'));
  const list = el('ul', { class: 'pick', id: 'slow' }, ...made);
  return el('div', null, el('h3', null, 'Slowest steps'), list);
}

// Causes as chips with their colours: a legend, and a choice.
function causeChips() {
  const box = el('div', { class: 'chips', role: 'group', 'aria-label': 'Causes' });
  const seen = D.H.totals.map((one) => one.cause);
  const ofFindings = D.findings.filter((one) => !one.outside).map((one) => one.cause);
  const buttons = [...new Set([...seen, ...ofFindings])].map((cause) => {
    const known = D.causes[cause];
    const button = el('button', {
      type: 'button', title: known.title,
      onclick: () => set({ cause: S.cause === cause ? -1 : cause }),
    }, swatch(known), known.id);
    box.append(button);
    return [cause, button];
  });
  drawers.push(() => {
    for (const [cause, button] of buttons) {
      button.setAttribute('aria-pressed', String(S.cause === cause));
    }
  });
  return box;
}
