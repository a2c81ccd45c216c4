// Rectangles of any size on a grid of pixels. A pixel gets the mean of what covers it, so that a hundred thousand small blocks
// look like what they are: so much of this part is in use.

class Raster {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.under = new Float32Array(width * height);
    this.cover = new Float32Array(width * height);
    this.red = new Float32Array(width * height);
    this.green = new Float32Array(width * height);
    this.blue = new Float32Array(width * height);
  }
  clear() {
    for (const plane of [this.under, this.cover, this.red, this.green, this.blue]) plane.fill(0);
  }
  // What lies under the blocks: memory that is held.
  hold(x0, y0, x1, y1) {
    this.each(x0, y0, x1, y1, (at, part) => { this.under[at] += part; });
  }
  block(x0, y0, x1, y1, tint) {
    if (x0 < 0) x0 = 0;
    if (y0 < 0) y0 = 0;
    if (x1 > this.width) x1 = this.width;
    if (y1 > this.height) y1 = this.height;
    if (x1 <= x0 || y1 <= y0) return;
    const red = tint >> 16, green = (tint >> 8) & 255, blue = tint & 255, width = this.width;
    const left = Math.floor(x0), right = Math.ceil(x1), low = Math.floor(y0), high = Math.ceil(y1);
    for (let y = low; y < high; y++) {
      const tall = Math.min(y + 1, y1) - Math.max(y, y0);
      let at = y * width + left;
      for (let x = left; x < right; x++, at++) {
        const part = tall * (Math.min(x + 1, x1) - Math.max(x, x0));
        this.cover[at] += part;
        this.red[at] += part * red;
        this.green[at] += part * green;
        this.blue[at] += part * blue;
      }
    }
  }
  each(x0, y0, x1, y1, then) {
    x0 = Math.max(x0, 0);
    y0 = Math.max(y0, 0);
    x1 = Math.min(x1, this.width);
    y1 = Math.min(y1, this.height);
    for (let y = Math.floor(y0); y < y1; y++) {
      const tall = Math.min(y + 1, y1) - Math.max(y, y0);
      for (let x = Math.floor(x0); x < x1; x++) {
        then(y * this.width + x, tall * (Math.min(x + 1, x1) - Math.max(x, x0)));
      }
    }
  }
  // The picture: blocks over held memory over the paper.
  image(paper, held) {
    const image = new ImageData(this.width, this.height), out = new Uint32Array(image.data.buffer);
    const channel = (colour, shift) => (colour >> shift) & 255;
    const [pr, pg, pb] = [16, 8, 0].map((shift) => channel(paper, shift));
    const [hr, hg, hb] = [16, 8, 0].map((shift) => channel(held, shift));
    const plain = 0xff000000 | (pb << 16) | (pg << 8) | pr;
    for (let i = 0; i < out.length; i++) {
      const under = Math.min(this.under[i], 1), cover = this.cover[i];
      if (under === 0 && cover === 0) {
        out[i] = plain;
        continue;
      }
      // More than one block in a pixel, because blocks are never drawn thinner than can be seen: their mean.
      const scale = cover > 1 ? 1 / cover : 1, rest = cover > 1 ? 0 : 1 - cover;
      const red = (pr + (hr - pr) * under) * rest + this.red[i] * scale;
      const green = (pg + (hg - pg) * under) * rest + this.green[i] * scale;
      const blue = (pb + (hb - pb) * under) * rest + this.blue[i] * scale;
      out[i] = 0xff000000 | (Math.min(blue, 255) << 16) | (Math.min(green, 255) << 8) | Math.min(red, 255);
    }
    return image;
  }
}
