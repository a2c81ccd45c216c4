//! Batches picked out of a data set.

use kernels::{GatherLabels, GatherRowsF32, GatherRowsU8};

use super::{Data, area, case, exact, input};
use crate::common::Case;

const SCALE: f32 = 1.0 / 255.0 / 0.3081;
const SHIFT: f32 = -0.1307 / 0.3081;

/// Rows of `cols` elements picked by `indices`, scaled.
fn pick(source: &[f32], indices: &[u32], cols: u32) -> Vec<f32> {
    let row = |&index: &u32| &source[index as usize * cols as usize..][..cols as usize];
    indices.iter().flat_map(row).map(|value| value.mul_add(SCALE, SHIFT)).collect()
}

pub(crate) fn gather_rows_u8(rows: u32, cols: u32, source_rows: u32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (source, indices) = (data.bytes(area(source_rows, cols)), data.below(rows.into(), source_rows));
    let out = pick(&source.iter().map(|&byte| byte.into()).collect::<Vec<f32>>(), &indices, cols);
    let buffers = vec![input(&source), input(&indices), exact(&out)];
    case(&format!("{rows}x{cols} of {source_rows}"), buffers, move |at| GatherRowsU8 {
        rows,
        cols,
        source: at[0],
        source_rows,
        indices: at[1],
        scale: SCALE,
        shift: SHIFT,
        out: at[2],
    })
}

pub(crate) fn gather_rows_f32(rows: u32, cols: u32, source_rows: u32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (source, indices) = (data.floats(area(source_rows, cols), 9.0), data.below(rows.into(), source_rows));
    let buffers = vec![input(&source), input(&indices), exact(&pick(&source, &indices, cols))];
    case(&format!("{rows}x{cols} of {source_rows}"), buffers, move |at| GatherRowsF32 {
        rows,
        cols,
        source: at[0],
        source_rows,
        indices: at[1],
        scale: SCALE,
        shift: SHIFT,
        out: at[2],
    })
}

pub(crate) fn gather_labels(rows: u32, source_rows: u32, seed: u64) -> Case {
    let mut data = Data::new(seed);
    let (source, indices) = (data.bytes(source_rows.into()), data.below(rows.into(), source_rows));
    let out: Vec<u32> = indices.iter().map(|&index| source[index as usize].into()).collect();
    let buffers = vec![input(&source), input(&indices), exact(&out)];
    case(&format!("{rows} of {source_rows}"), buffers, move |at| GatherLabels {
        rows,
        source: at[0],
        source_rows,
        indices: at[1],
        out: at[2],
    })
}
