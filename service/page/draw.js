// Images with heat on them, on canvases: red where a concept counts for the class, blue where it counts against.

export const RED = [214, 39, 40];
export const BLUE = [31, 90, 200];
const FINE = 96; // side of an upsampled heatmap

/** Values of a grid {size, values}, upsampled like the library does (bilinear, cell centres). */
function upsample({ size: [h, w], values }, side = FINE) {
  const out = new Float32Array(side * side);
  const at = (i, n) => {
    const p = Math.min(Math.max((i + 0.5) * n / side - 0.5, 0), n - 1);
    const low = Math.floor(p);
    return [low, Math.min(low + 1, n - 1), p - low];
  };
  const across = Array.from({ length: side }, (_, x) => at(x, w));
  for (let y = 0; y < side; y++) {
    const [top, bottom, v] = at(y, h);
    for (let x = 0; x < side; x++) {
      const [left, right, u] = across[x];
      out[y * side + x] = (1 - v) * ((1 - u) * values[top][left] + u * values[top][right])
        + v * ((1 - u) * values[bottom][left] + u * values[bottom][right]);
    }
  }
  return out;
}

export const peak = (heat) => (heat?.values ? Math.max(0, ...heat.values.flat()) : 0);

/** The part of an image that the model sees: all of it when it is stretched, the centre when it is cropped. */
function seenPart(image, [height, width], resize) {
  const w = image.width, h = image.height;
  const [way, side] = resize.split("-");
  const before = /^\d+$/.test(side ?? "") ? Number(side) : 0; // pixels to which it is scaled before the middle is cut
  if (way !== "crop" && !before) return [0, 0, w, h];
  if (way !== "crop") return [(w - w * width / before) / 2, (h - h * height / before) / 2, w * width / before, h * height / before];
  const scale = before ? Math.min(w, h) / before : Math.min(w / width, h / height);
  return [(w - width * scale) / 2, (h - height * scale) / 2, width * scale, height * scale];
}

/**
 * Draw what the model sees on a canvas, `side` pixels wide or high, then each layer of heat.
 * layers: [{heat, against, top, weight}], full colour at `top` (default: the map's own peak).
 */
export function draw(canvas, entry, layers, { side, opacity, shape, resize }) {
  const [, height, width] = shape;
  const scale = side / Math.max(height, width);
  const w = canvas.width = Math.max(1, Math.round(width * scale));
  const h = canvas.height = Math.max(1, Math.round(height * scale));
  const pen = canvas.getContext("2d");
  if (entry.bitmap) {
    const part = seenPart(entry.bitmap, [height, width], resize);
    pen.fillStyle = "#fff"; // where an image is transparent, the model sees white
    pen.fillRect(0, 0, w, h);
    pen.imageSmoothingEnabled = part[2] * 4 > w;
    pen.drawImage(entry.bitmap, ...part, 0, 0, w, h);
  } else {
    pen.fillStyle = "#888";
    pen.fillRect(0, 0, w, h);
  }
  const drawn = layers.filter((layer) => layer.heat?.values);
  if (!drawn.length || opacity <= 0) return;
  pen.fillStyle = `rgba(150, 150, 150, ${0.4 * Math.min(1, opacity * 1.25)})`; // dimmed, so that colour is seen on black and on white
  pen.fillRect(0, 0, w, h);
  const spare = new OffscreenCanvas(FINE, FINE);
  const ink = spare.getContext("2d");
  for (const { heat, against, top, weight = 1 } of drawn) {
    const full = top ?? peak(heat);
    if (!(full > 0)) continue;
    const fine = upsample(heat);
    const pixels = ink.createImageData(FINE, FINE);
    const colour = against ? BLUE : RED;
    for (let i = 0; i < fine.length; i++) {
      pixels.data.set(colour, 4 * i);
      pixels.data[4 * i + 3] = 255 * opacity * weight * Math.min(1, Math.max(0, fine[i] / full));
    }
    ink.putImageData(pixels, 0, 0);
    pen.imageSmoothingEnabled = true;
    pen.drawImage(spare, 0, 0, w, h);
  }
}
