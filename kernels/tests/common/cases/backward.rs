//! The whole way back through a layer in one launch.

use kernels::{LinearBackward, LinearBackwardInput, LinearUpdate, Precision};

use super::linear::{Operand, SEED, label, pitch, product, shared, stored};
use super::{Data, case, input, stored_tolerance, within, within_rows};
use crate::common::{Buffer, Case};

/// Where the layer's input is the mask; or, as variant 1, without a mask and with wider pitches.
pub(crate) fn backward(precision: Precision, shape: [u32; 3], more: u32) -> Case {
    let [rows, inputs, outputs] = shape;
    let (mut data, element, rate) = (Data::new(SEED), precision.element(), 0.037_f32);
    let masked = more == 0;
    let dy = Operand::new(precision, &mut data, rows, outputs, more);
    let x = Operand::new(precision, &mut data, rows, inputs, more);
    let weight = Operand::new(precision, &mut data, outputs, inputs, more);
    let biases = data.floats(outputs.into(), 1.0);

    let sums = product(precision, &dy.values, &weight.transposed(), outputs);
    let dx = sums.into_iter().zip(&x.stored).map(
        |(sum, &x)| {
            if masked && x <= 0.0 { (0.0, 0.0) } else { stored(element, sum) }
        },
    );
    let step = |(&from, (sum, allowed)): (&f32, (f64, f64))| {
        let rate = f64::from(rate);
        stored(kernels::Element::F32, (f64::from(from) - rate * sum, rate * allowed))
    };
    let stepped = weight.stored.iter().zip(product(precision, &dy.transposed(), &x.transposed(), rows)).map(step);
    let stepped = stepped.map(|(value, allowed)| (value, allowed + stored_tolerance(element, value)));
    let bias = within(biases.iter().zip(dy.column_sums()).map(step).collect());

    let dx_pitch = pitch(element, inputs, more);
    let mut buffers = vec![
        dy.buffer(),
        x.buffer(),
        Buffer { before: weight.buffer().before, ..within_rows(element, stepped.collect(), inputs, weight.pitch) },
        Buffer { before: input(&biases).before, ..bias },
        within_rows(element, dx.collect(), inputs, dx_pitch),
    ];
    let (dy_pitch, x_pitch, weight_pitch) = (dy.pitch, x.pitch, weight.pitch);
    let build = move |at: &[u64]| {
        let input = LinearBackwardInput {
            precision,
            rows,
            inputs,
            outputs,
            dy: at[0],
            dy_pitch,
            weight: at[2],
            weight_pitch,
            mask: masked.then(|| at[1]),
            dx: at[4],
            dx_pitch,
            workspace: at[5],
            tickets: at[6],
        };
        let update = LinearUpdate {
            precision,
            rows,
            inputs,
            outputs,
            dy: at[0],
            dy_pitch,
            x: at[1],
            x_pitch,
            rate,
            weight: at[2],
            weight_pitch,
            master: None,
            bias: at[3],
            workspace: at[7],
            tickets: at[8],
        };
        LinearBackward { input, update }
    };
    let needs = build(&[0; 9]);
    buffers.extend(shared(needs.workspace_bytes(), needs.tickets()));
    buffers.extend(shared(needs.update.workspace_bytes(), needs.update.tickets()));
    case(&label(shape, more), buffers, build)
}
