// Light and dark: the reader's system decides, or the button; canvases follow the styles.

const C = {};

function parsed(text) {
  const numbers = text.match(/-?[0-9.]+(?:e-?[0-9]+)?/g).map(Number);
  const scale = text.startsWith('color(') ? 255 : 1;
  return numbers.slice(0, 3).map((number) => Math.round(number * scale));
}

function pixel([r, g, b]) {
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}

function mix(one, other, part) {
  return one.map((value, i) => Math.round(value * part + other[i] * (1 - part)));
}

function readColours() {
  const probe = el('span');
  document.body.append(probe);
  const read = (value) => {
    probe.style.color = value;
    return parsed(getComputedStyle(probe).color);
  };
  for (const name of ['text', 'soft', 'line', 'card', 'track', 'stroke', 'focus']) {
    C[name] = read('var(--' + name + ')');
    C[name + 'Css'] = 'rgb(' + C[name].join(',') + ')';
  }
  C.causes = D.causes.map((cause) => {
    probe.className = 'k-' + cause.family + ' tone' + cause.tone;
    return read('var(--k)');
  });
  probe.remove();
  C.track32 = pixel(C.track);
  C.card32 = pixel(C.card);
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  readColours();
  draw();
}

function themeButton() {
  const button = el('button', { type: 'button', id: 'theme' });
  const name = () => {
    button.textContent = isDark() ? 'Light' : 'Dark';
    button.setAttribute('aria-label', 'Use the ' + button.textContent.toLowerCase() + ' theme');
  };
  button.addEventListener('click', () => {
    setTheme(isDark() ? 'light' : 'dark');
    name();
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    readColours();
    name();
    redraw();
  });
  name();
  return button;
}

// Paper is light, whatever the screen is.
function lightForPrint() {
  let before = null;
  addEventListener('beforeprint', () => {
    before = document.documentElement.dataset.theme || '';
    for (const one of document.querySelectorAll('details:not([open])')) {
      one.open = true;
      one.dataset.shut = '';
    }
    setTheme('light');
  });
  addEventListener('afterprint', () => {
    for (const one of document.querySelectorAll('details[data-shut]')) {
      one.open = false;
      delete one.dataset.shut;
    }
    setTheme(before);
  });
}
