// The findings' cards: show one in the charts, copy a command.

function copyButtons() {
  for (const block of document.querySelectorAll('pre.copy')) {
    const code = block.querySelector('code').textContent;
    const button = el('button', { type: 'button' }, 'Copy');
    button.addEventListener('click', () => {
      copy(code, block).then((done) => {
        button.textContent = done ? 'Copied' : 'Press Ctrl+C';
        setTimeout(() => { button.textContent = 'Copy'; }, 2000);
      });
    });
    block.append(button);
  }
}

// A page opened from a disk may have no clipboard: the text is selected, and copied the old way.
async function copy(text, block) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (error) {
    getSelection().selectAllChildren(block.querySelector('code'));
    return document.execCommand('copy');
  }
}

function findingButtons() {
  const cards = [...document.querySelectorAll('details.finding')];
  const buttons = cards.map((card) => {
    const { cause, outside } = D.findings[Number(card.dataset.finding)];
    if (outside) return null;
    const button = el('button', {
      type: 'button', onclick: () => {
        const chosen = S.cause === cause;
        set({ cause: chosen ? -1 : cause });
        if (!chosen) document.getElementById(D.H ? 'when' : 'who').scrollIntoView();
      },
    }, 'Show in the charts');
    card.querySelector('.do-side').append(button);
    return button;
  });
  drawers.push(() => cards.forEach((card, at) => {
    const chosen = D.findings[Number(card.dataset.finding)].cause === S.cause;
    card.classList.toggle('chosen', chosen);
    if (buttons[at]) buttons[at].setAttribute('aria-pressed', String(chosen));
  }));
}

// What is shown only in part, always in sight, and the way back.
function filters() {
  const box = el('div', { id: 'filters', role: 'status' });
  let shown = '';
  drawers.push(() => {
    const zoomed = D.H && (S.from > 0 || S.to < SPAN);
    const key = [S.node, S.cause, zoomed && S.from, zoomed && S.to].join(' ');
    if (key === shown) return;
    shown = key;
    const chips = [];
    const chip = (text, changes) => chips.push(el('button', {
      type: 'button', 'aria-label': 'Stop showing only ' + text, onclick: () => set(changes),
    }, text + ' \u00d7'));
    if (S.node >= 0) chip('node ' + D.nodes[S.node], { node: -1 });
    if (S.cause >= 0) chip('cause ' + D.causes[S.cause].id, { cause: -1 });
    if (zoomed) {
      const step = (S.to - S.from) / 20;
      chip(clock(S.from, step) + ' to ' + clock(S.to, step), { from: 0, to: SPAN });
    }
    box.replaceChildren(...chips);
  });
  return box;
}
