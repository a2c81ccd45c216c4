//! A small net as the operations of a training step, on memory that the test lays out.

use kernels::{
    Element, Engine, GatherLabels, GatherRowsF32, GatherRowsU8, LinearBackwardInput, LinearForward, LinearUpdate,
    Operation, PersistentSteps, Precision, SoftmaxLoss,
};

/// What a net is made of.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) rows: u32,
    /// Inputs, hidden layers, classes.
    pub(crate) widths: Vec<u32>,
    /// Whether the data set is of bytes, not of f32.
    pub(crate) bytes: bool,
    /// Whether halves have master weights.
    pub(crate) master: bool,
}

struct Layer {
    weight: u64,
    master: Option<u64>,
    bias: u64,
    /// What goes in.
    x: u64,
    /// What comes out, and its gradient.
    y: u64,
    dy: u64,
}

/// Offsets in one region, and what it holds before the first step.
pub(crate) struct Net {
    precision: Precision,
    shape: Shape,
    layers: Vec<Layer>,
    source: u64,
    source_labels: u64,
    order: u64,
    labels: u64,
    cursor: u64,
    losses: u64,
    #[allow(dead_code, reason = "for tests")]
    steps: u32,
    tickets: u64,
    workspace: u64,
    memory: u64,
    pub(crate) image: Vec<u8>,
}

const SOURCE_ROWS: u32 = 300;
const TICKETS: u64 = 4096;
const WORKSPACE: u64 = 8 << 20;

/// Numbers without pattern.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as u32
    }

    fn between(&mut self, least: f32, most: f32) -> f32 {
        least + (most - least) * (self.next() % 4096) as f32 / 4096.0
    }
}

/// Appends on a boundary of 256 bytes.
fn put(image: &mut Vec<u8>, bytes: &[u8]) -> u64 {
    image.resize(image.len().next_multiple_of(256), 0);
    let at = image.len() as u64;
    image.extend_from_slice(bytes);
    at
}

fn pitch(element: Element, cols: u32) -> u32 {
    element.pitch(cols)
}

impl Net {
    /// For `steps` steps in all.
    pub(crate) fn new(precision: Precision, shape: &Shape, steps: u32) -> Self {
        let element = precision.element();
        let mut noise = Noise(7);
        let image = &mut Vec::new();
        let Shape { rows, widths, bytes, master } = shape.clone();
        let (inputs, classes) = (widths[0], widths[widths.len() - 1]);
        let matrix = |cols: u32| vec![0_u8; (rows * pitch(element, cols)) as usize * element.bytes() as usize];
        let values = SOURCE_ROWS * inputs;
        let source = if bytes {
            let values: Vec<u8> = (0..values).map(|_| noise.next() as u8).collect();
            put(image, &values)
        } else {
            let values: Vec<f32> = (0..values).map(|_| noise.between(-1.0, 1.0)).collect();
            put(image, bytemuck::cast_slice(&values))
        };
        let classes_of: Vec<u8> = (0..SOURCE_ROWS).map(|_| (noise.next() % classes) as u8).collect();
        let source_labels = put(image, &classes_of);
        let order: Vec<u32> = (0..rows * steps).map(|_| noise.next() % SOURCE_ROWS).collect();
        let order = put(image, bytemuck::cast_slice(&order));
        let labels = put(image, &vec![0; 4 * rows as usize]);
        let (cursor, losses) = (put(image, &[0; 4]), put(image, &vec![0; 4 * steps as usize]));
        let mut x = put(image, &matrix(inputs));
        let mut layers = Vec::new();
        for (number, pair) in widths.windows(2).enumerate() {
            let bound = (6.0 / pair[0] as f32).sqrt();
            let weights: Vec<f32> = (0..pair[0] * pair[1]).map(|_| noise.between(-bound, bound)).collect();
            let pitch = pitch(element, pair[0]);
            let weight = put(image, &element.pack(&weights, pair[0], pitch));
            let half = element != Element::F32;
            let master = (half && master).then(|| put(image, &Element::F32.pack(&weights, pair[0], pitch)));
            let biases: Vec<f32> = (0..pair[1]).map(|_| noise.between(-0.1, 0.1)).collect();
            let bias = put(image, bytemuck::cast_slice(&biases));
            let last = number + 2 == widths.len();
            let y =
                if last { put(image, &vec![0; (4 * rows * pair[1]) as usize]) } else { put(image, &matrix(pair[1])) };
            let dy = put(image, &matrix(pair[1]));
            layers.push(Layer { weight, master, bias, x, y, dy });
            x = y;
        }
        let tickets = put(image, &vec![0; 8 * TICKETS as usize]);
        let memory = put(image, &vec![0; PersistentSteps::MEMORY_BYTES as usize]);
        // At the end, since what it holds after a step does not matter. One half for updates.
        let workspace = put(image, &vec![0; 2 * WORKSPACE as usize]);
        let (shape, image) = (shape.clone(), std::mem::take(image));
        Self {
            precision,
            shape,
            layers,
            source,
            source_labels,
            order,
            labels,
            cursor,
            losses,
            steps,
            tickets,
            workspace,
            memory,
            image,
        }
    }

    /// The address of the memory for [`PersistentSteps`].
    pub(crate) fn memory(&self, base: u64) -> u64 {
        base + self.memory
    }

    /// The operations of a step, as the trainer has them.
    pub(crate) fn operations(&self, base: u64) -> Vec<Box<dyn Operation>> {
        let mut out: Vec<Box<dyn Operation>> = Vec::new();
        let (precision, rows, element) = (self.precision, self.shape.rows, self.precision.element());
        let widths = &self.shape.widths;
        let at = |offset: u64| base + offset;
        let (cols, pitch_of_inputs) = (widths[0], pitch(element, widths[0]));
        let (source_rows, batch, cursor) = (SOURCE_ROWS, rows, Some(at(self.cursor)));
        let (source, indices, x) = (at(self.source), at(self.order), at(self.layers[0].x));
        if self.shape.bytes {
            let (scale, shift) = (1.0 / 255.0, -0.3);
            let pitch = pitch_of_inputs;
            let out_of = GatherRowsU8 {
                element,
                rows,
                cols,
                pitch,
                batch,
                source,
                source_rows,
                indices,
                cursor,
                scale,
                shift,
                out: x,
            };
            out.push(Box::new(out_of));
        } else {
            let (scale, shift, pitch) = (1.0, -0.0, pitch_of_inputs);
            out.push(Box::new(GatherRowsF32 {
                element,
                rows,
                cols,
                pitch,
                batch,
                source,
                source_rows,
                indices,
                cursor,
                scale,
                shift,
                out: x,
            }));
        }
        let (source, labels) = (at(self.source_labels), at(self.labels));
        out.push(Box::new(GatherLabels { rows, batch, source, source_rows, indices, cursor, out: labels }));
        let (tickets, workspace) = (at(self.tickets), at(self.workspace));
        let last = self.layers.len() - 1;
        let pitches = |number: usize| (pitch(element, widths[number]), pitch(element, widths[number + 1]));
        for (number, layer) in self.layers.iter().enumerate() {
            let (x_pitch, y_pitch) = pitches(number);
            let logits = number == last;
            out.push(Box::new(LinearForward {
                engine: Engine::Own,
                precision,
                rows,
                inputs: widths[number],
                outputs: widths[number + 1],
                x: at(layer.x),
                x_pitch,
                weight: at(layer.weight),
                weight_pitch: x_pitch,
                bias: Some(at(layer.bias)),
                relu: !logits,
                y: at(layer.y),
                y_pitch: if logits { widths[number + 1] } else { y_pitch },
                y_f32: logits,
                workspace,
                tickets,
            }));
        }
        out.push(Box::new(SoftmaxLoss {
            element,
            rows,
            classes: widths[last + 1],
            logits: at(self.layers[last].y),
            labels,
            dlogits: Some(at(self.layers[last].dy)),
            dlogits_pitch: pitches(last).1,
            scale: 64.0 / rows as f32,
            loss: at(self.losses),
            correct: None,
            cursor,
            advance: true,
            workspace,
            tickets,
        }));
        for (number, layer) in self.layers.iter().enumerate().rev() {
            let (x_pitch, dy_pitch) = pitches(number);
            let (inputs, outputs) = (widths[number], widths[number + 1]);
            if number > 0 {
                out.push(Box::new(LinearBackwardInput {
                    engine: Engine::Own,
                    precision,
                    rows,
                    inputs,
                    outputs,
                    dy: at(layer.dy),
                    dy_pitch,
                    weight: at(layer.weight),
                    weight_pitch: x_pitch,
                    mask: Some(at(layer.x)),
                    dx: at(self.layers[number - 1].dy),
                    dx_pitch: x_pitch,
                    workspace,
                    tickets,
                }));
            }
            out.push(Box::new(LinearUpdate {
                engine: Engine::Own,
                precision,
                rows,
                inputs,
                outputs,
                dy: at(layer.dy),
                dy_pitch,
                x: at(layer.x),
                x_pitch,
                rate: 0.05 / 64.0,
                weight: at(layer.weight),
                weight_pitch: x_pitch,
                master: layer.master.map(at),
                bias: at(layer.bias),
                workspace: workspace + WORKSPACE,
                tickets: tickets + 4 * TICKETS,
            }));
        }
        out
    }

    /// The steps' losses.
    #[allow(dead_code, reason = "for tests")]
    pub(crate) fn losses(&self, image: &[u8]) -> Vec<f32> {
        let slots = image[self.losses as usize..].chunks_exact(4).take(self.steps as usize);
        slots.map(bytemuck::pod_read_unaligned).collect()
    }

    /// The first byte that is not the same after the same steps, as offset and what there is. What launches need for
    /// themselves may differ.
    #[allow(dead_code, reason = "for tests")]
    pub(crate) fn differs(&self, one: &[u8], other: &[u8]) -> Option<usize> {
        let memory = self.memory as usize..self.memory as usize + PersistentSteps::MEMORY_BYTES as usize;
        let compared = (0..self.workspace as usize).filter(|at| !memory.contains(at));
        compared.into_iter().find(|at| one[*at] != other[*at])
    }
}
