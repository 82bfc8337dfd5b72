// Lost time by cause over the run, stacked; above it the whole run with the part in view.

const AXIS = 20;

function lossChart(canvas) {
  const raster = new Raster(canvas);
  const drawer = () => {
    const height = 140;
    raster.fit(V.width, height);
    const shares = sharesShown();
    const top = topOf(shares);
    const ratio = raster.ratio;
    const base = Math.round((height - AXIS) * ratio);
    const brushes = inks();
    for (const run of runs(ratio)) {
      raster.fill(run.x0, run.x1, 0, base, C.track32);
      let sum = 0;
      let y = base;
      for (const { cause, shares: some } of shares) {
        sum += meanOf(some, run.a, run.b);
        const next = Math.max(0, base - Math.round(sum / top * base));
        const ink = brushes[cause];
        if (next < y) {
          if (ink.mask && !ink.pale) {
            raster.fillPattern(run.x0, run.x1, next, y, ink.pixel, ink.stroke, ink.mask);
          } else raster.fill(run.x0, run.x1, next, y, ink.pixel);
        }
        y = next;
      }
    }
    const context = raster.show();
    drawTicks(context, height - AXIS, true);
    drawShares(context, top, height - AXIS);
    drawSlowSteps(context);
    drawCursor(context, height - AXIS);
  };
  drawers.push(drawer);
}

// A round number at or above the largest share ever: the scale stays when one zooms.
function topOf(shares) {
  if (topOf.of === shares) return topOf.top;
  let most = 0;
  for (let i = 0; i < D.H.stretches; i++) {
    let sum = 0;
    for (const one of shares) sum += one.shares[i];
    most = Math.max(most, sum);
  }
  topOf.of = shares;
  topOf.top = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1].find((n) => n >= most) || 1;
  return topOf.top;
}

function drawShares(context, top, height) {
  context.fillStyle = C.softCss;
  context.textAlign = 'right';
  const word = (ratio) => (100 * ratio).toFixed(top < 0.02 ? 1 : 0) + ' %';
  context.textBaseline = 'top';
  context.fillText(word(top), V.gutter - 6, 1);
  context.textBaseline = 'middle';
  context.fillText(word(top / 2), V.gutter - 6, height / 2);
  context.textBaseline = 'bottom';
  context.fillText('0 lost', V.gutter - 6, height);
}

function drawSlowSteps(context) {
  context.fillStyle = C.textCss;
  for (const step of D.H.slow_steps) {
    if (step.start_s + step.length_s < S.from || step.start_s > S.to) continue;
    const x = Math.max(V.gutter, toX(step.start_s));
    context.beginPath();
    context.moveTo(x - 4, 0);
    context.lineTo(x + 4, 0);
    context.lineTo(x, 7);
    context.fill();
  }
}

function drawCursor(context, height) {
  if (S.time < 0) return;
  const x = Math.round(toX(S.time)) + 0.5;
  if (x < V.gutter) return;
  context.strokeStyle = C.textCss;
  context.globalAlpha = 0.55;
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height);
  context.stroke();
  context.globalAlpha = 1;
}

function miniChart(canvas) {
  const raster = new Raster(canvas);
  const sums = new Float64Array(D.H.stretches);
  for (const { shares } of D.H.totals) shares.forEach((share, i) => { sums[i] += share; });
  const top = sums.reduce((most, sum) => Math.max(most, sum), 1e-9);
  drawers.push(() => {
    const height = 26;
    raster.fit(V.width, height);
    const ratio = raster.ratio;
    const [low, high] = [V.gutter * ratio, (V.width - V.right) * ratio];
    for (let x = Math.round(low); x < high; x++) {
      const i = Math.min(D.H.stretches - 1, Math.floor((x - low) / (high - low) * D.H.stretches));
      raster.fill(x, x + 1, 0, raster.height, C.track32);
      const y = Math.round(raster.height * (1 - sums[i] / top));
      raster.fill(x, x + 1, y, raster.height, pixel(mix(C.soft, C.track, 0.6)));
    }
    const context = raster.show();
    const wide = V.width - V.gutter - V.right;
    const [x0, x1] = [S.from, S.to].map((time) => V.gutter + time / SPAN * wide);
    context.fillStyle = C.cardCss;
    context.globalAlpha = 0.65;
    context.fillRect(V.gutter, 0, x0 - V.gutter, height);
    context.fillRect(x1, 0, V.width - V.right - x1, height);
    context.globalAlpha = 1;
    context.strokeStyle = C.textCss;
    context.strokeRect(x0 + 0.5, 0.5, Math.max(2, x1 - x0 - 1), height - 1);
    context.fillStyle = C.softCss;
    context.font = '11px system-ui, sans-serif';
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    context.fillText('whole run', V.gutter - 6, height / 2);
  });
  let held = null;
  const toRun = (x) => (x - V.gutter) / (V.width - V.gutter - V.right) * SPAN;
  canvas.addEventListener('pointerdown', (event) => {
    const time = toRun(event.offsetX);
    held = time >= S.from && time <= S.to ? time - S.from : (S.to - S.from) / 2;
    canvas.setPointerCapture(event.pointerId);
    panBy(time - held - S.from);
  });
  canvas.addEventListener('pointermove', (event) => {
    if (held !== null) panBy(toRun(event.offsetX) - held - S.from);
  });
  canvas.addEventListener('pointerup', () => { held = null; });
}
