// A canvas painted pixel by pixel: a thousand rows cost no more than ten.

// TILES (report/families.py): eight rows of two hexadecimal digits, the lowest bit left.
const MASKS = {};
for (const [family, rows] of Object.entries(TILES)) {
  const bit = (at) => parseInt(rows.slice((at >> 3) * 2, (at >> 3) * 2 + 2), 16) >> (at & 7) & 1;
  MASKS[family] = Uint8Array.from({ length: 64 }, (_, at) => bit(at));
}

class Raster {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext('2d');
  }

  // Take the size the canvas has on the page; width and height are in pixels of the device.
  fit(cssWidth, cssHeight) {
    this.ratio = Math.min(window.devicePixelRatio || 1, 2);
    const width = Math.max(1, Math.round(cssWidth * this.ratio));
    const height = Math.max(1, Math.round(cssHeight * this.ratio));
    if (this.width !== width || this.height !== height || !this.image) {
      [this.width, this.height] = [width, height];
      this.canvas.width = width;
      this.canvas.height = height;
      this.image = this.context.createImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    this.pixels.fill(C.card32);
  }

  fill(x0, x1, y0, y1, colour) {
    const bottom = Math.min(y1, this.height);
    const right = Math.min(x1, this.width);
    for (let y = Math.max(0, y0); y < bottom; y++) {
      this.pixels.fill(colour, y * this.width + Math.max(0, x0), y * this.width + right);
    }
  }

  // With the pattern of a family, whose strokes have the second colour.
  fillPattern(x0, x1, y0, y1, colour, stroke, mask) {
    const bottom = Math.min(y1, this.height);
    const right = Math.min(x1, this.width);
    for (let y = Math.max(0, y0); y < bottom; y++) {
      const line = y * this.width;
      const tile = (y & 7) << 3;
      for (let x = Math.max(0, x0); x < right; x++) {
        this.pixels[line + x] = mask[tile | x & 7] ? stroke : colour;
      }
    }
  }

  // Repeat the line at the top of a row down to its bottom.
  repeat(y0, y1) {
    const from = Math.max(0, y0) * this.width;
    for (let y = Math.max(0, y0) + 1; y < Math.min(y1, this.height); y++) {
      this.pixels.copyWithin(y * this.width, from, from + this.width);
    }
  }

  // Show what was painted; what follows is drawn on top, in pixels of the page.
  show() {
    this.context.setTransform(1, 0, 0, 1, 0, 0);
    this.context.putImageData(this.image, 0, 0);
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    return this.context;
  }
}

const SHADES = 32;

// How a cause is painted now: full when chosen or nothing is, pale else.
function inks() {
  return D.causes.map((cause, at) => {
    const pale = S.cause >= 0 && S.cause !== at;
    const colour = pale ? mix(C.causes[at], C.track, 0.22) : C.causes[at];
    return {
      colour, pixel: pixel(colour), stroke: pixel(mix(colour, C.stroke, 0.55)),
      mask: MASKS[cause.family] || null, pale,
      shades: Uint32Array.from({ length: SHADES + 1 }, (_, i) => (
        pixel(mix(colour, C.track, 0.12 + 0.88 * i / SHADES)))),
    };
  });
}
