//! Generated digits: what MNIST looks like from afar, from a seed alone.
//!
//! A digit is a few strokes through control points in the unit square, in one of several hands. Each image moves the
//! points a little, rotates, scales, shears and shifts the whole, draws it with a pen of its own width and darkness,
//! and adds specks and noise. Stroke edges are anti-aliased by their distance from the pixel's centre.
//!
//! The bytes are the same on every machine: the arithmetic is addition, multiplication, division and square root,
//! which IEEE 754 rounds in one way; sines come from a polynomial, not from the system's library. Each image has its
//! own stream of random numbers, so threads do not matter either.

use std::thread;

use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};

use super::{Dataset, DatasetName, Features, Split, checksum_of, seeded, shuffle};

const SIDE: usize = 28;
const PIXELS: usize = SIDE * SIDE;
const CLASSES: usize = 10;
const TRAIN: usize = 8000;
const VALIDATION: usize = 2000;

/// A control point in hundredths of the unit square; x to the right, y down.
type Point = (i8, i8);

/// A stroke of the pen.
enum Stroke {
    /// Straight from point to point.
    Straight(&'static [Point]),
    /// A smooth curve through the points.
    Smooth(&'static [Point]),
}
use Stroke::{Smooth, Straight};

/// The hands in which each digit is written.
#[rustfmt::skip]
const GLYPHS: [&[&[Stroke]]; CLASSES] = [
    &[
        &[Smooth(&[(52, 7), (30, 20), (22, 50), (30, 80), (50, 93), (70, 80), (78, 50), (70, 20), (48, 7)])],
        &[Smooth(&[(62, 12), (38, 14), (24, 42), (30, 78), (52, 90), (74, 70), (76, 34), (58, 10)])],
    ],
    &[
        &[Straight(&[(51, 7), (50, 93)])],
        &[Straight(&[(32, 26), (52, 7), (52, 93)])],
        &[Straight(&[(34, 24), (51, 8), (51, 92)]), Straight(&[(30, 92), (72, 92)])],
    ],
    &[
        &[Smooth(&[(24, 30), (34, 12), (54, 7), (73, 20), (72, 40), (52, 64), (24, 91)]), Straight(&[(24, 91), (78, 90)])],
        &[Smooth(&[(26, 24), (46, 8), (70, 20), (66, 46), (44, 74), (26, 86), (24, 74), (38, 72), (58, 86), (80, 86)])],
    ],
    &[
        &[Smooth(&[(24, 18), (46, 7), (70, 18), (66, 38), (44, 47)]), Smooth(&[(44, 47), (70, 54), (76, 74), (54, 92), (22, 82)])],
        &[Straight(&[(24, 10), (72, 10), (44, 42)]), Smooth(&[(44, 42), (70, 50), (76, 72), (54, 92), (22, 84)])],
    ],
    &[
        &[Straight(&[(32, 10), (22, 56), (80, 56)]), Straight(&[(66, 28), (62, 93)])],
        &[Straight(&[(62, 93), (62, 8), (20, 64), (82, 64)])],
    ],
    &[
        &[Straight(&[(72, 9), (32, 9), (28, 46)]), Smooth(&[(28, 46), (52, 40), (75, 56), (72, 80), (50, 93), (23, 84)])],
        &[Straight(&[(76, 12), (36, 10), (32, 42)]), Smooth(&[(32, 42), (58, 48), (72, 66), (62, 86), (38, 92), (24, 86)])],
    ],
    &[
        &[Smooth(&[(68, 9), (42, 26), (26, 56), (31, 82), (52, 93), (73, 80), (70, 60), (50, 52), (29, 66)])],
        &[Smooth(&[(48, 7), (32, 36), (25, 68), (40, 91), (66, 86), (70, 66), (52, 56), (27, 70)])],
    ],
    &[
        &[Straight(&[(22, 11), (77, 11), (44, 93)])],
        &[Straight(&[(24, 24), (24, 11), (77, 11)]), Smooth(&[(77, 11), (56, 44), (46, 93)])],
        &[Straight(&[(22, 11), (77, 11), (46, 93)]), Straight(&[(38, 52), (72, 50)])],
    ],
    &[
        &[Smooth(&[(50, 48), (28, 34), (31, 14), (50, 7), (69, 14), (72, 34), (50, 48), (26, 66), (28, 86), (50, 93), (72, 86), (74, 66), (50, 48)])],
        &[Smooth(&[(70, 16), (48, 8), (30, 22), (46, 44), (70, 64), (68, 86), (44, 93), (28, 78), (44, 54), (66, 34), (70, 16)])],
    ],
    &[
        &[Smooth(&[(71, 32), (62, 11), (40, 8), (26, 26), (35, 46), (56, 48), (71, 32)]), Smooth(&[(71, 32), (70, 60), (58, 93)])],
        &[Smooth(&[(70, 20), (46, 8), (27, 26), (36, 48), (58, 44), (71, 20)]), Straight(&[(71, 20), (70, 93)])],
    ],
];

/// Generates the data set of `seed`.
pub(super) fn generate(seed: u64) -> Dataset {
    let (train, validation) = (split(seed, b"train   ", TRAIN), split(seed, b"validate", VALIDATION));
    Dataset {
        name: DatasetName::Digits,
        source: format!("generated, seed {seed}"),
        notice: None,
        files: Vec::new(),
        checksum: checksum_of([&train, &validation]),
        features: PIXELS,
        classes: CLASSES,
        train,
        validation,
    }
}

/// Draws `rows` images, each digit equally often, in random order.
fn split(seed: u64, purpose: &[u8; 8], rows: usize) -> Split {
    let mut rng = seeded(seed, purpose);
    let mut labels: Vec<u8> = (0..rows).map(|row| (row % CLASSES) as u8).collect();
    shuffle(&mut labels, &mut rng);

    let mut bytes = vec![0; rows * PIXELS];
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get().min(4));
    let share = rows.div_ceil(threads);
    thread::scope(|scope| {
        for (part, (images, labels)) in bytes.chunks_mut(share * PIXELS).zip(labels.chunks(share)).enumerate() {
            let key = rng.get_seed();
            scope.spawn(move || {
                for (row, (image, &label)) in images.chunks_exact_mut(PIXELS).zip(labels).enumerate() {
                    let mut rng = ChaCha8Rng::from_seed(key);
                    // Stream 0 ordered the labels.
                    rng.set_stream((part * share + row) as u64 + 1);
                    rng.set_word_pos(0);
                    draw(usize::from(label), image, &mut Dice(rng));
                }
            });
        }
    });
    Split { rows, features: Features::U8 { bytes, scale: 1.0 / 255.0, shift: 0.0 }, labels }
}

/// Draws one digit.
fn draw(digit: usize, image: &mut [u8], dice: &mut Dice) {
    let hands = GLYPHS[digit];
    let glyph = hands[dice.below(hands.len())];
    let pen = Pen { radius: dice.between(0.9, 1.6), map: Affine::random(dice) };
    let mut ink = [0.0f32; PIXELS];
    for stroke in glyph {
        let (points, smooth) = match stroke {
            Straight(points) => (points, false),
            Smooth(points) => (points, true),
        };
        let points: Vec<[f32; 2]> =
            points.iter().map(|&(x, y)| pen.map.apply([jitter(x, dice), jitter(y, dice)])).collect();
        if smooth { pen.curve(&points, &mut ink) } else { pen.polyline(&points, &mut ink) }
    }
    for _ in 0..dice.below(3) {
        let from = [dice.between(0.0, 28.0), dice.between(0.0, 28.0)];
        let to = [from[0] + dice.between(-2.5, 2.5), from[1] + dice.between(-2.5, 2.5)];
        pen.segment(from, to, &mut ink);
    }

    let darkness = dice.between(0.7, 1.0);
    let mut noise = [0; 2 * PIXELS];
    dice.0.fill_bytes(&mut noise);
    for ((pixel, &ink), noise) in image.iter_mut().zip(&ink).zip(noise.chunks_exact(2)) {
        // The sum of two even distributions is a triangle around 255.
        let noise = (f32::from(noise[0]) + f32::from(noise[1]) - 255.0) * NOISE;
        *pixel = ((ink * darkness * 255.0) + noise).clamp(0.0, 255.0) as u8;
    }
}

/// The triangle's half width, as a share of full ink.
const NOISE: f32 = 0.14;
/// Maximum displacement of a control point, in the unit square.
const JITTER: f32 = 0.03;

fn jitter(hundredths: i8, dice: &mut Dice) -> f32 {
    f32::from(hundredths) / 100.0 + dice.between(-JITTER, JITTER)
}

/// Random numbers, as a drawing needs them.
struct Dice(ChaCha8Rng);

impl Dice {
    /// Evenly from `low` up to `high`.
    fn between(&mut self, low: f32, high: f32) -> f32 {
        // 24 bits fit a float exactly.
        let unit = (self.0.next_u32() >> 8) as f32 / (1 << 24) as f32;
        low + (high - low) * unit
    }

    /// Evenly from 0 up to and without `count`.
    fn below(&mut self, count: usize) -> usize {
        ((u64::from(self.0.next_u32()) * count as u64) >> 32) as usize
    }
}

/// From the unit square to pixels: `x' = a x + b y + c`.
struct Affine {
    rows: [[f32; 3]; 2],
}

impl Affine {
    /// Rotated by up to 12 degrees, scaled, sheared and shifted about the image's centre.
    fn random(dice: &mut Dice) -> Self {
        let angle = dice.between(-0.2094, 0.2094);
        // Taylor's polynomials: within 1e-6 at these angles.
        let square = angle * angle;
        let sine = angle * (1.0 - square / 6.0 * (1.0 - square / 20.0));
        let cosine = 1.0 - square / 2.0 * (1.0 - square / 12.0);
        let (wide, high) = (dice.between(17.0, 23.0), dice.between(19.0, 23.0));
        let shear = dice.between(-0.2, 0.2);
        let centre = 14.0;
        let (x, y) = (centre + dice.between(-1.5, 1.5), centre + dice.between(-1.5, 1.5));
        let linear = [[wide * cosine, high * (shear * cosine - sine)], [wide * sine, high * (shear * sine + cosine)]];
        let row = |row: [f32; 2], to: f32| [row[0], row[1], to - (row[0] + row[1]) * 0.5];
        Self { rows: [row(linear[0], x), row(linear[1], y)] }
    }

    fn apply(&self, [x, y]: [f32; 2]) -> [f32; 2] {
        self.rows.map(|[a, b, c]| a * x + b * y + c)
    }
}

/// Pen that draws the strokes of one image.
struct Pen {
    /// Half the stroke's width, in pixels.
    radius: f32,
    map: Affine,
}

impl Pen {
    /// Straight lines from point to point.
    fn polyline(&self, points: &[[f32; 2]], ink: &mut [f32; PIXELS]) {
        points.windows(2).for_each(|pair| self.segment(pair[0], pair[1], ink));
    }

    /// A Catmull-Rom spline: it goes through every point, with no corner.
    fn curve(&self, points: &[[f32; 2]], ink: &mut [f32; PIXELS]) {
        const PIECES: usize = 4;
        let last = points.len() - 1;
        for index in 0..last {
            let [before, from, to, after] =
                [points[index.saturating_sub(1)], points[index], points[index + 1], points[(index + 2).min(last)]];
            let at = |piece: usize| {
                let t = piece as f32 / PIECES as f32;
                std::array::from_fn(|axis| {
                    let [a, b, c, d] = [before[axis], from[axis], to[axis], after[axis]];
                    b + 0.5 * t * ((c - a) + t * ((2.0 * a - 5.0 * b + 4.0 * c - d) + t * (3.0 * (b - c) + d - a)))
                })
            };
            (0..PIECES).for_each(|piece| self.segment(at(piece), at(piece + 1), ink));
        }
    }

    /// Inks the pixels near the segment; ink does not add up where strokes cross.
    fn segment(&self, from: [f32; 2], to: [f32; 2], ink: &mut [f32; PIXELS]) {
        let reach = self.radius + 0.5;
        let along = [to[0] - from[0], to[1] - from[1]];
        let length2 = along[0] * along[0] + along[1] * along[1];
        // Pixel `i` has its centre at `i + 0.5`. A negative float becomes 0 as an integer.
        let range = |axis: usize| {
            let (low, high) = (from[axis].min(to[axis]) - reach - 0.5, from[axis].max(to[axis]) + reach + 0.5);
            (low as usize).min(SIDE)..(high as usize).min(SIDE)
        };
        for row in range(1) {
            for column in range(0) {
                let pixel = [column as f32 + 0.5 - from[0], row as f32 + 0.5 - from[1]];
                let dot = pixel[0] * along[0] + pixel[1] * along[1];
                let t = if length2 > 0.0 { (dot / length2).clamp(0.0, 1.0) } else { 0.0 };
                let off = [pixel[0] - t * along[0], pixel[1] - t * along[1]];
                let distance2 = off[0] * off[0] + off[1] * off[1];
                if distance2 < reach * reach {
                    let cover = (reach - distance2.sqrt()).min(1.0);
                    let there = &mut ink[row * SIDE + column];
                    *there = there.max(cover);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_digit_occurs_equally_often() {
        let data = generate(3);
        for (split, rows) in [(&data.train, TRAIN), (&data.validation, VALIDATION)] {
            let Features::U8 { bytes, .. } = &split.features else { panic!("digits are bytes") };
            assert_eq!((split.rows, split.labels.len(), bytes.len()), (rows, rows, rows * PIXELS));
            for digit in 0..CLASSES {
                assert_eq!(split.labels.iter().filter(|&&label| usize::from(label) == digit).count(), rows / CLASSES);
            }
        }
        let start: Vec<u8> = data.train.labels[..10].to_vec();
        assert_ne!(start, (0..10).collect::<Vec<u8>>());
    }

    #[test]
    fn strokes_are_inked_where_they_go() {
        let pen = Pen { radius: 1.0, map: Affine { rows: [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]] } };
        let mut ink = [0.0; PIXELS];
        pen.segment([5.5, 10.5], [20.5, 10.5], &mut ink);
        assert_eq!(ink[10 * SIDE + 12], 1.0);
        assert_eq!(ink[11 * SIDE + 12], 0.5);
        assert_eq!(ink[12 * SIDE + 12], 0.0);
        assert_eq!(ink[10 * SIDE + 25], 0.0);
        // Off the image is nowhere.
        pen.segment([-9.0, -9.0], [-5.0, 40.0], &mut [0.0; PIXELS]);
    }

    #[test]
    fn a_spline_goes_through_its_points() {
        let pen = Pen { radius: 0.6, map: Affine { rows: [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]] } };
        let mut ink = [0.0; PIXELS];
        pen.curve(&[[4.5, 4.5], [14.5, 20.5], [24.5, 4.5]], &mut ink);
        for (x, y) in [(4, 4), (14, 20), (24, 4)] {
            assert_eq!(ink[y * SIDE + x], 1.0);
        }
    }
}
