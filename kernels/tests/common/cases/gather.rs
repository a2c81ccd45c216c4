//! Gathered batches.

use bytemuck::Pod;
use kernels::{Element, GatherLabels, GatherRows, SourceElement};

use super::{Data, area, case, exact, exact_rows, input, rounded};
use crate::common::Case;

const SCALE: f32 = 1.0 / 255.0 / 0.3081;
const SHIFT: f32 = -0.1307 / 0.3081;

/// With a cursor: rows of a full batch beyond the launch's rows, and the number of the step.
const EXTRA_ROWS: u32 = 3;
const STEP: u32 = 2;

/// The rows that a case gathers.
#[derive(Clone, Copy)]
pub(crate) struct Selection {
    pub(crate) rows: u32,
    pub(crate) source_rows: u32,
    pub(crate) cursor: bool,
}

impl Selection {
    fn batch(self) -> u32 {
        self.rows + EXTRA_ROWS
    }

    /// The order of the data as passed to the launch, and the part of it that the launch reads.
    fn indices(self, data: &mut Data) -> (Vec<u32>, Vec<u32>) {
        if !self.cursor {
            let indices = data.below(self.rows.into(), self.source_rows);
            return (indices.clone(), indices);
        }
        let order = data.below(u64::from(STEP + 1) * u64::from(self.batch()), self.source_rows);
        let first = (STEP * self.batch()) as usize;
        let batch_indices = order[first..first + self.rows as usize].to_vec();
        (order, batch_indices)
    }

    /// Indices of the buffers of which a part is read: the data, and with a cursor their order.
    fn selected_buffers(self) -> Vec<usize> {
        if self.cursor { vec![0, 1] } else { vec![0] }
    }

    fn label(self, shape: &str) -> String {
        format!("{shape} of {}{}", self.source_rows, if self.cursor { " at a cursor" } else { "" })
    }
}

/// Rows of `cols` elements at `indices`, scaled.
fn gathered_rows(source: &[f32], indices: &[u32], cols: u32) -> Vec<f32> {
    let row = |&index: &u32| &source[index as usize * cols as usize..][..cols as usize];
    indices.iter().flat_map(row).map(|value| value.mul_add(SCALE, SHIFT)).collect()
}

pub(crate) fn gather_rows_u8(element: Element, selection: Selection, shape: [u32; 2], seed: u64) -> Case {
    gather_rows(SourceElement::U8, Data::bytes, element, selection, shape, seed)
}

pub(crate) fn gather_rows_f32(element: Element, selection: Selection, shape: [u32; 2], seed: u64) -> Case {
    gather_rows(SourceElement::F32, |data, count| data.floats(count, 9.0), element, selection, shape, seed)
}

fn gather_rows<S: Pod + Into<f32>>(
    source_element: SourceElement,
    draw: impl Fn(&mut Data, u64) -> Vec<S>,
    element: Element,
    selection: Selection,
    [cols, pitch]: [u32; 2],
    seed: u64,
) -> Case {
    let Selection { rows, source_rows, cursor } = selection;
    let mut data = Data::new(seed);
    let source = draw(&mut data, area(source_rows, cols));
    let (order, batch_indices) = selection.indices(&mut data);
    let values: Vec<f32> = source.iter().map(|&value| value.into()).collect();
    let out = rounded(element, gathered_rows(&values, &batch_indices, cols));
    let out = exact_rows(element, &out, cols, pitch);
    let buffers = vec![input(&source), input(&order), input(&[STEP]), out];
    let shape = selection.label(&format!("{rows}x{cols} pitch {pitch}"));
    let batch = selection.batch();
    let case = case(&shape, buffers, move |at| GatherRows {
        source_element,
        element,
        rows,
        cols,
        pitch,
        batch,
        source: at[0],
        source_rows,
        indices: at[1],
        cursor: cursor.then(|| at[2]),
        scale: SCALE,
        shift: SHIFT,
        out: at[3],
    });
    Case { selected: selection.selected_buffers(), ..case }
}

pub(crate) fn gather_labels(selection: Selection, seed: u64) -> Case {
    let Selection { rows, source_rows, cursor } = selection;
    let mut data = Data::new(seed);
    let source = data.bytes(source_rows.into());
    let (order, batch_indices) = selection.indices(&mut data);
    let out: Vec<u32> = batch_indices.iter().map(|&index| source[index as usize].into()).collect();
    let buffers = vec![input(&source), input(&order), input(&[STEP]), exact(&out)];
    let batch = selection.batch();
    let case = case(&selection.label(&rows.to_string()), buffers, move |at| GatherLabels {
        rows,
        batch,
        source: at[0],
        source_rows,
        indices: at[1],
        cursor: cursor.then(|| at[2]),
        out: at[3],
    });
    Case { selected: selection.selected_buffers(), ..case }
}
