//! Initial weights.

use crate::settings::InitMode;
use chacha20::ChaCha8Rng;
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal, StandardUniform};

const NORMAL_DEVIATION: f64 = 0.05;

/// Weights of one layer, `[outputs, inputs]` row by row. The same seed and layer give the same bits.
#[must_use]
pub fn weights(mode: InitMode, seed: u64, layer: u32, outputs: u32, inputs: u32) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    // Streams of one generator never overlap, so each layer has numbers of its own.
    rng.set_stream(1 + u64::from(layer));
    let count = outputs as usize * inputs as usize;
    let normal = |rng: &mut ChaCha8Rng, deviation: f64| -> Vec<f32> {
        // CAST: weights are kept in f32.
        (0..count).map(|_| (deviation * Distribution::<f64>::sample(&StandardNormal, rng)) as f32).collect()
    };
    match mode {
        InitMode::Normal => normal(&mut rng, NORMAL_DEVIATION),
        InitMode::Kaiming => normal(&mut rng, (2.0 / f64::from(inputs)).sqrt()),
        InitMode::Xavier => {
            let bound = (6.0 / (f64::from(inputs) + f64::from(outputs))).sqrt();
            // CAST: weights are kept in f32.
            let sample = |rng: &mut ChaCha8Rng| -> f64 { StandardUniform.sample(rng) };
            (0..count).map(|_| (bound * (2.0 * sample(&mut rng) - 1.0)) as f32).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f32]) -> (f64, f64) {
        let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, variance.sqrt())
    }

    #[test]
    fn deviations_are_those_of_the_papers() {
        let (inputs, outputs) = (300, 200);
        let xavier = (2.0 / f64::from(inputs + outputs)).sqrt();
        let kaiming = (2.0 / f64::from(inputs)).sqrt();
        for (mode, expected) in [(InitMode::Normal, 0.05), (InitMode::Xavier, xavier), (InitMode::Kaiming, kaiming)] {
            let (mean, deviation) = moments(&weights(mode, 7, 0, outputs, inputs));
            assert!(mean.abs() < 0.02 * expected, "{mode:?}: mean {mean}");
            assert!((deviation / expected - 1.0).abs() < 0.02, "{mode:?}: {deviation} instead of {expected}");
        }
    }

    #[test]
    fn seeds_and_layers_differ_and_repeat() {
        let draw = |seed, layer| weights(InitMode::Kaiming, seed, layer, 4, 4);
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(2, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
    }
}
